#include "cuda/ops/fusion.h"

#include <algorithm>

#include "cuda/kernels/norm/streams.h"
#include "cuda/ops/all_reduce.h"

namespace as::cuda {
std::vector<OpNode> ops_of(const Program& program, bool adapted) {
  std::vector<OpNode> ops = program.ops();
  if (!adapted)
    ops.erase(std::remove_if(ops.begin(), ops.end(), [](const OpNode& op) { return op.adapts(); }), ops.end());
  return ops;
}

bool read_from(const std::vector<OpNode>& ops, size_t first, int tensor) {
  for (size_t i = first; i < ops.size(); i++) {
    if (has(ops[i].inputs, tensor)) return true;
    if (has(ops[i].outputs, tensor)) return false;
  }
  return false;
}

bool is_gated(const std::vector<OpNode>& ops, const Weights& weights, size_t linear) {
  const OpNode &op = ops[linear], &next = ops[linear + 1];
  const int made = op.outputs[0];
  const bool limited = next.is(Op::clamped_silu_mul) || next.is(Op::limited_silu_mul);
  const bool gates = next.is(Op::silu_mul) || (limited && op.is(Op::expert_linear));
  if (!gates || next.inputs[0] != made || weights.matrix(op.weights[0]).kind == Kind::f32) return false;
  for (size_t i = 0; i < ops.size(); i++)  // no other op reads the matrix, whose rows are reordered
    if (i != linear && has(ops[i].weights, op.weights[0])) return false;
  return !read_from(ops, linear + 2, made);
}

std::optional<size_t> add_after(const Binding& b, size_t i, int tensor) {
  const size_t next = i + (!b.ranks && b.ops[i + 1].is(Op::all_reduce) ? 2 : 1);
  const OpNode& op = b.ops[next];
  if (!op.is(Op::add) || op.inputs[1] != tensor || op.inputs[0] == tensor) return {};
  if (b.out(op).values() != b.in(op).values() || read_from(b.ops, next + 1, tensor)) return {};
  return next;
}

bool norms_to_bytes(const Binding& b, size_t i) {
  const OpNode &op = b.ops[i], &next = b.ops[i + 1];
  if (b.ranks || !next.is(Op::linear)) return false;  // with several ranks sum_ranks() computes the norm
  const int made = op.outputs[0];
  if (next.inputs[0] != made || made == op.inputs[0] || !norms_into_bytes(b.in(op).rows.width) ||
      !b.matrix(next).takes_bytes())
    return false;
  for (size_t later = i + 2; later < b.ops.size(); later++) {
    // A lora does not count; otherwise a row without an adapter would have other bits if another row has one.
    if (b.ops[later].is(Op::lora)) continue;
    if (has(b.ops[later].inputs, made)) return false;
    if (has(b.ops[later].outputs, made)) break;
  }
  return true;
}

void take_norm(const Binding& b, size_t& last, Norm& norm, Rows& normed) {
  const OpNode& next = b.ops[last + 1];
  const int into = b.ops[last].inputs[0];
  if (!next.is(Op::rms_norm) || next.inputs[0] != into || next.outputs[0] == into || norms_to_bytes(b, last + 1))
    return;
  last++, norm = norm_of(next, b.vector(next, 0)), normed = b.out(next).rows;
}

bool multiplies_streams(const Binding& b, size_t linear) {
  const OpNode& op = b.ops[linear];
  return op.is(Op::linear) && b.matrix(op).kind == Kind::f32 &&
         std::any_of(b.ops.begin(), b.ops.end(), [&](const OpNode& other) {
           return other.is(Op::stream_weights) && other.inputs[0] == op.outputs[0];
         });
}

bool norms_for_linear(const Binding& b, size_t i) {
  const OpNode &op = b.ops[i], &next = b.ops[i + 1];
  const int made = op.outputs[0];
  return next.is(Op::linear) && next.inputs[0] == made && made != op.inputs[0] && !read_from(b.ops, i + 2, made) &&
         (b.matrix(next).takes_tiles() || (multiplies_streams(b, i + 1) && !op.flag("unit_offset")));
}

GemmArgs logits_of(const Binding& b, size_t linear) {
  const OpNode& op = b.ops[linear];
  GemmArgs p;
  p.w = b.matrix(op), p.bias = b.vector(op, 1), p.x = b.in(op).rows, p.y = b.out(op).rows;
  return p;
}

bool has_row_kernels_at(const Binding& b, size_t router) {
  if (router + 4 >= b.ops.size()) return false;
  const OpNode &op = b.ops[router], &up = b.ops[router + 1], &gates = b.ops[router + 2], &down = b.ops[router + 3],
               &sum = b.ops[router + 4];
  return up.is(Op::expert_linear) && down.is(Op::expert_linear) && sum.is(Op::combine_experts) &&
         is_gated(b.ops, b.weights, router + 1) && b.out(up).row_set == b.out(op).row_set &&
         b.in(up).row_set == b.in(op).row_set && b.in(up).rows.tiles && down.inputs[0] == gates.outputs[0] &&
         b.out(gates).rows.tiles && sum.inputs[0] == down.outputs[0] && sum.inputs[1] == op.outputs[0] &&
         !read_from(b.ops, router + 5, down.outputs[0]) && b.out(sum).rows.width <= kMaxNormed &&
         has_expert_gemv(b.workspace.kernels.chip, b.matrix(up), b.matrix(down));
}

bool merges_and_norms(const Binding& b, size_t i) {
  if (i + 2 >= b.ops.size()) return false;
  const OpNode &op = b.ops[i], &merge = b.ops[i + 1], &norm = b.ops[i + 2];
  if (!op.is(Op::stream_weights) || !merge.is(Op::merge_streams) || merge.inputs.size() < 2 ||
      merge.inputs[1] != op.inputs[0])
    return false;
  const int streams = op.integer("streams"), merged = merge.outputs[0], width = b.out(merge).rows.width;
  if (!norm.is(Op::rms_norm) || norm.inputs[0] != merged || norm.outputs[0] == merged || width > kMostMerged ||
      streams > kMostMergedStreams || b.in(merge).rows.width != streams * width || read_from(b.ops, i + 3, merged))
    return false;
  for (size_t later = i + 3; later < b.ops.size() && !has(b.ops[later].outputs, op.inputs[0]); later++)
    if (has(b.ops[later].inputs, op.inputs[0]) && !b.ops[later].is(Op::mix_streams)) return false;
  return true;
}

bool norms_with_router(const Binding& b, size_t norm) {
  if (norm >= 2 && merges_and_norms(b, norm - 2)) return false;
  if (norm + 2 >= b.ops.size() || b.ranks) return false;  // with several ranks sum_ranks() computes the norm
  const OpNode &op = b.ops[norm], &linear = b.ops[norm + 1], &router = b.ops[norm + 2];
  return op.is(Op::rms_norm) && linear.is(Op::linear) && linear.inputs[0] == op.outputs[0] &&
         op.outputs[0] != op.inputs[0] && router.is(Op::router) && router.inputs[0] == linear.outputs[0] &&
         has_row_kernels_at(b, norm + 2) && norms_with_logits(logits_of(b, norm + 1));
}

bool rotates_in_attention(const Binding& b, size_t i) {
  const OpNode &op = b.ops[i], &next = b.ops[i + 1];
  return op.is(Op::rope) && next.is(Op::span_attention) && next.inputs[0] == op.inputs[0] && !op.integer("offset") &&
         !op.integer("skip") && !op.flag("inverse") && op.integer("head_dim") == next.integer("head_dim") &&
         op.integer("heads") == next.integer("q_heads") + next.integer("kv_heads");
}

bool norms_in_attention(const Binding& b, size_t i) {
  const OpNode &queries = b.ops[i], &keys = b.ops[i + 1];
  const size_t at = rotates_in_attention(b, i + 2) ? i + 3 : i + 2;
  if (at + 1 >= b.ops.size()) return false;
  const OpNode& attention = b.ops[at];
  const auto norms = [&](const OpNode& op, int first, int count) {
    const int dim = attention.integer("head_dim");
    return op.inputs[0] == attention.inputs[0] && op.integer("head_dim") == dim &&
           op.integer("offset") == first * dim && op.integer("heads") == count;
  };
  return attention.is(Op::span_attention) && norms(queries, 0, attention.integer("q_heads")) &&
         norms(keys, attention.integer("q_heads"), attention.integer("kv_heads")) && !attention.number("logn") &&
         !read_from(b.ops, at + 1, attention.inputs[0]);
}

Rows tiles_or_values(Binding& b, size_t i) {
  const OpNode& next = b.ops[i + 1];
  const int tensor = b.ops[i].inputs[0];
  const Rows& x = b.workspace.tensors[tensor].rows;
  if (!next.is(Op::linear) || next.inputs[0] != tensor || x.tiles || x.width % kBlock ||
      !b.matrix(next).takes_tiles() || b.matrix(next).order || read_from(b.ops, i + 2, tensor))
    return x;
  b.tiled.insert(tensor);
  return {nullptr, b.workspace.tiles.as<uint16_t>(), x.width, b.workspace.dtype};
}

std::optional<Rows> partial_of(const Binding& b, size_t i) {
  const OpNode &op = b.ops[i], &next = b.ops[i + 1];
  if (!b.ranks || !next.is(Op::all_reduce) || next.inputs[0] != op.outputs[0]) return {};
  return b.ranks->exchange.partial(b.next_call, b.out(op).rows.width, sums_in_dtype16(b.ops, b.weights, i + 1),
                                   b.workspace.dtype);
}

uint16_t* place_of(const Binding& b, size_t i) {
  if (!b.ops[i].is(Op::linear)) return nullptr;
  const Matrix& m = b.matrix(b.ops[i]);
  const std::optional<Rows> partial = partial_of(b, i);
  if (!partial || m.kind != Kind::dtype16 || m.max_split_k == 1) return nullptr;
  return b.ranks->exchange.place(b.next_call, partial->width);
}

}  // namespace as::cuda
