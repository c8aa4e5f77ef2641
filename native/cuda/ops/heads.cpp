// Norms and rotations of heads. If they apply to all queries and keys of an attention, the attention computes them as
// heads enter the cache.
#include <stdexcept>
#include <string>

#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

const RotaryTable& table_of(const Binding& b, const OpNode& op) {
  const auto table = b.workspace.rotary_tables.find(op.integer("table"));
  if (table == b.workspace.rotary_tables.end())
    throw std::invalid_argument("no rotary table " + std::to_string(op.integer("table")));
  return table->second;
}

// Whether the op behind ops[norm] rotates adjacent features of the same heads, as the norm's kernel can.
bool rotates_normed_heads(const Binding& b, size_t norm) {
  const OpNode &op = b.ops[norm], &next = b.ops[norm + 1];
  const auto same = [&](const char* name) { return op.integer(name) == next.integer(name); };
  return next.is(Op::rope) && next.inputs[0] == op.inputs[0] && same("offset") && same("heads") && same("head_dim") &&
         b.in(op).row_set == kAllRows && std::string(next.choice("pairs")) == "interleaved" && !next.flag("inverse") &&
         next.integer("skip") % 2 == 0 && !rotates_in_attention(b, norm + 1);
}

// The norm of keys is often the op after the norm of queries: one launch does both. So it does with a rotation.
int bind_head_norm(Binding& b, size_t i) {
  const OpNode &op = b.ops[i], &next = b.ops[i + 1];
  b.check_in_place(op);
  if (op.integer("head_dim") > kLatentDim)
    refuse("op head_norm of heads of " + std::to_string(op.integer("head_dim")) + " features, at most " +
           std::to_string(kLatentDim));
  const auto norm_at = [&](const OpNode& norm) { return HeadNorm{heads_of(norm), norm_of(norm, b.vector(norm, 0))}; };
  const auto end = [](const OpNode& norm) {
    return norm.integer("offset") + norm.integer("heads") * norm.integer("head_dim");
  };
  const bool both = next.is(Op::head_norm) && next.inputs[0] == op.inputs[0] &&
                    b.out(next).values() == b.out(op).values() &&
                    (end(op) <= next.integer("offset") || end(next) <= op.integer("offset"));
  if (both && norms_in_attention(b, i)) {
    b.head_norms = {norm_at(op), norm_at(next)}, b.deferred = true;
    return 1;
  }
  if (!both && rotates_normed_heads(b, i)) {
    b.check_in_place(next);
    b.add_launch(kAllRows, [x = b.in(op), norm = norm_at(op), skip = next.integer("skip"), table = table_of(b, next),
                            queue = b.queue](int rows) {
      head_norm_and_rope(x.values(), x.rows.width, norm, skip, table, rows, queue);
    });
    return 1;
  }
  b.add_launch(b.in(op).row_set,
               [x = b.in(op), first = norm_at(op), second = both ? norm_at(next) : HeadNorm{},
                queue = b.queue](int rows) { head_norm(x.values(), x.rows.width, first, second, rows, queue); });
  return both;
}

int bind_rope(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  const Rope rotation{table_of(b, op), std::string(op.choice("pairs")) == "interleaved"};
  if (rotates_in_attention(b, i)) {
    b.rope = rotation, b.deferred = true;
    return 0;
  }
  Heads heads = heads_of(op);
  heads.offset += op.integer("skip");
  b.add_launch(kAllRows, [=, x = b.in(op), inverse = op.flag("inverse"), queue = b.queue](int rows) {
    rope(x.values(), x.rows.width, heads, rotation.table, rotation.interleaved, inverse, rows, queue);
  });
  return 0;
}

int bind_rotary_table(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const Sections sections{op.integer("temporal"), op.integer("height"), op.integer("width"),
                          op.flag("interleaved_sections")};
  const bool has_places = b.workspace.needs.places;
  RotaryTable t;
  t.inverse = b.vector(op, 0), t.longer = op.flag("long_table") ? b.vector(op, 1) : nullptr;
  t.dim = op.integer("rotary_dim"), t.dynamic = op.flag("dynamic");
  t.powers = std::string(op.choice("growth")) == "powers", t.attention_factor = (float)op.number("attention_factor");
  t.base = op.number("base"), t.factor = op.number("factor"), t.original_max = op.number("original_max");
  auto& tables = b.workspace.rotary_tables;
  float* const memory = b.workspace.rotary.as<float>();
  const size_t rows = b.workspace.limits.max_rows;
  size_t taken = 0;
  for (const auto& [number, other] : tables) taken += rows * other.dim;
  if (const auto same = tables.find(op.integer("table")); same != tables.end())  // both forms share it
    taken = same->second.cosine - memory;
  t.cosine = memory + taken, t.sine = t.cosine + rows * (t.dim / 2);
  tables[op.integer("table")] = t;
  if (has_places && t.dynamic) refuse("op rotary_table with a base that grows, of rows with places");
  b.add_launch(kAllRows, [=, data = &*b.workspace.data, queue = b.queue](int rows) {
    if (!t.dim) return;
    if (has_places) rotary_table(t, sections, data->places(), data->positions(), data->prompts(), rows, queue);
    else rotary_table(t, data->positions(), data->prompts(), rows, queue);
  });
  return 0;
}

const RegisterCudaOp kHeadNorm(Op::head_norm, bind_head_norm), kRope(Op::rope, bind_rope),
    kRotaryTable(Op::rotary_table, bind_rotary_table);

}  // namespace
}  // namespace as::cuda
