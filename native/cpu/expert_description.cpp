// Describes the experts of a rank for the GPU of the model's rank (comm/expert_panels.h).
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "comm/expert_panels.h"
#include "cpu/executor.h"

namespace as {
namespace {

ExpertGate gate_of(const OpNode& op) {
  if (op.is(Op::silu_mul)) return ExpertGate::silu;
  if (op.is(Op::gelu_tanh_mul)) return ExpertGate::gelu_tanh;
  if (op.is(Op::gelu_mul)) return ExpertGate::gelu;
  if (op.is(Op::clamped_silu_mul)) return ExpertGate::clamped_silu;
  throw std::invalid_argument(std::string("experts with op ") + op.spec->name + " are computed by CPUs alone");
}

// Collects a description and what follows its layers.
class Describer {
 public:
  Describer(const Weights& weights, const SharedBlock& matrices, size_t layers)
      : weights_(weights), matrices_(matrices), rest_at_(sizeof(ExpertDescription) + layers * sizeof(ExpertLayer)) {}

  ExpertStack stack(const OpNode& op) {
    ExpertStack stack;
    const int id = op.weights[0];
    stack.layout = weights_.matrix(id);
    if (!stack.layout.planes)
      throw std::invalid_argument("experts in floats have no exact recipe and are computed by CPUs alone");
    const char* const data = stack.layout.data;
    if (data < matrices_.data() || data >= matrices_.data() + matrices_.size())
      throw std::invalid_argument("experts outside of the memory that ranks share");
    stack.panels = data - matrices_.data();
    if (stack.layout.order) stack.order = add(stack.layout.order, stack.layout.k * sizeof(int));
    if (op.weights.size() > 1) {
      const std::vector<float>& bias = weights_.vector(op.weights[1]);
      stack.bias = add(bias.data(), bias.size() * sizeof(float));
    }
    stack.layout.data = nullptr, stack.layout.order = nullptr;
    return stack;
  }
  size_t bytes() const { return rest_at_ + rest_.size(); }
  void write_rest(char* to) const { std::memcpy(to + rest_at_, rest_.data(), rest_.size()); }

 private:
  uint64_t add(const void* values, size_t bytes) {
    const uint64_t at = rest_at_ + rest_.size();
    const char* from = static_cast<const char*>(values);
    rest_.insert(rest_.end(), from, from + bytes);
    rest_.resize((rest_.size() + 7) / 8 * 8);
    return at;
  }

  const Weights& weights_;
  const SharedBlock& matrices_;
  const size_t rest_at_;
  std::vector<char> rest_;
};

}  // namespace

std::string Executor::describe_experts() {
  const SharedBlock* const matrices = weights_.shared();
  if (!matrices) throw std::invalid_argument("share_matrices() comes before matrices");
  const std::vector<OpNode>& ops = program_.ops();
  std::vector<size_t> firsts;  // ops of layers
  for (size_t i = 0; i < ops.size(); i++)
    if (ops[i].is(Op::dispatched_choices)) firsts.push_back(i + 1);
  if (firsts.empty()) throw std::invalid_argument("a program without layers of experts");
  Describer describer(weights_, *matrices, firsts.size());
  std::vector<ExpertLayer> layers;
  for (const size_t i : firsts) {
    const bool entries = i + 3 < ops.size() && ops[i + 3].is(Op::return_sums);  // these are returned, not sums
    for (size_t j = 0; j < (entries ? 4 : 5); j++) {
      const Op wanted[] = {Op::expert_linear, Op::silu_mul, Op::expert_linear, Op::combine_experts, Op::return_sums};
      if (i + j >= ops.size() || (j != 1 && !ops[i + j].is(wanted[j + (entries && j == 3)])))
        throw std::invalid_argument("a layer of experts with other ops than two products are computed by CPUs alone");
    }
    const OpNode &first = ops[i], &gate = ops[i + 1];
    ExpertLayer layer;
    layer.begin = first.integer("expert_begin"), layer.end = layer.begin + first.integer("experts");
    layer.gate = gate_of(gate);
    if (layer.gate == ExpertGate::clamped_silu)
      layer.alpha = (float)gate.number("alpha"), layer.limit = (float)gate.number("limit");
    layer.gate_up = describer.stack(first), layer.down = describer.stack(ops[i + 2]);
    layers.push_back(layer);
  }
  ExpertDescription description;
  description.layers = (int64_t)layers.size();
  for (int i = 0; i < kTimings; i++)
    for (const size_t op : {firsts[0], firsts[0] + 2})
      description.seconds[i] += time_expert(ops[op].weights[0], kTimedRows[i]);
  description_ = std::make_unique<SharedBlock>(describer.bytes(), "a description of experts");
  char* const to = description_->data();
  std::memcpy(to, &description, sizeof description);
  std::memcpy(to + sizeof description, layers.data(), layers.size() * sizeof(ExpertLayer));
  describer.write_rest(to);
  return ExpertPanels::address(*matrices, weights_.shared_bytes(), *description_);
}

// Seconds that an expert's product with so many rows takes, its weights read from memory.
double Executor::time_expert(int id, int rows) {
  // Enough experts to leave the cache, and for few waits of threads; fewer if their rows take longer.
  const int experts = std::min(weights_.experts(id), std::clamp(128 / rows, 1, 16));
  const std::vector<float> x((size_t)rows * weights_.matrix(id).inputs, 1.0f);
  std::vector<float> y((size_t)rows * weights_.matrix(id).n);
  double least = 0;
  for (int i = 0; i < 2; i++) {
    const auto began = std::chrono::steady_clock::now();
    multiply(id, experts, x.data(), nullptr, y.data(), rows);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (!i || seconds < least) least = seconds;
  }
  return least / experts;
}

}  // namespace as
