// Where a program's tensors are, and of which type: part of CudaRunner's constructor.
#include <algorithm>

#include "cuda/runner.h"

namespace as {
namespace cuda {
namespace {

constexpr size_t kAlign = 1024;  // bytes: of tensors in the arena

bool is_product(const OpNode& op) { return op.is("linear") || op.is("expert_linear"); }

}  // namespace

int CudaRunner::rows_of(int row_set, int rows, int outputs) const {
  if (row_set == kAllRows) return rows;
  if (row_set == kOutputRows) return outputs;
  const RowSet& formed = program_.row_sets()[row_set];
  return formed.times * rows_of(formed.of, rows, outputs);
}

int CudaRunner::max_rows(int tensor) const {
  return rows_of(program_.tensors()[tensor].rows, limits_.max_rows, limits_.max_outputs);
}

// Whether a tensor is of 16 bits: linears that take it so alone read it, and ops that round make it. Attention has its
// cache's type of these.
bool CudaRunner::in_tiles(int tensor) const {
  bool read = false;
  for (const OpNode& op : program_.ops()) {
    if (op.is("lora") && op.inputs[0] != tensor) continue;  // they read either
    if (has(op.inputs, tensor)) {
      if (!is_product(op) || !weights_.matrix(op.weights[0]).reads_tiles()) return false;
      read = true;
    }
    if (has(op.outputs, tensor) && !op.is("rms_norm") && !op.is("silu_mul") && !op.is("clamped_silu_mul") &&
        !op.is("gelu_tanh_mul") && !(op.is("span_attention") && limits_.cache_half == half_))
      return false;
  }
  return read;
}

// Whether a tensor is float32, and of 16 bits beside that: norms make both at once for products of either type.
bool CudaRunner::in_both(int tensor) const {
  bool tiles = false, values = false;
  for (const OpNode& op : program_.ops()) {
    if (op.is("lora") && op.inputs[0] != tensor) continue;  // they read either
    if (has(op.outputs, tensor) && !op.is("rms_norm")) return false;
    if (has(op.inputs, tensor))
      (is_product(op) && weights_.matrix(op.weights[0]).reads_tiles() ? tiles : values) = true;
  }
  return tiles && values;
}

void CudaRunner::allocate_tensors() {
  const auto& specs = program_.tensors();
  size_t bytes = 0, converted = 0;
  std::vector<size_t> offsets, beside;
  for (int t = 0; t < (int)specs.size(); t++) {
    offsets.push_back(bytes);
    // With adapters, gates and what they gate may lie as pair_rows() has them.
    const int width = adapters_ ? std::max(specs[t].width, paired_rows(specs[t].width)) : specs[t].width;
    const size_t need =
        in_tiles(t) ? tiles_bytes(max_rows(t), specs[t].width) : (size_t)max_rows(t) * width * sizeof(float);
    bytes += (need + kAlign - 1) / kAlign * kAlign;
    beside.push_back(bytes);
    if (in_both(t)) bytes += tiles_bytes(max_rows(t), specs[t].width);
  }
  activations_ = Memory(bytes, "activations", Memory::Where::lent);
  for (int t = 0; t < (int)specs.size(); t++) {
    Tensor tensor{{nullptr, nullptr, specs[t].width, half_}, specs[t].rows};
    char* data = activations_.as() + offsets[t];
    if (in_tiles(t)) tensor.rows.tiles = reinterpret_cast<uint16_t*>(data);
    else tensor.rows.values = reinterpret_cast<float*>(data);
    if (in_both(t)) tensor.rows.tiles = reinterpret_cast<uint16_t*>(activations_.as() + beside[t]);
    tensors_.push_back(tensor);
  }
  size_t rotary = 0, widened = 0, bytes_of_rows = 0, inner = 0;
  for (const OpNode& op : program_.ops())
    if (op.is("lora") && adapters_)
      inner = std::max(inner, (size_t)max_rows(op.inputs[0]) * kMostTargets *
                                  low_rank_parts(in(op, 1).rows.width, adapters_->limits.halves) *
                                  whole_ranks(adapters_->limits.max_rank));
  const std::vector<OpNode> ops = ops_of(false);
  for (size_t i = 0; i < ops.size(); i++) {
    const OpNode& op = ops[i];
    if (op.is("rotary_table")) rotary += (size_t)limits_.max_rows * op.integer("rotary_dim") * sizeof(float);
    if (is_product(op) && weights_.matrix(op.weights[0]).takes_tiles() && !in(op).rows.tiles)
      converted = std::max(converted, tiles_bytes(max_rows(op.inputs[0]), in(op).rows.width));
    if (!op.is("linear")) continue;
    const Matrix& w = weights_.matrix(op.weights[0]);
    if (w.takes_bytes()) bytes_of_rows = std::max(bytes_of_rows, byte_rows_bytes(max_rows(op.inputs[0]), w.k));
    if (w.kind != Kind::codes) continue;
    const bool gated = is_gated(ops, i);
    widened = std::max(widened, widened_bytes(gated ? paired_rows(w.n) : w.n, w.k, gated, max_rows(op.inputs[0])));
  }
  rotary_memory_ = Memory(rotary, "rotary tables");
  tiles_ = Memory(converted, "activations of 16 bits");
  widened_ = Memory(widened, "widened weights", Memory::Where::lent);
  inner_ = Memory(inner * sizeof(float), "adapters' products");
  byte_rows_ = Memory(bytes_of_rows, "quantized activations");
}

}  // namespace cuda
}  // namespace as
