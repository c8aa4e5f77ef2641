// Layers of experts become launches: part of CudaRunner's constructor.
#include <algorithm>
#include <stdexcept>

#include "cuda/runner.h"

namespace as {
namespace cuda {
namespace {

constexpr int kMostGroups = 32;         // of a router
constexpr int kMostLaunchRows = 65535;  // of kernels that have a block of threads for each row

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
    if (m.takes_bytes()) refuse("experts of other types than float32, bfloat16, int8 and int4");
    const auto [found, first] = routed_.try_emplace(set, Routed{{}, m.kind, -1});
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

// logits: the linear that makes them, which is done here, too; null: they are there.
void CudaRunner::bind_router(const OpNode& op, const OpNode* logits) {
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
  Product p;
  if (logits) {
    p.w = weights_.matrix(logits->weights[0]), p.bias = vector(*logits, 1);
    p.x = in(*logits).rows, p.y = x.rows;
  }
  const bool made = !logits;
  launches_.push_back([=, routing = routed.routing, kind = routed.kind, queue = device_.queue()](const Size& size) {
    const int rows = count(x, size);
    if (!rows) return;
    const int tile_rows = expert_tile_rows(kind, rows * routing.top, routing.end - routing.begin, queue);
    if (made) route(x.values(), router, routing, where, rows, tile_rows, queue);
    else route(p, router, routing, where, rows, tile_rows, queue);
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
  e.routing = routed.routing, e.gathers = x.row_set != y.row_set;
  const bool converts = p.w.takes_tiles() && !x.rows.tiles;
  if (converts) p.x = {nullptr, tiles_.as<uint16_t>(), x.rows.width};
  e.follows = i > 1 && ops_[i - 2].is("expert_linear") && is_gated(ops_, i - 2) &&
              out(ops_[i - 2]).row_set == y.row_set && ops_[i - 1].outputs[0] == op.inputs[0] && !converts;
  launches_.push_back([=, queue = device_.queue()](const Size& size) {
    const int rows = count(x, size), entries = count(y, size);
    if (!rows) return;
    const Product& p = e.product;
    if (converts) to_tiles(x.values(), rows, p.x, queue);
    const int tile_rows = expert_tile_rows(p.w.kind, entries, e.routing.end - e.routing.begin, queue);
    linear_experts(e, entries, tile_rows, queue);
  });
  return gated;
}

int CudaRunner::bind_combine_experts(size_t i) {
  const OpNode& op = ops_[i];
  const Tensor x = in(op);
  const auto found = routed_.find(x.row_set);
  if (found == routed_.end() || found->second.shares != op.inputs[1])
    refuse("op combine_experts of other weights than a router's");
  const std::optional<size_t> sum = sum_at(i + (!ranks_ && ops_[i + 1].is("all_reduce") ? 2 : 1), op.outputs[0]);
  Combination c;
  c.entries = x.values(), c.routing = found->second.routing, c.adds = sum.has_value();
  c.y = sum ? in(ops_[*sum]).rows : partial_of(i).value_or(out(op).rows);
  size_t last = sum.value_or(i);
  if (sum) {  // and its norm, where that comes next
    const OpNode& next = ops_[last + 1];
    const int into = ops_[last].inputs[0];
    if (next.is("rms_norm") && next.inputs[0] == into && next.outputs[0] != into && !quantizes_next(last + 1)) {
      c.norm = {vector(next, 0), (float)next.number("eps"), next.flag("unit_offset")}, c.normed = out(next).rows;
      last++;
    }
  }
  launches_.push_back([=, queue = device_.queue()](const Size& size) {
    if (const int rows = rows_of(program_.row_sets()[x.row_set].of, size.rows, size.outputs))
      combine_experts(c, rows, queue);
  });
  return (int)(last - i);
}

}  // namespace cuda
}  // namespace as
