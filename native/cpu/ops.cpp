// Ops that work row by row, and linear. Threads take contiguous rows (linear: panels of output features).
#include <algorithm>

#include "common/exact.h"
#include "cpu/executor.h"

namespace as {

// Cosines and sines of every row's position, in single precision as transformers has them: angle = position * inverse
// frequency rounded to float, the functions themselves exact. Dynamic NTK (modeling_rope_utils): the base grows with
// the length, which for a row is that of its prompt, or its own position's once that is larger; so it does not depend
// on chunks.
void Executor::rotary_table(const Op&, int thread) {
  const int half = rotary_.dim / 2;
  const auto [r0, r1] = part((long)rows_.size(), thread, pool_.size());
  std::vector<float> grown(rotary_.dynamic ? half : 0);
  int grown_length = -1;
  for (int r = r0; r < r1; r++) {
    const float* inverse = rotary_.inverse_frequencies.data();
    if (rotary_.dynamic) {
      const int length = std::max(slots_[rows_[r].slot].sampling.prompt_len, rows_[r].position + 1);
      if (length > rotary_.original_max) {
        if (length != grown_length) {
          const double base =
              rotary_.base * exact::pow(rotary_.factor * length / rotary_.original_max - (rotary_.factor - 1),
                                        (double)rotary_.dim / (rotary_.dim - 2));
          for (int i = 0; i < half; i++)
            grown[i] = 1.0f / (float)exact::pow(base, (double)((float)(2 * i) / (float)rotary_.dim));
          grown_length = length;
        }
        inverse = grown.data();
      }
    }
    for (int i = 0; i < half; i++) {
      const exact::Angle angle = exact::cos_sin((float)rows_[r].position * inverse[i]);
      cosine_[(size_t)r * half + i] = (float)angle.cosine * rotary_.attention_factor;
      sine_[(size_t)r * half + i] = (float)angle.sine * rotary_.attention_factor;
    }
  }
}

void Executor::embedding(const Op& op, int thread) {
  const Packed& m = matrices_[op.weights[0]].packed;
  const auto [r0, r1] = my_rows(out(op), thread);
  for (int r = r0; r < r1; r++) {
    float* y = out(op).data + (size_t)r * m.k;
    const long id = (long)rows_[r].token - op.vocab_begin;
    if (id < 0 || id >= m.n) {  // another rank's
      std::fill_n(y, m.k, 0.0f);
      continue;
    }
    k_.read_row(m, id, y);
  }
}

// A row; prepared at once for the linear that the norm feeds, which may make the float32 row itself unnecessary.
void Executor::norm_row(const Op& op, int row, int thread) {
  const int n = in(op).width;
  float* y = out(op).data + (size_t)row * n;
  const Packed* next = op.feeds < 0 ? nullptr : &matrices_[ops_[op.feeds].weights[0]].packed;
  if (next && (next->pairs || next->planes)) y = norms_.as<float>() + (size_t)thread * n;
  k_.rms_norm(in(op).data + (size_t)row * n, vectors_[op.weights[0]].data(), y, n, op.eps);
  if (next) k_.prepare(*next, y, prepared_.as() + row * k_.prepared(*next).bytes);
}

void Executor::rms_norm(const Op& op, int thread) {
  const auto [r0, r1] = my_rows(in(op), thread);
  for (int r = r0; r < r1; r++) norm_row(op, r, thread);
}

void Executor::linear(const Op& op, int thread) {
  const float* bias = op.weights.size() > 1 ? vectors_[op.weights[1]].data() : nullptr;
  multiply_on(thread, matrices_[op.weights[0]].packed, in(op).data, bias, out(op).data, rows_of(in(op)),
              ready_rows(op));
}

// Room for what a quantized matrix needs of `rows` rows, or of one row in a copy for each thread.
size_t Executor::prepared_bytes(const Packed& m, int rows) const {
  return k_.prepared(m).bytes * std::max(rows, pool_.size());
}

// Rows x [rows, m.k] as the kernels take them, `ready` or prepared here: threads share them out, but one row each
// thread prepares for itself, which takes less than waiting for each other. False: another thread has failed.
bool Executor::activations(int thread, const Packed& m, const float* x, int rows, const char* ready, Activations& a) {
  a = {x, m.k, ready ? ready : prepared_.as(), k_.prepared(m).bytes};
  if (ready || !a.stride) return true;
  if (rows == 1) {
    char* own = prepared_.as() + thread * a.stride;
    k_.prepare(m, x, own);
    a.prepared = own;
    return true;
  }
  const auto [r0, r1] = part(rows, thread, pool_.size());
  for (int r = r0; r < r1; r++) k_.prepare(m, x + (size_t)r * m.k, prepared_.as() + r * a.stride);
  return pool_.barrier();
}

// Few rows: panels are shared out. Many: rows too, so that threads get parts as equal as can be.
Executor::Share Executor::share_of(int thread, int panels, int rows) const {
  constexpr int kRowsTogether = 32;
  const int row_tiles = (rows + kRowsTogether - 1) / kRowsTogether, threads = pool_.size();
  int row_parts = 1;
  long least = 0;
  for (int parts = 1; parts <= std::min(threads, row_tiles / 4 + 1); parts++) {
    if (threads % parts) continue;
    const long panel_parts = threads / parts;
    const long most = (panels + panel_parts - 1) / panel_parts * ((row_tiles + parts - 1) / parts);
    if (parts == 1 || most < least) least = most, row_parts = parts;
  }
  const auto [p0, p1] = part(panels, thread / row_parts, threads / row_parts);
  const auto [t0, t1] = part(row_tiles, thread % row_parts, row_parts);
  return {p0, p1, t0 * kRowsTogether, std::min(rows, t1 * kRowsTogether)};
}

// One thread's part of a linear. ready: the prepared rows, or null.
void Executor::multiply_on(int thread, const Packed& m, const float* x, const float* bias, float* y, int rows,
                           const char* ready) {
  Activations a;
  if (!activations(thread, m, x, rows, ready, a)) return;
  const auto [p0, p1, r0, r1] = share_of(thread, m.panels(), rows);
  if (r0 >= r1 || p0 >= p1) return;
  a.x += (size_t)r0 * m.k, a.prepared += r0 * a.stride;
  k_.matmul(m, a, bias, y + (size_t)r0 * m.n, m.n, r1 - r0, p0, p1);
}

void Executor::multiply(int id, const float* x, const float* bias, float* y, int rows) {
  const Packed& m = matrices_.at(id).packed;
  const size_t need = prepared_bytes(m, rows);
  if (need > prepared_.size()) prepared_ = Buffer(need, "prepared activations");
  pool_.run([&](int thread) { multiply_on(thread, m, x, bias, y, rows, nullptr); });
}

void Executor::read_row(int id, long row, float* out) const {
  const Packed& m = matrices_.at(id).packed;
  if (row < 0 || row >= m.n)
    throw std::invalid_argument("row " + std::to_string(row) + " is not in 0..." + std::to_string(m.n - 1));
  k_.read_row(m, row, out);
}

void Executor::head_norm(const Op& op, int thread) {
  const auto [r0, r1] = my_rows(in(op), thread);
  for (int r = r0; r < r1; r++)
    for (int h = 0; h < op.heads; h++) {
      float* x = in(op).data + (size_t)r * in(op).width + op.offset + (size_t)h * op.head_dim;
      k_.rms_norm(x, vectors_[op.weights[0]].data(), x, op.head_dim, op.eps);
    }
}

void Executor::rope(const Op& op, int thread) {
  const int half = op.rotary_dim / 2;
  const auto [r0, r1] = my_rows(in(op), thread);
  for (int r = r0; r < r1; r++)
    for (int h = 0; h < op.heads; h++)
      k_.rope(in(op).data + (size_t)r * in(op).width + op.offset + (size_t)h * op.head_dim,
              cosine_.data() + (size_t)r * half, sine_.data() + (size_t)r * half, half);
}

void Executor::silu_mul(const Op& op, int thread) {
  const int n = out(op).width, rows = rows_of(out(op));
  const auto [c0, c1] = rows == 1 ? part(n, thread, pool_.size()) : std::pair<int, int>(0, n);
  const auto [r0, r1] = rows == 1 ? std::pair<int, int>(0, 1) : my_rows(out(op), thread);
  for (int r = r0; r < r1; r++) {
    const float* gate = in(op).data + (size_t)r * 2 * n;
    k_.silu_mul(gate + c0, gate + n + c0, out(op).data + (size_t)r * n + c0, c1 - c0);
  }
}

void Executor::add(const Op& op, int thread) {
  const int n = in(op).width;
  const auto [r0, r1] = my_rows(in(op), thread);
  if (r1 > r0) k_.add(in(op).data + (size_t)r0 * n, in(op, 1).data + (size_t)r0 * n, (size_t)(r1 - r0) * n);
}

void Executor::select_rows(const Op& op, int thread) {
  const int n = in(op).width;
  const auto [r0, r1] = my_rows(out(op), thread);
  for (int r = r0; r < r1; r++) std::copy_n(in(op).data + (size_t)logit_rows_[r] * n, n, out(op).data + (size_t)r * n);
}

}  // namespace as
