// Layers of experts: the router, the experts' linears and the weighted sum. Steps of one row have special kernels.
#include <stdexcept>
#include <string>

#include "cuda/kernels/moe/dispatch.h"
#include "cuda/ops/fusion.h"
#include "cuda/ops/linear.h"
#include "program/token_experts.h"

namespace as::cuda {
namespace {

constexpr int kMaxGroups = 32;  // per router

// The sum over a row's experts, with the add and the norm that follow, if any. last: the last op computed here.
Combination combination_at(const Binding& b, size_t i, size_t& last) {
  const OpNode& op = b.ops[i];
  const Tensor x = b.in(op);
  const auto found = b.routed.find(x.row_set);
  if (found == b.routed.end() || found->second.shares != op.inputs[1])
    refuse("op combine_experts of other weights than a router's");
  const std::optional<size_t> sum = add_after(b, i, op.outputs[0]);
  Combination c;
  c.entries = x.rows, c.routing = b.workspace.expert_rows.at(x.row_set).routing, c.adds = sum.has_value();
  c.y = sum ? b.in(b.ops[*sum]).rows : partial_of(b, i).value_or(b.out(op).rows);
  last = sum.value_or(i);
  if (sum) take_norm(b, last, c.norm, c.normed);
  return c;
}

int bind_expert_linear(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const Tensor x = b.in(op), y = b.out(op);
  const std::optional<ChosenRow> row = b.routed[y.row_set].row;
  const bool gated = is_gated(b.ops, b.weights, i);
  if (gated && b.paired.insert(op.weights[0]).second) b.weights.pair(op.weights[0]);
  ExpertGemmArgs e;
  GemmArgs& p = e.gemm;
  p.w = b.matrix(op), p.bias = b.vector(op, 1), p.gated = gated;
  p.x = x.rows, p.y = gated ? b.out(b.ops[i + 1]).rows : y.rows;
  if (gated) e.gating = gating_of(b.ops[i + 1]);
  if (!gated && b.paired.count(op.weights[0])) {  // an adapter adds to the columns before the activation
    b.interleaved[op.outputs[0]] = p.bias;
    p.bias = nullptr, p.y.width = p.w.n;
  } else {
    b.interleaved.erase(op.outputs[0]);  // another layer's matrix has another format
  }
  e.routing = b.workspace.expert_rows.at(y.row_set).routing, e.gathers = x.row_set != y.row_set;
  if (p.w.takes_bytes()) {
    p.w.max_split_k = 1;
    p.bytes = byte_rows(b.workspace.byte_rows.as(), b.workspace.max_rows(op.inputs[0]), p.w.k);
  }
  const bool converts = p.w.takes_tiles() && !x.rows.tiles;
  if (converts) p.x = {nullptr, b.workspace.tiles.as<uint16_t>(), x.rows.width, b.workspace.dtype};
  e.follows = i > 1 && b.ops[i - 2].is(Op::expert_linear) && is_gated(b.ops, b.weights, i - 2) &&
              b.out(b.ops[i - 2]).row_set == y.row_set && b.ops[i - 1].outputs[0] == op.inputs[0] && !converts;
  const bool mx = p.w.kind == Kind::mxfp4;  // only its first products differ for a single row
  Combination c;
  if (size_t last; row && !mx && !gated) {
    c = combination_at(b, i + 1, last);
    for (size_t op = i + 1; op <= last; op++) b.also.push_back(op);
  }
  const ExpertTable& table = b.workspace.kernels.experts(p.w);
  b.launches.push_back([=, &table, ws = &b.workspace, queue = b.queue](const Binding::Size& size) mutable {
    const int rows = ws->rows_of(x.row_set, size), entries = ws->rows_of(y.row_set, size);
    if (!rows) return;
    if (row && entries == e.routing.top && gated && mx) return gemm_chosen_experts(e, *row, queue);
    if (row && entries == e.routing.top && !mx)
      return gated ? gate_row(e, *row, queue) : combine_row(e, *row, c, queue);
    if (converts) to_tiles(x.values(), rows, e.gemm.x, queue);
    if (e.gemm.w.takes_bytes()) e.x_rows = rows, quantize_activations(e.gemm, rows, queue);
    const ExpertChoice choice = table.at(entries);
    gemm_experts(e, entries, choice.tile_rows, queue, choice.algo);
  });
  return gated;
}

// The sum with a gated shared expert that begins at the linear ops[i], and the last op of it.
struct SharedSumAt {
  SharedSum sum;
  size_t last;
};
std::optional<SharedSumAt> shared_sum_at(const Binding& b, size_t i) {
  // A norm that only this linear reads would be computed with it.
  if (i + 2 >= b.ops.size() || !b.ops[i].is(Op::linear) || b.ops[i - 1].is(Op::rms_norm)) return {};
  const OpNode &op = b.ops[i], &gates = b.ops[i + 1], &add = b.ops[i + 2];
  if (!gates.is(Op::sigmoid_mul) || gates.inputs[1] != op.outputs[0] || b.matrix(op).n != 1 ||
      !has_small_n(b.matrix(op)))
    return {};
  const int shared = gates.inputs[0], width = b.in(gates).rows.width;
  if (!add.is(Op::add) || add.inputs[1] != shared || add.inputs[0] == shared || width > kMaxNormed ||
      read_from(b.ops, i + 2, op.outputs[0]) || read_from(b.ops, i + 3, shared))
    return {};
  SharedSumAt found{{}, i + 2};
  SharedSum& c = found.sum;
  c.gate = logits_of(b, i), c.shared = b.in(gates).values(), c.routed = b.in(add).values(), c.y = b.in(add).rows;
  if (const std::optional<size_t> sum = add_after(b, found.last, add.inputs[0])) {
    c.adds = true, c.y = b.in(b.ops[*sum]).rows, found.last = *sum;
    take_norm(b, found.last, c.norm, c.normed);
  }
  return found;
}

// Whether a shared expert's sum is the next op that uses what ops[i], a combine_experts, makes. It then sums the
// entries itself.
bool is_summed_later(const Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  for (size_t at = i + 1; at < b.ops.size(); at++) {
    const OpNode& other = b.ops[at];
    if (other.is(Op::router) || has(other.outputs, op.inputs[0])) return false;  // entries and routing are overwritten
    if (const auto found = shared_sum_at(b, at)) return found->sum.routed == b.out(op).values();
    if (has(other.inputs, op.outputs[0]) || has(other.outputs, op.outputs[0])) return false;
  }
  return false;
}

int bind_combine_experts(Binding& b, size_t i) {
  const Tensor x = b.in(b.ops[i]);
  size_t last;
  const Combination c = combination_at(b, i, last);
  // Whether combine_row() has computed the sum of a single row.
  const bool row = b.routed.at(x.row_set).row && b.workspace.expert_rows.at(x.row_set).kind != Kind::mxfp4;
  if (last == i && is_summed_later(b, i)) {
    const bool lists = b.workspace.expert_rows.at(x.row_set).kind != Kind::f32;  // kernels that wait for the lists
    b.unsummed = Binding::Unsummed{c, row, i, lists ? b.routed.at(x.row_set).rows : nullptr};
    return 0;
  }
  b.add_launch(b.workspace.program.row_sets()[x.row_set].of, [=, queue = b.queue](int rows) {
    if (!row || rows > 1) combine_experts(c, rows, queue);
    else if (c.norm.weight) rms_norm(c.y.values, c.norm, rows, c.normed, queue);
  });
  return (int)(last - i);
}

// The table of a router that chooses by tokens.
TokenExperts token_experts(const Binding& b, const OpNode& op, const Tensor& logits) {
  const int top = op.integer("top_k");
  const std::vector<float> experts = b.weights.read_vector(op.weights[0]);
  check_token_experts(experts.data(), experts.size(), top, logits.rows.width);
  TokenExperts table;
  table.experts = b.vector(op, 0), table.tokens = (int)experts.size() / top;
  table.rows.tokens = b.workspace.data->tokens(), table.rows.sampled = b.workspace.argmax.as<Argmax>();
  if (logits.row_set == kOutputRows) table.chosen = b.workspace.data->chosen();
  return table;
}

}  // namespace

int bind_shared_sum(Binding& b, size_t i) {
  const auto found = shared_sum_at(b, i);
  if (!found) return 0;
  const int row_set = b.in(b.ops[i]).row_set;
  if (b.unsummed) {
    SharedSum sums = found->sum;  // of entries
    sums.entries = b.unsummed->sum.entries, sums.routing = b.unsummed->sum.routing;
    sums.gates_early = b.unsummed->routed == sums.gate.x.values;
    SharedSum summed = found->sum;  // of a single row, which combine_row() has summed
    summed.gates_early = sums.gates_early;
    b.add_launch(row_set, [=, row = b.unsummed->row, queue = b.queue](int rows) {
      add_shared_expert(rows == 1 && row ? summed : sums, rows, queue);
    });
    b.also.push_back(b.unsummed->op), b.unsummed.reset();
  } else {
    b.add_launch(row_set, [sum = found->sum, queue = b.queue](int rows) { add_shared_expert(sum, rows, queue); });
  }
  return (int)(found->last - i);
}

int bind_router(Binding& b, size_t i, bool logits) {
  const OpNode& op = b.ops[i];
  const Tensor x = b.in(op), y = b.out(op);
  const auto found = b.workspace.expert_rows.find(y.row_set);
  const auto sent = b.workspace.dispatched.find(y.row_set);
  const bool dispatches = sent != b.workspace.dispatched.end();
  if (found == b.workspace.expert_rows.end() && !dispatches) refuse("router of rows that no expert_linear takes");
  const Routing routing = dispatches ? sent->second : found->second.routing;
  Router router;
  const int vectors = (int)op.weights.size(), scales = op.flag("expert_scales");
  router.experts = x.rows.width;
  if (scales) router.expert_scales = b.vector(op, vectors - 1);
  if (op.flag("by_token")) router.by_token = token_experts(b, op, x);
  else if (vectors > scales) router.correction = b.vector(op, 0);
  const std::string scores = op.choice("scores");
  router.scores = scores == "sigmoid"         ? Scores::sigmoid
                  : scores == "sqrt_softplus" ? Scores::sqrt_softplus
                                              : Scores::softmax;
  router.normalized = op.flag("normalized");
  router.scale = (float)op.number("scale");
  router.groups = op.integer("groups"), router.top_groups = op.integer("top_groups");
  router.best_of_group = std::string(op.choice("group_scores")) == "largest";
  if (router.experts > kMaxExperts || routing.top > kMaxTop || router.groups > kMaxGroups)
    refuse("router of " + std::to_string(router.experts) + " experts in " + std::to_string(router.groups) +
           " groups, " + std::to_string(routing.top) + " for a row: at most " + std::to_string(kMaxExperts) + ", " +
           std::to_string(kMaxGroups) + " and " + std::to_string(kMaxTop));
  if (routing.end > router.experts)
    throw std::invalid_argument("op expert_linear: experts " + std::to_string(routing.begin) + "..." +
                                std::to_string(routing.end - 1) + ", the router has " + std::to_string(router.experts));
  // The weights are stored with the routing, by row. Other ops cannot read them there.
  const int shares = op.outputs[0];
  for (const OpNode& other : b.workspace.program.ops())
    if ((has(other.inputs, shares) && !other.is(Op::combine_experts) && !other.is(Op::dispatch_rows)) ||
        (has(other.outputs, shares) && !other.is(Op::router)))
      refuse(std::string("op ") + other.spec->name + " of the weights that a router makes");
  const int* where = x.row_set == kAllRows ? b.workspace.data->where(0)
                     : dispatches          ? b.workspace.data->padding()
                                           : nullptr;
  const GemmArgs p = logits ? logits_of(b, i - 1) : GemmArgs{};
  if (dispatches) {
    b.add_launch(x.row_set, [=, queue = b.queue](int rows) {
      if (logits) gemm_small_n(p, rows, queue);
      choose_experts(x.values(), router, routing, where, rows, queue);
    });
    return 0;
  }
  const bool row = has_row_kernels_at(b, i), norms = logits && i > 1 && norms_with_router(b, i - 2);
  Binding::Routed& routed = b.routed[y.row_set] = {shares, {}};
  if (row) routed.row = ChosenRow{router, x.values(), where};
  if (logits) routed.rows = p.x.values;
  if (norms) b.also.push_back(i - 2);
  const float* before = norms ? b.in(b.ops[i - 2]).values() : nullptr;
  const Norm norm = norms ? norm_of(b.ops[i - 2], b.vector(b.ops[i - 2], 0)) : Norm{};
  const ExpertTable table = expert_table(b.workspace.kernels.chip, found->second.kind, routing.end - routing.begin);
  b.add_launch(x.row_set, [=, queue = b.queue](int rows) {
    if (row && rows == 1) {
      if (norms) norm_and_logits(before, norm, p.x, p, queue);
      else if (logits) gemm_small_n(p, rows, queue);
      return;
    }
    const int tile_rows = table.at(rows * routing.top).tile_rows;
    if (logits) route(p, router, routing, where, rows, tile_rows, queue);
    else route(x.values(), router, routing, where, rows, tile_rows, queue);
  });
  return 0;
}

namespace {

const RegisterCudaOp kRouter(Op::router, [](Binding& b, size_t i) { return bind_router(b, i, false); }),
    kExpertLinear(Op::expert_linear, bind_expert_linear), kCombineExperts(Op::combine_experts, bind_combine_experts);

}  // namespace
}  // namespace as::cuda
