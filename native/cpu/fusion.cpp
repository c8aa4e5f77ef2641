// Ops that a step computes together, so that what is between them need not pass through memory, or wait for all
// threads.
//
//   add, rms_norm               row by row
//   rms_norm, linear            the norm prepares each row for the linear as soon as it has it
//   linear, silu_mul            many rows: a panel of gate and one of up give n columns instead of 2n
//   linear, silu_mul, linear    many rows: these columns at once in bfloat16, where the second linear takes its rows so
//
// Every value is made by the same operations in the same order as by the ops one by one: the bits are the same, so
// fusing may depend on the number of rows.
#include <algorithm>

#include "cpu/executor.h"

namespace as {

// Fewer rows are bound by reading weights.
constexpr int kManyRows = 33;

// Whether op `reader` alone reads what op `writer` before it writes to a tensor.
bool Executor::only_reader(int tensor, int writer, int reader) const {
  for (int i = writer + 1; i < (int)ops_.size(); i++) {
    const auto& reads = ops_[i].inputs;
    if (i != reader && std::find(reads.begin(), reads.end(), tensor) != reads.end()) return false;
    const auto& writes = ops_[i].outputs;
    if (i >= reader && std::find(writes.begin(), writes.end(), tensor) != writes.end()) return true;
  }
  return true;
}

void Executor::fuse() {
  auto follows = [&](int i, OpType type) {
    return i + 1 < (int)ops_.size() && ops_[i + 1].type == type && ops_[i + 1].inputs[0] == ops_[i].outputs[0];
  };
  for (int i = 0; i < (int)ops_.size(); i++) {
    Op& op = ops_[i];
    op.gated = op.normed = false, op.feeds = op.fed_by = -1;
    if (op.type == OpType::add) op.normed = op.outputs[0] == op.inputs[0] && follows(i, OpType::rms_norm);
    if (op.type == OpType::linear && follows(i, OpType::silu_mul)) {
      const Packed& m = matrices_[op.weights[0]].packed;
      op.gated = m.n % (2 * m.panel) == 0 && only_reader(op.outputs[0], i, i + 1);
    }
  }
  for (int i = 0; i < (int)ops_.size(); i++) {
    Op& op = ops_[i];
    const int last = op.gated ? i + 1 : i;  // the op that writes the linear's input
    if ((op.type != OpType::rms_norm && !op.gated) || !follows(last, OpType::linear) ||
        !only_reader(ops_[last].outputs[0], last, last + 1))
      continue;
    const Packed& m = matrices_[ops_[last + 1].weights[0]].packed;
    if (op.gated ? !m.pairs : !k_.prepared(m).bytes) continue;
    op.feeds = last + 1, ops_[last + 1].fed_by = i;
  }
}

// How many of the ops after this one it computes too, in this step.
int Executor::within(const Op& op) const { return op.normed || (op.gated && rows_of(in(op)) >= kManyRows) ? 1 : 0; }

// Room for the rows that gated linears prepare.
size_t Executor::fed_bytes() const {
  size_t bytes = 0;
  for (const Op& op : ops_)
    if (op.gated && op.feeds >= 0)
      bytes = std::max(bytes, k_.prepared(matrices_[ops_[op.feeds].weights[0]].packed).bytes *
                                  (in(op).logit_rows ? max_slots_ : max_rows_));
  return bytes;
}

// The rows that an earlier op has prepared for this linear in this step, or null.
const char* Executor::ready_rows(const Op& op) const {
  if (op.fed_by < 0) return nullptr;
  const Op& by = ops_[op.fed_by];
  if (by.type == OpType::rms_norm) return prepared_.as();
  return within(by) ? gated_.as() : nullptr;
}

void Executor::gated_linear(const Op& op, int thread) {
  const Packed& m = matrices_[op.weights[0]].packed;
  const float* bias = op.weights.size() > 1 ? vectors_[op.weights[1]].data() : nullptr;
  const int rows = rows_of(in(op)), n = m.n / 2;
  Activations a;
  if (!activations(thread, m, in(op).data, rows, ready_rows(op), a)) return;
  const auto [p0, p1, r0, r1] = share_of(thread, m.panels() / 2, rows);
  if (r0 >= r1 || p0 >= p1) return;
  a.x += (size_t)r0 * m.k, a.prepared += r0 * a.stride;
  GatedOutput to{out((&op)[1]).data + (size_t)r0 * n, n, nullptr, 0};
  if (op.feeds >= 0) {
    to.rounded_stride = k_.prepared(matrices_[ops_[op.feeds].weights[0]].packed).bytes;
    to.rounded = gated_.as() + r0 * to.rounded_stride;
  }
  k_.matmul_gated(m, a, bias, to, r1 - r0, p0, p1);
}

void Executor::add_norm(const Op& op, int thread) {
  const int n = in(op).width;
  const auto [r0, r1] = my_rows(in(op), thread);
  for (int r = r0; r < r1; r++) {
    k_.add(in(op).data + (size_t)r * n, in(op, 1).data + (size_t)r * n, n);
    norm_row((&op)[1], r, thread);
  }
}

}  // namespace as
