// What each op of a step costs: time, and the bytes and operations that its shapes and rows make necessary.
//
// Bytes are those that have to be read or written at least once, wherever they are: weights as packed, inputs, outputs, and
// of the cache what the step's sequences hold. Operations are additions, multiplications, divisions and exponentials.
#include <algorithm>

#include "executor.h"

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

void Executor::record(Op& op, double seconds) const {
  op.least = op.count ? std::min(op.least, seconds) : seconds;
  op.most = std::max(op.most, seconds);
  op.total += seconds;
  op.count++;
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
      moved = 2.0 * rows_.size() * op.heads * op.head_dim * sizeof(float), operations = 4.0 * rows_.size() * op.heads * op.head_dim;
      break;
    case OpType::rope:
      moved = 2.0 * rows_.size() * op.heads * op.rotary_dim * sizeof(float), operations = 3.0 * rows_.size() * op.heads * op.rotary_dim;
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
  op.bytes += moved, op.operations += operations;
}

void Executor::set_profiling(bool on) {
  profiling_ = on;
  if (!on) return;
  for (Op& op : ops_) op.count = 0, op.total = op.least = op.most = op.bytes = op.operations = 0;
}

}  // namespace as
