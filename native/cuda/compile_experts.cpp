// Layers of experts become launches: part of CudaRunner's constructor.
#include <algorithm>
#include <climits>
#include <stdexcept>

#include "cuda/kernels/common/shared_limit.h"
#include "cuda/runner.h"

namespace as {
namespace cuda {
namespace {

constexpr int kMostGroups = 32;            // of a router
constexpr int kExpertsShared = 150 << 10;  // bytes of shared memory that their products take, at most
constexpr int kMostNormed = 8192;          // columns of rows that are normed with the same bits by every kernel

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("the CUDA backend has no " + what); }

}  // namespace

// Each row set of entries: what the ops that are computed for it agree on, and its memory.
void CudaRunner::allocate_routings() {
  for (const OpNode& op : program_.ops()) {
    if (!op.is("expert_linear")) continue;
    const int set = out(op).row_set, begin = op.integer("expert_begin"), end = begin + op.integer("experts");
    const Matrix& m = weights_.matrix(op.weights[0]);
    if (m.experts != end - begin)
      throw std::invalid_argument("op expert_linear is for " + std::to_string(end - begin) + " experts, weight " +
                                  std::to_string(op.weights[0]) + " has " + std::to_string(m.experts));
    if (m.takes_bytes()) refuse("experts of other types than float32, bfloat16, float16, int8 and int4");
    if (m.takes_tiles() && most_shared() < kExpertsShared)
      refuse("experts of type bfloat16, float16, int8 and int4 on a GPU whose blocks of threads have less than " +
             std::to_string(kExpertsShared >> 10) + " KiB of shared memory: " + device_.name());
    if (m.takes_tiles() && tiles_bytes(max_rows(op.inputs[0]), m.k) > INT_MAX)  // kernels count their bytes so
      refuse("steps of so many rows of experts: lower max_step_tokens");
    const auto [found, first] = routed_.try_emplace(set, Routed{{}, m.kind, -1, {}});
    Routing& routing = found->second.routing;
    if (!first && (routing.begin != begin || routing.end != end))
      refuse("expert_linear of other experts than those before");
    if (!first && found->second.kind != m.kind) refuse("experts of several types in a layer");
    routing.begin = begin, routing.end = end;
  }
  for (auto& [set, routed] : routed_) {
    const RowSet& formed = program_.row_sets()[set];
    const int rows = rows_of(formed.of, limits_.max_rows, limits_.max_outputs);
    Routing& routing = routed.routing;
    if ((int64_t)rows * formed.times > kLargestCount) refuse("steps of so many rows of experts");
    if (routed.kind == Kind::f32 && rows * formed.times > kMostLaunchRows)
      refuse("steps of more than " + std::to_string(kMostLaunchRows) + " rows of experts in float32");
    routing.top = formed.times;
    const int experts = routing.end - routing.begin;
    routing_memory_.emplace_back(routing_bytes(rows, routing.top, experts), "rows of experts");
    place_routing(routing_memory_.back().as(), rows, experts, routing);
  }
  for (const OpNode& op : program_.ops())
    if (op.is("linear") && weights_.matrix(op.weights[0]).experts != 1)
      throw std::invalid_argument("op linear: weight " + std::to_string(op.weights[0]) + " is a stack of experts");
}

// Whether a tensor is logits of experts, or gates of rows.
bool CudaRunner::is_routing(int tensor) const {
  return std::any_of(program_.ops().begin(), program_.ops().end(), [&](const OpNode& op) {
    return (op.is("router") && op.inputs[0] == tensor) || (op.is("sigmoid_mul") && op.inputs[1] == tensor);
  });
}

Product CudaRunner::logits_of(size_t linear) const {
  const OpNode& op = ops_[linear];
  Product p;
  p.w = weights_.matrix(op.weights[0]), p.bias = vector(op, 1), p.x = in(op).rows, p.y = out(op).rows;
  return p;
}

bool CudaRunner::has_row_kernels_at(size_t router) const {
  if (router + 4 >= ops_.size()) return false;
  const OpNode &op = ops_[router], &up = ops_[router + 1], &gates = ops_[router + 2], &down = ops_[router + 3],
               &sum = ops_[router + 4];
  return up.is("expert_linear") && down.is("expert_linear") && sum.is("combine_experts") &&
         is_gated(ops_, router + 1) && out(up).row_set == out(op).row_set && in(up).row_set == in(op).row_set &&
         in(up).rows.tiles && down.inputs[0] == gates.outputs[0] && out(gates).rows.tiles &&
         sum.inputs[0] == down.outputs[0] && sum.inputs[1] == op.outputs[0] &&
         !read_from(ops_, router + 5, down.outputs[0]) && out(sum).rows.width <= kMostNormed &&
         has_row_kernels(weights_.matrix(up.weights[0]), weights_.matrix(down.weights[0]), device_.queue());
}

bool CudaRunner::norms_with_router(size_t norm) const {
  if (norm + 2 >= ops_.size() || ranks_) return false;  // of several ranks sum_ranks() norms
  const OpNode &op = ops_[norm], &linear = ops_[norm + 1], &router = ops_[norm + 2];
  return op.is("rms_norm") && linear.is("linear") && linear.inputs[0] == op.outputs[0] &&
         op.outputs[0] != op.inputs[0] && router.is("router") && router.inputs[0] == linear.outputs[0] &&
         has_row_kernels_at(norm + 2) && norms_with_logits(logits_of(norm + 1));
}

void CudaRunner::bind_router(size_t i, bool logits) {
  const OpNode& op = ops_[i];
  const Tensor x = in(op), y = out(op);
  const auto found = routed_.find(y.row_set);
  if (found == routed_.end()) refuse("router of rows that no expert_linear takes");
  Routed& routed = found->second;
  Router router;
  router.experts = x.rows.width, router.correction = vector(op, 0);
  router.sigmoid = std::string(op.choice("scores")) == "sigmoid", router.normalized = op.flag("normalized");
  router.scale = (float)op.number("scale");
  router.groups = op.integer("groups"), router.top_groups = op.integer("top_groups");
  if (router.experts > kMostExperts || routed.routing.top > kMostTop || router.groups > kMostGroups)
    refuse("router of " + std::to_string(router.experts) + " experts in " + std::to_string(router.groups) +
           " groups, " + std::to_string(routed.routing.top) + " for a row: at most " + std::to_string(kMostExperts) +
           ", " + std::to_string(kMostGroups) + " and " + std::to_string(kMostTop));
  if (routed.routing.end > router.experts)
    throw std::invalid_argument("op expert_linear: experts " + std::to_string(routed.routing.begin) + "..." +
                                std::to_string(routed.routing.end - 1) + ", the router has " +
                                std::to_string(router.experts));
  // Weights stay beside the routing, by rows; so nobody else may want them.
  const int shares = op.outputs[0];
  for (const OpNode& other : program_.ops())
    if ((has(other.inputs, shares) && !other.is("combine_experts")) ||
        (has(other.outputs, shares) && !other.is("router")))
      refuse(std::string("op ") + other.spec->name + " of the weights that a router makes");
  routed.shares = shares;
  const int* where = x.row_set == kAllRows ? data_->where(0) : nullptr;
  const Product p = logits ? logits_of(i - 1) : Product{};
  routed.row.reset();
  if (has_row_kernels_at(i)) routed.row = ChosenRow{router, x.values(), where};
  const bool row = routed.row.has_value(), norms = logits && i > 1 && norms_with_router(i - 2);
  const float* before = norms ? in(ops_[i - 2]).values() : nullptr;
  const Norm norm = norms ? norm_of(ops_[i - 2], vector(ops_[i - 2], 0)) : Norm{};
  launches_.push_back([=, routing = routed.routing, kind = routed.kind, queue = device_.queue()](const Size& size) {
    const int rows = count(x, size);
    if (!rows) return;
    if (row && rows == 1) {
      if (norms) norm_and_logits(before, norm, p.x, p, queue);
      else if (logits) linear_few(p, rows, queue);
      return;
    }
    const int tile_rows = expert_tile_rows(kind, rows * routing.top, routing.end - routing.begin, queue);
    if (logits) route(p, router, routing, where, rows, tile_rows, queue);
    else route(x.values(), router, routing, where, rows, tile_rows, queue);
  });
}

int CudaRunner::bind_expert_linear(size_t i) {
  const OpNode& op = ops_[i];
  const Tensor x = in(op), y = out(op);
  const Routed& routed = routed_.at(y.row_set);
  const bool gated = is_gated(ops_, i);
  if (gated && paired_.insert(op.weights[0]).second) weights_.pair(op.weights[0]);
  ExpertProduct e;
  Product& p = e.product;
  p.w = weights_.matrix(op.weights[0]), p.bias = vector(op, 1), p.gated = gated;
  p.x = x.rows, p.y = gated ? out(ops_[i + 1]).rows : y.rows;
  if (gated) e.gating = gating_of(ops_[i + 1]);
  e.routing = routed.routing, e.gathers = x.row_set != y.row_set;
  const bool converts = p.w.takes_tiles() && !x.rows.tiles;
  if (converts) p.x = {nullptr, tiles_.as<uint16_t>(), x.rows.width, half_};
  e.follows = i > 1 && ops_[i - 2].is("expert_linear") && is_gated(ops_, i - 2) &&
              out(ops_[i - 2]).row_set == y.row_set && ops_[i - 1].outputs[0] == op.inputs[0] && !converts;
  Combination c;
  if (size_t last; routed.row && !gated) c = combination_at(i + 1, last);
  launches_.push_back([=, row = routed.row, queue = device_.queue()](const Size& size) {
    const int rows = count(x, size), entries = count(y, size);
    if (!rows) return;
    const Product& p = e.product;
    if (row && entries == e.routing.top) return gated ? gate_row(e, *row, queue) : combine_row(e, *row, c, queue);
    if (converts) to_tiles(x.values(), rows, p.x, queue);
    const int tile_rows = expert_tile_rows(p.w.kind, entries, e.routing.end - e.routing.begin, queue);
    linear_experts(e, entries, tile_rows, queue);
  });
  return gated;
}

Combination CudaRunner::combination_at(size_t i, size_t& last) const {
  const OpNode& op = ops_[i];
  const Tensor x = in(op);
  const auto found = routed_.find(x.row_set);
  if (found == routed_.end() || found->second.shares != op.inputs[1])
    refuse("op combine_experts of other weights than a router's");
  const std::optional<size_t> sum = sum_at(i + (!ranks_ && ops_[i + 1].is("all_reduce") ? 2 : 1), op.outputs[0]);
  Combination c;
  c.entries = x.values(), c.routing = found->second.routing, c.adds = sum.has_value();
  c.y = sum ? in(ops_[*sum]).rows : partial_of(i).value_or(out(op).rows);
  last = sum.value_or(i);
  if (sum) {  // and its norm, where that comes next
    const OpNode& next = ops_[last + 1];
    const int into = ops_[last].inputs[0];
    if (next.is("rms_norm") && next.inputs[0] == into && next.outputs[0] != into && !quantizes_next(last + 1))
      last++, c.norm = norm_of(next, vector(next, 0)), c.normed = out(next).rows;
  }
  return c;
}

int CudaRunner::bind_combine_experts(size_t i) {
  const Tensor x = in(ops_[i]);
  size_t last;
  const Combination c = combination_at(i, last);
  const bool row = routed_.at(x.row_set).row.has_value();
  launches_.push_back([=, queue = device_.queue()](const Size& size) {
    const int rows = rows_of(program_.row_sets()[x.row_set].of, size.rows, size.outputs);
    if (!rows) return;
    if (!row || rows > 1) combine_experts(c, rows, queue);
    else if (c.norm.weight) rms_norm(c.y.values, c.norm, rows, c.normed, queue);
  });
  return (int)(last - i);
}

}  // namespace cuda
}  // namespace as
