// What each op of a step costs: time, and the bytes and operations that its shapes and rows make necessary.
//
// Bytes are those that have to be read or written at least once, wherever they are: weights as packed, inputs, outputs,
// and of the cache what the step's sequences hold. Operations are additions, multiplications, divisions and
// exponentials. Ops that were computed together (fusion.cpp) are counted as one, under the first: its bytes are without
// what lies between.
#include <algorithm>

#include "cpu/executor.h"

namespace as {

void Executor::measure_attention(const Plan& plan) {
  const double token_bytes = (double)layout_.bytes / span_size_ * shape_.kv_heads;  // keys and values, one layer
  double seen = 0, context = 0;
  for (const Work& w : plan.work) {
    seen += (double)w.count * w.start + 0.5 * w.count * (w.count + 1.0);  // pairs of a query row and a token it sees
    context += w.start + w.count;
  }
  attention_operations_ = seen * shape_.q_heads * 4 * shape_.head_dim;
  attention_bytes_ = (context + (double)rows_.size()) * token_bytes;  // read, and the new ones written
}

// Bytes and operations of one op alone.
std::pair<double, double> Executor::cost(const Op& op) const {
  auto values = [&](int id) { return (double)rows_of(tensors_[id]) * tensors_[id].width; };
  double moved = 0, operations = 0;
  for (int t : op.inputs) moved += values(t);
  for (int t : op.outputs) moved += values(t);
  moved *= sizeof(float);
  switch (op.type) {
    case OpType::rotary_table:
      moved = (double)rows_.size() * rotary_.dim * sizeof(float), operations = (double)rows_.size() * rotary_.dim;
      break;
    case OpType::embedding: {
      const Matrix& m = matrices_[op.weights[0]];
      moved += (double)rows_.size() * matrix_bytes(m.packed) / m.packed.n;
      break;
    }
    case OpType::all_reduce:
      moved = world_ > 1 ? moved * world_ : 0, operations = values(op.inputs[0]) * (world_ - 1);
      break;
    case OpType::rms_norm:
      operations = 4 * values(op.inputs[0]);
      break;
    case OpType::linear: {
      const Matrix& m = matrices_[op.weights[0]];
      moved += (double)matrix_bytes(m.packed);
      operations = 2.0 * m.packed.k * values(op.outputs[0]);
      break;
    }
    case OpType::head_norm:
      moved = 2.0 * rows_.size() * op.heads * op.head_dim * sizeof(float),
      operations = 4.0 * rows_.size() * op.heads * op.head_dim;
      break;
    case OpType::rope:
      moved = 2.0 * rows_.size() * op.heads * op.rotary_dim * sizeof(float),
      operations = 3.0 * rows_.size() * op.heads * op.rotary_dim;
      break;
    case OpType::span_attention:
      moved += attention_bytes_, operations = attention_operations_;
      break;
    case OpType::silu_mul:
      operations = 5 * values(op.outputs[0]);
      break;
    case OpType::add:
      operations = values(op.outputs[0]);
      break;
    case OpType::select_rows:
      moved = 2 * values(op.outputs[0]) * sizeof(float);
      break;
    case OpType::sample:
      operations = values(op.inputs[0]);
      break;
  }
  return {moved, operations};
}

void Executor::record(Op& op, int within, double seconds) const {
  Counters& c = within ? op.fused : op.alone;
  c.least = c.count ? std::min(c.least, seconds) : seconds;
  c.most = std::max(c.most, seconds);
  c.total += seconds;
  c.count++;
  auto [moved, operations] = cost(op);
  if (within) {
    const Op& next = (&op)[1];
    const auto more = cost(next);
    const Tensor& between = in(next);
    // An add's sum is written all the same, but not read again; gate and up are neither.
    const double passes = op.type == OpType::add ? 1 : 2;
    moved += more.first - passes * rows_of(between) * between.width * sizeof(float), operations += more.second;
  }
  c.bytes += moved, c.operations += operations;
}

void Executor::set_profiling(bool on) {
  profiling_ = on;
  if (!on) return;
  for (Op& op : ops_) op.alone = op.fused = {};
}

}  // namespace as
