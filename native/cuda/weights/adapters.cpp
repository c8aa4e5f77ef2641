#include "cuda/weights/adapters.h"

#include <cstring>
#include <stdexcept>

#include "cuda/weights/dtype16.h"

namespace as::cuda {
namespace {

constexpr size_t kAlign = 16;  // bytes: alignment of matrices

float value_of(const HostRows& rows, int64_t row, int64_t column) {
  const int64_t at = row * rows.stride + rows.column + column;
  if (rows.source == SourceType::f32) return static_cast<const float*>(rows.data)[at];
  return widened(static_cast<const uint16_t*>(rows.data)[at],
                 rows.source == SourceType::bf16 ? DType16::bf16 : DType16::f16);
}

int64_t not_fitting(const HostRows& rows, DType16 type) {
  int64_t found = 0;
  for (int64_t row = 0; row < rows.count; row++)
    for (int64_t column = 0; column < rows.columns; column++) found += !fits(value_of(rows, row, column), type);
  return found;
}

}  // namespace

size_t adapter_bytes(int rank, int inputs, int columns, bool is_dtype16) {
  if (is_dtype16) return (size_t)whole_ranks(rank) * (lora_stride(inputs) + columns) * sizeof(uint16_t);
  return (size_t)rank * (lora_stride(inputs) + lora_stride(columns)) * sizeof(float);
}

template <typename Value>
size_t Adapter::put(int rows, int columns, int whole_rows, int stride, const Value& value) {
  const size_t at = bytes_.size(), each = limits_.is_dtype16 ? sizeof(uint16_t) : sizeof(float);
  bytes_.resize(at + ((size_t)whole_rows * stride * each + kAlign - 1) / kAlign * kAlign);
  for (int row = 0; row < rows; row++)
    for (int column = 0; column < columns; column++) {
      const float x = value(row, column);
      const size_t place = (size_t)row * stride + column;
      if (limits_.is_dtype16) reinterpret_cast<uint16_t*>(bytes_.data() + at)[place] = rounded(x, limits_.type);
      else reinterpret_cast<float*>(bytes_.data() + at)[place] = x;
    }
  return at;
}

int64_t Adapter::set(int target, const HostRows& a, const HostRows& b, float scale) {
  if (target < 0 || target >= (int)targets_.size() || pairs_[target].rank)
    throw std::invalid_argument("adapter: target " + std::to_string(target) + " of " + std::to_string(targets_.size()) +
                                " is not there, or has its matrices");
  const Target& own = targets_[target];
  const int64_t rank = a.count;
  if (rank < 1 || rank > limits_.max_rank || b.columns != rank || b.count != own.columns || a.columns != own.inputs)
    throw std::invalid_argument("adapter: matrices of " + std::to_string(rank) + " x " + std::to_string(a.columns) +
                                " and " + std::to_string(b.count) + " x " + std::to_string(b.columns) + "; target " +
                                std::to_string(target) + " has " + std::to_string(own.inputs) + " inputs and " +
                                std::to_string(own.columns) + " columns, ranks are at most " +
                                std::to_string(limits_.max_rank));
  Pair& pair = pairs_[target];
  const int ranks = limits_.is_dtype16 ? whole_ranks((int)rank) : (int)rank;
  pair.a = put((int)rank, own.inputs, ranks, lora_stride(own.inputs),
               [&](int row, int column) { return value_of(a, row, column); });
  if (limits_.is_dtype16)
    pair.b =
        put(own.columns, (int)rank, own.columns, ranks, [&](int row, int column) { return value_of(b, row, column); });
  else
    pair.b = put((int)rank, own.columns, ranks, lora_stride(own.columns),
                 [&](int row, int column) { return value_of(b, column, row); });
  pair.rank = (int)rank, pair.scale = scale;
  return not_fitting(a, limits_.type) + not_fitting(b, limits_.type);
}

std::vector<LoraPair> Adapter::upload() {
  memory_ = Memory(bytes_.size(), "an adapter");
  if (!bytes_.empty())
    check(cudaMemcpy(memory_.as(), bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice), "copying an adapter");
  bytes_ = {};
  std::vector<LoraPair> found(pairs_.size());
  for (size_t i = 0; i < pairs_.size(); i++)
    if (const Pair& pair = pairs_[i]; pair.rank)
      found[i] = {memory_.as() + pair.a, memory_.as() + pair.b, pair.rank, pair.scale};
  return found;
}

Adapters::Adapters(const Device& device, const AdapterLimits& limits, const Program& program)
    : limits(limits), device_(device), loaded_(limits.count) {
  for (const OpNode& op : program.ops()) {
    if (!op.adapts()) continue;
    const size_t begin = op.integer("target"), end = begin + (op.is(Op::expert_lora) ? op.integer("experts") : 1);
    if (end > targets_.size()) targets_.resize(end);
    for (size_t target = begin; target < end; target++)
      targets_[target] = {program.in(op, 1).width, op.integer("columns")};
  }
  device.use();
  table_ = Memory(limits.count * targets_.size() * sizeof(LoraPair), "a table of adapters");
}

void Adapters::set(int index, std::shared_ptr<Adapter> adapter) {
  device_.use();
  const std::vector<LoraPair> row = adapter ? adapter->upload() : std::vector<LoraPair>(targets_.size());
  if (!row.empty())
    check(cudaMemcpy(table_.as<LoraPair>() + index * targets_.size(), row.data(), row.size() * sizeof(LoraPair),
                     cudaMemcpyHostToDevice),
          "copying an adapter");
  // Copies may still be running, and the steps' stream does not wait for them.
  check(cudaStreamSynchronize(nullptr), "copying an adapter");
  loaded_.at(index) = std::move(adapter);
}

}  // namespace as::cuda
