#include "program/op_spec.h"

#include <algorithm>
#include <stdexcept>

#include "program/program.h"
#include "sampling/sampler.h"

namespace as {
namespace {

using Type = AttributeType;

constexpr double kAnyNumber = 1e30;
constexpr Arity kNone{0, 0}, kOne{1, 1}, kTwo{2, 2};

// -- attributes ------------------------------------------------------------------------------------------------------
AttributeSpec whole(const char* name, Scope scope = Scope::model) {
  return {name, Type::integer, scope, true, 0, nullptr, -kLargestCount, kLargestCount, {}};
}

AttributeSpec whole_or(const char* name, double otherwise, Scope scope = Scope::model) {
  return {name, Type::integer, scope, false, otherwise, nullptr, -kLargestCount, kLargestCount, {}};
}

AttributeSpec whole_or_as(const char* name, const char* other) {
  return {name, Type::integer, Scope::model, false, 0, other, -kLargestCount, kLargestCount, {}};
}

AttributeSpec within(AttributeSpec a, double least, double most) {
  a.least = least, a.most = most;
  return a;
}

AttributeSpec number(const char* name) {
  return {name, Type::number, Scope::model, true, 0, nullptr, -kAnyNumber, kAnyNumber, {}};
}

AttributeSpec number_or(const char* name, double otherwise) {
  return {name, Type::number, Scope::model, false, otherwise, nullptr, -kAnyNumber, kAnyNumber, {}};
}

AttributeSpec choice(const char* name, std::vector<const char*> choices) {
  return {name, Type::choice, Scope::model, false, 0, nullptr, 0, 0, std::move(choices)};
}

AttributeSpec flag(const char* name) { return {name, Type::flag, Scope::model, false, 0, nullptr, 0, 1, {}}; }

// -- checks ----------------------------------------------------------------------------------------------------------
std::invalid_argument wrong(const OpNode& op, const std::string& what) {
  return std::invalid_argument(std::string("op ") + op.spec->name + ": " + what);
}

void width_is(const OpNode& op, const TensorSpec& tensor, long width, const char* what) {
  if (tensor.width != width)
    throw wrong(op,
                std::string(what) + " is " + std::to_string(tensor.width) + " wide, expected " + std::to_string(width));
}

const WeightSpec& matrix(const Program& p, const OpNode& op, int i) {
  const WeightSpec& w = p.weights()[op.weights[i]];
  if (!w.k) throw wrong(op, "weight " + std::to_string(op.weights[i]) + " is a vector, expected a matrix");
  return w;
}

void vector_is(const Program& p, const OpNode& op, int i, long n) {
  const WeightSpec& w = p.weights()[op.weights[i]];
  if (w.k) throw wrong(op, "weight " + std::to_string(op.weights[i]) + " is a matrix, expected a vector");
  if (w.n != n) throw wrong(op, "vector of " + std::to_string(w.n) + " values, expected " + std::to_string(n));
}

// Checks a range of heads in the input's columns. skip: features of a head before the rotated ones.
void check_heads(const Program& p, const OpNode& op, int rotary_dim, int skip = 0) {
  const int offset = op.integer("offset"), heads = op.integer("heads"), head_dim = op.integer("head_dim");
  if (offset < 0 || heads < 0 || head_dim < 1 || rotary_dim < 0 || skip > head_dim - rotary_dim || rotary_dim % 2 ||
      offset + (long)heads * head_dim > p.in(op).width)
    throw std::invalid_argument(std::string("op ") + op.spec->name + " reaches past its input");
}

// The rotary table with this number, or null.
const OpNode* rotary_table(const Program& p, int number) {
  for (const OpNode& op : p.ops())
    if (op.is(Op::rotary_table) && op.integer("table") == number) return &op;
  return nullptr;
}

void check_rotary_table(const Program& p, const OpNode& op) {
  const int table = op.integer("table");
  if (rotary_table(p, table)) throw wrong(op, "another op makes table " + std::to_string(table));
  const int pairs = op.integer("rotary_dim") / 2;
  for (size_t i = 0; i < op.weights.size(); i++) vector_is(p, op, (int)i, pairs);
  const int parts = op.integer("temporal") + op.integer("height") + op.integer("width");
  if (parts && parts != pairs)
    throw wrong(op, "sections of " + std::to_string(parts) + " pairs, expected " + std::to_string(pairs));
  if ((int)op.weights.size() != 1 + op.flag("long_table"))
    throw wrong(op,
                std::to_string(op.weights.size()) + " weights, expected " + std::to_string(1 + op.flag("long_table")));
  if (op.flag("long_table") && (op.flag("dynamic") || op.number("original_max") < 1))
    throw wrong(op, "a long_table needs an original_max, beyond which it is used, and excludes dynamic");
}

void check_embedding(const Program& p, const OpNode& op) { width_is(op, p.out(op), matrix(p, op, 0).k, "output"); }

void check_nothing(const Program&, const OpNode&) {}

void check_position_embedding(const Program& p, const OpNode& op) {
  const long width = p.in(op).width, positions = op.integer("positions");
  if (p.in(op).rows != kAllRows) throw wrong(op, "its input must have a row for each token");
  vector_is(p, op, 0, positions * width);
  if (op.weights.size() == 2) vector_is(p, op, 1, 2 * width);
}

void check_grid_embedding(const Program& p, const OpNode& op) {
  const long side = op.integer("side");
  if (p.in(op).rows != kAllRows) throw wrong(op, "its input must have a row for each token");
  vector_is(p, op, 0, (op.flag("axes") ? 2 : side) * side * p.in(op).width);
}

void check_rms_norm(const Program& p, const OpNode& op) {
  width_is(op, p.out(op), p.in(op).width, "output");
  vector_is(p, op, 0, p.in(op).width);
}

void check_layer_norm(const Program& p, const OpNode& op) {
  width_is(op, p.out(op), p.in(op).width, "output");
  for (int i = 0; i < 2; i++) vector_is(p, op, i, p.in(op).width);
}

void check_linear(const Program& p, const OpNode& op) {
  const WeightSpec& m = matrix(p, op, 0);
  width_is(op, p.in(op), m.k, "input");
  width_is(op, p.out(op), m.n, "output");
  if (op.weights.size() == 2) vector_is(p, op, 1, m.n);
}

void check_head_norm(const Program& p, const OpNode& op) {
  check_heads(p, op, 0);
  vector_is(p, op, 0, op.integer("head_dim"));
}

void check_qk_square_sums(const Program& p, const OpNode& op) {
  width_is(op, p.out(op), 2, "output");
  const long q = op.integer("q_columns"), begin = op.integer("k_offset"), k = op.integer("k_columns");
  if (q > p.in(op).width || begin + k > p.in(op).width)
    throw std::invalid_argument("op qk_square_sums reaches past its input");
}

void check_qk_norm(const Program& p, const OpNode& op) {
  width_is(op, p.in(op, 1), 2, "second input");
  if (p.in(op, 1).rows != p.in(op).rows) throw wrong(op, "its inputs differ in rows");
  const long q = op.integer("q_columns"), k = op.integer("k_columns");
  if (q + k > p.in(op).width) throw std::invalid_argument("op qk_norm reaches past its input");
  vector_is(p, op, 0, q);
  if ((op.weights.size() == 2) != (op.integer("k_width") > 0) || (k && op.weights.size() == 1))
    throw wrong(op, "keys have columns, a width and a weight, or none of them");
  if (op.weights.size() == 2) vector_is(p, op, 1, k);
}

void check_rope(const Program& p, const OpNode& op) {
  check_heads(p, op, op.integer("rotary_dim"), op.integer("skip"));
  const OpNode* table = rotary_table(p, op.integer("table"));
  if ((table ? table->integer("rotary_dim") : 0) != op.integer("rotary_dim"))
    throw wrong(op, "rotary_dim differs from rotary_table's");
}

void check_span_attention(const Program& p, const OpNode& op) {
  const long layer = op.integer("layer"), q_heads = op.integer("q_heads"), kv_heads = op.integer("kv_heads"),
             head_dim = op.integer("head_dim"), group = op.integer("group"), q_head_begin = op.integer("q_head_begin"),
             kv_begin = op.integer("kv_begin"), number = op.integer("cache_group"), window = op.integer("window");
  width_is(op, p.in(op), (q_heads + 2 * kv_heads) * head_dim, "input");
  width_is(op, p.out(op), q_heads * head_dim, "output");
  if (layer < 0 || head_dim < 1 || group < 1 || q_heads < 1 || q_head_begin < 0 || kv_begin < 0 ||
      (kv_begin + kv_heads + 1) * group > 1 << 28 || p.in(op).rows != kAllRows)
    throw wrong(op, "invalid layer, head_dim, group or number of heads");
  if (number >= (long)p.cache_groups().size()) throw wrong(op, "no cache group " + std::to_string(number));
  const CacheGroup& cache = p.cache_groups()[number];
  if (cache.kind != CacheKind::full && cache.kind != CacheKind::sliding)
    throw wrong(op, std::string("cache group ") + std::to_string(number) + " is " + name_of(cache.kind) +
                        ", which has no keys and values");
  if (cache.kind == CacheKind::sliding && (!window || window > cache.window))
    throw wrong(
        op, "a window of " + std::to_string(window) + " over a cache group that keeps " + std::to_string(cache.window));
  const std::string place = "layer " + std::to_string(layer) + " of cache group " + std::to_string(number);
  const OpNode* keeps = nullptr;  // the op that keeps keys and values there
  for (const OpNode& other : p.ops())
    if (other.spec == op.spec && other.integer("cache_group") == number && other.integer("layer") == layer &&
        other.integer("kv_heads"))
      keeps = &other;
  if (kv_heads && keeps && !(op.flag("bidirectional") && keeps->flag("bidirectional")))
    throw wrong(op, place + " is taken");
  if (!kv_heads) {
    if (!keeps) throw wrong(op, "queries without keys, and no earlier op keeps some in " + place);
    const HeadRange own = kv_heads_of(op), kept = kv_heads_of(*keeps);
    if (head_dim != keeps->integer("head_dim") || group != keeps->integer("group") || own.begin != kept.begin ||
        own.count != kept.count || op.flag("bidirectional") || keeps->flag("bidirectional"))
      throw wrong(op, "it reads other heads than those that are kept in " + place);
  }
  if (op.flag("bidirectional") && (cache.kind == CacheKind::sliding || op.flag("alibi") || op.number("logn") > 0))
    throw wrong(op, "bidirectional excludes a sliding cache group, alibi and logn");
  if (op.flag("images") && (op.flag("bidirectional") || op.flag("alibi") || op.number("logn") > 0))
    throw wrong(op, "images exclude bidirectional, alibi and logn");
  if (op.flag("segments") && (!op.flag("bidirectional") || window))
    throw wrong(op, "segments need bidirectional and exclude a window");
  const int vectors = op.flag("sinks") + op.flag("alibi");
  if ((int)op.weights.size() != vectors)
    throw wrong(op, std::to_string(op.weights.size()) + " weights, expected " + std::to_string(vectors) +
                        " for its sinks and slopes");
  for (int i = 0; i < vectors; i++) vector_is(p, op, i, q_heads);
}

// Whether an op keeps rows in this layer of a cache group.
bool keeps_rows(const OpNode& op, long group, long layer) {
  const auto lies = [&](const char* in_group, const char* in_layer) {
    return op.integer(in_group) == group && op.integer(in_layer) == layer;
  };
  if (op.is(Op::compress) && lies("rows_group", "rows_layer")) return true;
  const bool indexer = op.is(Op::indexer) && !op.integer("rate");
  return (indexer || op.is(Op::compress) || op.is(Op::compressed_attention) || op.is(Op::span_attention) ||
          op.is(Op::latent_attention)) &&
         lies("cache_group", "layer");
}

// Of ops that keep something of each position in a latent cache.
void check_cached_rows(const Program& p, const OpNode& op) {
  const long layer = op.integer("layer"), number = op.integer("cache_group");
  for (int input : op.inputs)
    if (p.tensors()[input].rows != kAllRows) throw wrong(op, "its inputs must have a row for each token");
  if (layer < 0) throw wrong(op, "layer is " + std::to_string(layer) + ", expected at least 0");
  if (number >= (long)p.cache_groups().size()) throw wrong(op, "no cache group " + std::to_string(number));
  if (p.cache_groups()[number].kind != CacheKind::latent)
    throw wrong(op, "cache group " + std::to_string(number) + " is " + name_of(p.cache_groups()[number].kind) +
                        ", expected latent");
  for (const OpNode& other : p.ops())
    if (keeps_rows(other, number, layer))
      throw wrong(op, "layer " + std::to_string(layer) + " of cache group " + std::to_string(number) + " is taken");
}

// Checks that an earlier op is the indexer that makes an input, and whether it outputs positions of entries.
void check_selection(const Program& p, const OpNode& op, int input, bool positions) {
  const auto made = [&](const OpNode& other) { return other.is(Op::indexer) && has(other.outputs, op.inputs[input]); };
  const auto indexer = std::find_if(p.ops().begin(), p.ops().end(), made);
  const std::string which = input == 3 ? "fourth" : "third";
  if (indexer == p.ops().end()) throw wrong(op, "its " + which + " input is no indexer's output");
  if (indexer->integer("rate") != op.integer("rate") || indexer->flag("positions") != positions)
    throw wrong(op, "its " + which + " input is that of an indexer with another rate, or other outputs");
}

void check_latent_attention(const Program& p, const OpNode& op) {
  const long latent = op.integer("latent_dim"), rope = op.integer("rope_dim"), heads = p.out(op).width / latent;
  if (heads * latent != p.out(op).width || heads < 1)
    throw wrong(op, std::to_string(p.out(op).width) + " columns that are not heads of " + std::to_string(latent));
  width_is(op, p.in(op), heads * latent, "input");
  if (p.in(op, 1).width < heads * rope)
    throw wrong(op, "its second input has fewer than " + std::to_string(heads) + " heads of " + std::to_string(rope));
  width_is(op, p.in(op, 2), latent + rope, "third input");
  if (op.inputs.size() > 3) check_selection(p, op, 3, op.integer("rate") > 0);
  else if (op.integer("rate")) throw wrong(op, "a rate needs an indexer's output");
  check_cached_rows(p, op);
}

// The compress op that keeps entries in this layer, or null.
const OpNode* compress_of(const Program& p, int group, int layer) {
  for (const OpNode& op : p.ops())
    if (op.is(Op::compress) && op.integer("cache_group") == group && op.integer("layer") == layer) return &op;
  return nullptr;
}

// Features of an entry of a compress op.
long entry_dim(const Program& p, const OpNode& op) { return p.in(op).width / (op.flag("overlapping") ? 4 : 2); }

// Checks that an earlier op keeps entries of that many features, one for each `rate` positions.
void check_entries(const Program& p, const OpNode& op, int group, int layer, long dim) {
  const OpNode* keeps = compress_of(p, group, layer);
  const std::string place = "layer " + std::to_string(layer) + " of cache group " + std::to_string(group);
  if (!keeps) throw wrong(op, "no earlier op keeps entries in " + place);
  if (keeps->integer("rate") != op.integer("rate")) throw wrong(op, "the entries in " + place + " have another rate");
  if (entry_dim(p, *keeps) != dim) throw wrong(op, "the entries in " + place + " have another width");
}

void check_indexer(const Program& p, const OpNode& op) {
  const long heads = p.in(op, 1).width, dim = op.inputs.size() > 2 ? p.in(op, 2).width : p.in(op).width / heads;
  width_is(op, p.in(op), heads * dim, "input");
  if ((op.inputs.size() == 2) != (op.integer("rate") > 0)) throw wrong(op, "it takes either a key or a rate");
  const long rate = op.integer("rate"), width = p.out(op).width;
  if (op.flag("positions") && (!rate || width < rate || (width + 1) % rate))
    throw wrong(op,
                std::to_string(width) + " columns, expected positions of entries of `rate` each, and rate - 1 more");
  if (op.inputs.size() > 2) return check_cached_rows(p, op);
  for (int input : op.inputs)
    if (p.tensors()[input].rows != kAllRows) throw wrong(op, "its inputs must have a row for each token");
  check_entries(p, op, op.integer("cache_group"), op.integer("layer"), dim);
}

// Checks that a cache group is of a kind, and that no other op keeps rows in its layer.
void check_layer(const Program& p, const OpNode& op, CacheKind kind, int group, int layer) {
  if (group >= (int)p.cache_groups().size()) throw wrong(op, "no cache group " + std::to_string(group));
  if (p.cache_groups()[group].kind != kind)
    throw wrong(op, "cache group " + std::to_string(group) + " is " + name_of(p.cache_groups()[group].kind) +
                        ", expected " + name_of(kind));
  for (const OpNode& other : p.ops())
    if (keeps_rows(other, group, layer))
      throw wrong(op, "layer " + std::to_string(layer) + " of cache group " + std::to_string(group) + " is taken");
}

void check_compress(const Program& p, const OpNode& op) {
  const long rate = op.integer("rate"), parts = op.flag("overlapping") ? 2 : 1, dim = entry_dim(p, op),
             group = op.integer("cache_group");
  if (dim * 2 * parts != p.in(op).width || p.in(op).rows != kAllRows)
    throw wrong(op, "its input must have a row for each token, with values and gates of one width");
  vector_is(p, op, 0, rate * parts * dim);
  if (op.weights.size() > 1) vector_is(p, op, 1, dim);
  check_layer(p, op, CacheKind::sliding, op.integer("rows_group"), op.integer("rows_layer"));
  const bool latent = group < (long)p.cache_groups().size() && p.cache_groups()[group].kind == CacheKind::latent;
  check_layer(p, op, latent ? CacheKind::latent : CacheKind::full, (int)group, op.integer("layer"));
  if (const long kept = p.cache_groups()[op.integer("rows_group")].window; kept < parts * rate)
    throw wrong(op, "cache group " + std::to_string(op.integer("rows_group")) + " keeps " + std::to_string(kept) +
                        " positions, an entry is of " + std::to_string(parts * rate));
  if (!op.integer("rotary_dim")) return;
  const OpNode* table = rotary_table(p, op.integer("table"));
  if (!table || table->integer("rotary_dim") != op.integer("rotary_dim") || op.integer("rotary_dim") > dim ||
      table->flag("dynamic") || table->flag("long_table") || table->integer("temporal"))
    throw wrong(op, "it needs a rotary table with its rotary_dim, whose angles depend on positions alone");
}

void check_compressed_attention(const Program& p, const OpNode& op) {
  const long dim = p.in(op, 1).width, heads = p.in(op).width / dim, group = op.integer("cache_group");
  width_is(op, p.in(op), heads * dim, "input");
  width_is(op, p.out(op), heads * dim, "output");
  vector_is(p, op, 0, heads);
  for (int input : op.inputs)
    if (p.tensors()[input].rows != kAllRows) throw wrong(op, "its inputs must have a row for each token");
  check_layer(p, op, CacheKind::sliding, (int)group, op.integer("layer"));
  if (op.integer("window") > p.cache_groups()[group].window)
    throw wrong(op, "a window of " + std::to_string(op.integer("window")) + " over a cache group that keeps " +
                        std::to_string(p.cache_groups()[group].window));
  if (op.inputs.size() > 2) check_selection(p, op, 2, false);
  if (op.integer("rate")) check_entries(p, op, op.integer("entry_group"), op.integer("entry_layer"), dim);
}

void check_head_linear(const Program& p, const OpNode& op) {
  const WeightSpec& m = matrix(p, op, 0);
  const long heads = op.integer("heads"), offset = op.integer("offset");
  if (m.n % heads) throw wrong(op, std::to_string(m.n) + " rows do not divide by " + std::to_string(heads) + " heads");
  if (offset + heads * m.k > p.in(op).width) throw wrong(op, "reaches past its input");
  width_is(op, p.out(op), m.n, "output");
}

void check_causal_conv(const Program& p, const OpNode& op) {
  const long channels = p.in(op).width;
  width_is(op, p.out(op), channels, "output");
  if (p.in(op).rows != kAllRows) throw wrong(op, "its input must have a row for each token");
  vector_is(p, op, 0, channels * op.integer("taps"));
  if (op.weights.size() == 2) vector_is(p, op, 1, channels);
}

void check_gated_delta(const Program& p, const OpNode& op) {
  const long key = op.integer("key_dim"), value = op.integer("value_dim"), heads = p.out(op).width / value,
             keys = p.in(op).width - p.out(op).width, key_heads = keys / (2 * key);
  if (heads * value != p.out(op).width || keys <= 0 || keys % (2 * key) || heads % key_heads)
    throw wrong(op, "input of " + std::to_string(p.in(op).width) + " and output of " + std::to_string(p.out(op).width) +
                        " columns are not key heads of " + std::to_string(key) +
                        " and as many or a multiple of value heads of " + std::to_string(value));
  const long decays = op.flag("channels") ? heads * key : heads;
  width_is(op, p.in(op, 1), decays + heads, "second input");
  if (p.in(op).rows != kAllRows || p.in(op, 1).rows != kAllRows)
    throw wrong(op, "its inputs must have a row for each token");
  vector_is(p, op, 0, heads);
  vector_is(p, op, 1, decays);
}

void check_ssd(const Program& p, const OpNode& op) {
  const long state = op.integer("state_dim"), head = op.integer("head_dim"), heads = p.out(op).width / head,
             shared = p.in(op).width - p.out(op).width, groups = shared / (2 * state);
  if (heads * head != p.out(op).width || shared <= 0 || shared % (2 * state) || heads % groups)
    throw wrong(op, "input of " + std::to_string(p.in(op).width) + " and output of " + std::to_string(p.out(op).width) +
                        " columns are not heads of " + std::to_string(head) + " and groups of B and C of " +
                        std::to_string(state) + " that divide them");
  width_is(op, p.in(op, 1), heads, "second input");
  if (p.in(op).rows != kAllRows || p.in(op, 1).rows != kAllRows)
    throw wrong(op, "its inputs must have a row for each token");
  if (op.number("least_step") > op.number("most_step")) throw wrong(op, "least_step is above most_step");
  for (int i = 0; i < 3; i++) vector_is(p, op, i, heads);
}

void check_gated(const Program& p, const OpNode& op) { width_is(op, p.in(op), 2l * p.out(op).width, "input"); }

void check_add(const Program& p, const OpNode& op) {
  width_is(op, p.in(op, 1), p.in(op).width, "second input");
  if (p.in(op).rows != p.in(op, 1).rows) throw wrong(op, "its inputs differ in rows");
}

void check_multiply(const Program& p, const OpNode& op) {
  if ((long)op.integer("offset") + p.in(op).width > p.in(op, 1).width)
    throw wrong(op, "it reaches past its second input");
  if (p.in(op).rows != p.in(op, 1).rows) throw wrong(op, "its inputs differ in rows");
}

void check_scale(const Program& p, const OpNode& op) {
  if (op.weights.size()) vector_is(p, op, 0, 1);
}

void check_clamp(const Program& p, const OpNode& op) {
  for (int i = 0; i < 2; i++) vector_is(p, op, i, 1);
}

void check_standardize(const Program& p, const OpNode& op) {
  for (int i = 0; i < 2; i++) vector_is(p, op, i, p.in(op).width);
}

void check_concat(const Program& p, const OpNode& op) {
  long width = 0;
  for (size_t i = 0; i < op.inputs.size(); i++) {
    width += p.in(op, (int)i).width;
    if (p.in(op, (int)i).rows != p.in(op).rows) throw wrong(op, "its inputs differ in rows");
  }
  width_is(op, p.out(op), width, "output");
}

void check_spread_columns(const Program& p, const OpNode& op) { vector_is(p, op, 0, p.out(op).width); }

void check_all_rows(const Program& p, const OpNode& op) {
  if (p.in(op).rows != kAllRows) throw wrong(op, "its input must have all rows");
}

void check_plain_rows(const Program& p, const OpNode& op) {
  if (p.in(op).rows > kOutputRows) throw wrong(op, "its input must have rows of tokens or outputs");
}

void check_gated_rms_norm(const Program& p, const OpNode& op) {
  check_add(p, op);
  const int head_dim = op.integer("head_dim");
  if (p.in(op).width % head_dim)
    throw wrong(op, std::to_string(p.in(op).width) + " columns are not heads of " + std::to_string(head_dim));
  vector_is(p, op, 0, op.flag("gate_first") ? p.in(op).width : head_dim);
}

void check_select_rows(const Program& p, const OpNode& op) { width_is(op, p.out(op), p.in(op).width, "output"); }

void check_pool_rows(const Program& p, const OpNode& op) {
  check_all_rows(p, op);
  width_is(op, p.out(op), p.in(op).width, "output");
}

void check_merge_rows(const Program& p, const OpNode& op) {
  if (p.in(op).rows != kAllRows) throw wrong(op, "its input must have all rows");
  const bool mean = op.choice("how") == std::string("mean");
  width_is(op, p.out(op), (mean ? 1l : op.integer("count")) * p.in(op).width, "output");
}

void check_sample(const Program& p, const OpNode& op) {
  check_shard(op.integer("vocab_begin"), p.in(op).width, op.integer("vocab_size"));
  if (p.in(op).rows != kOutputRows) throw wrong(op, "its input must have a row for each row that samples");
}

void check_router(const Program& p, const OpNode& op) {
  const int experts = p.in(op).width, top = op.integer("top_k"), groups = op.integer("groups"),
            chosen = op.integer("top_groups");
  if (top > experts || p.row_sets()[p.out(op).rows].times != top)
    throw wrong(op, "top_k " + std::to_string(top) + " of " + std::to_string(experts) + " experts, and a row set of " +
                        std::to_string(p.row_sets()[p.out(op).rows].times) + " entries for each row");
  if (experts % groups || chosen > groups || top > experts / groups * chosen)
    throw wrong(op, std::to_string(chosen) + " of " + std::to_string(groups) + " groups of " + std::to_string(experts) +
                        " experts");
  width_is(op, p.out(op), 1, "output");
  if (op.flag("by_token")) {
    if (op.weights.size() != 1 || op.flag("expert_scales") || chosen < groups || p.in(op).rows > kOutputRows ||
        op.choice("scores") == std::string("softmax"))
      throw wrong(op, "by_token needs a table as its only weight, and excludes softmax, expert_scales and groups");
    const long values = p.weights()[op.weights[0]].n;
    if (values % top) throw wrong(op, "a table of " + std::to_string(values) + " values has no rows of top_k");
    return vector_is(p, op, 0, values);
  }
  if (op.weights.empty() && op.flag("expert_scales")) throw wrong(op, "expert_scales need a weight");
  if (op.weights.size() > 1 && !op.flag("expert_scales")) throw wrong(op, "a second weight without expert_scales");
  for (size_t i = 0; i < op.weights.size(); i++) vector_is(p, op, (int)i, experts);
}

void check_stream_weights(const Program& p, const OpNode& op) {
  const long streams = op.integer("streams"), all = streams * (2 + streams);
  const bool pre = p.in(op).width == streams;
  if (!pre) width_is(op, p.in(op), all, "input");
  vector_is(p, op, 0, pre ? 1 : 3);
  vector_is(p, op, 1, p.in(op).width);
}

void check_same_rows(const Program& p, const OpNode& op) {
  for (size_t i = 1; i < op.inputs.size(); i++)
    if (p.in(op, (int)i).rows != p.in(op).rows) throw wrong(op, "its inputs differ in rows");
}

void check_merge_streams(const Program& p, const OpNode& op) {
  const long streams = p.in(op).width / p.out(op).width;
  width_is(op, p.in(op), streams * p.out(op).width, "input");
  if (op.inputs.size() > 1 && p.in(op, 1).width < streams) throw wrong(op, "it has fewer weights than streams");
  check_same_rows(p, op);
}

void check_mix_streams(const Program& p, const OpNode& op) {
  const long streams = p.in(op).width / p.in(op, 1).width;
  width_is(op, p.in(op), streams * p.in(op, 1).width, "input");
  width_is(op, p.in(op, 2), streams * (2 + streams), "third input");
  check_same_rows(p, op);
}

void check_expert_linear(const Program& p, const OpNode& op) {
  const WeightSpec& m = matrix(p, op, 0);
  const long experts = op.integer("experts");
  width_is(op, p.in(op), m.k, "input");
  if (m.n % experts)
    throw wrong(op, std::to_string(m.n) + " rows do not divide by " + std::to_string(experts) + " experts");
  width_is(op, p.out(op), m.n / experts, "output");
  if (op.weights.size() == 2) vector_is(p, op, 1, m.n);
}

void check_combine_experts(const Program& p, const OpNode& op) {
  width_is(op, p.out(op), p.in(op).width, "output");
  width_is(op, p.in(op, 1), 1, "second input");
  if (p.in(op, 1).rows != p.in(op).rows) throw wrong(op, "its inputs differ in rows");
}

void check_dispatch_rows(const Program& p, const OpNode& op) {
  check_plain_rows(p, op);
  const int set = p.in(op, 1).rows;
  width_is(op, p.in(op, 1), 1, "second input");
  if (set <= kOutputRows || p.row_sets()[set].of != p.in(op).rows)
    throw wrong(op, "its second input must have a row set formed of the first one's rows");
}

void check_return_sums(const Program& p, const OpNode& op) {
  const int set = p.in(op).rows;
  if (op.inputs.size() < 2) return;
  check_plain_rows(p, op);
  if (p.in(op, 1).rows <= kOutputRows || p.row_sets()[p.in(op, 1).rows].of != set)
    throw wrong(op, "its second input has no entries of the first one's rows");
}

void check_dispatched_choices(const Program& p, const OpNode& op) {
  check_plain_rows(p, op);
  width_is(op, p.out(op), 1, "output");
  if (op.integer("experts") < p.row_sets()[p.out(op).rows].times)
    throw wrong(op, "it has fewer experts than a row chooses");
}

void check_sigmoid_mul(const Program& p, const OpNode& op) {
  width_is(op, p.in(op, 1), 1, "second input");
  if (p.in(op, 1).rows != p.in(op).rows) throw wrong(op, "its inputs differ in rows");
}

void check_adapted_columns(const Program& p, const OpNode& op) {
  if (op.integer("offset") + (long)op.integer("columns") > p.in(op).width)
    throw std::invalid_argument(std::string("op ") + op.spec->name + " reaches past its input");
}

void check_lora(const Program& p, const OpNode& op) {
  if (p.in(op, 1).rows != p.in(op).rows) throw wrong(op, "its inputs differ in rows");
  check_adapted_columns(p, op);
}

void check_expert_lora(const Program& p, const OpNode& op) {
  const int entries = p.in(op).rows;
  if (entries <= kOutputRows) throw wrong(op, "its first input has no rows of experts");
  if (p.in(op, 1).rows != entries && p.in(op, 1).rows != p.row_sets()[entries].of)
    throw wrong(op, "its second input has neither a row for each entry nor one for each row of these");
  check_adapted_columns(p, op);
}

void check_hidden_states(const Program& p, const OpNode& op) {
  if (p.in(op).rows != kOutputRows) throw wrong(op, "its input must have a row for each row with outputs");
}

// -- costs -----------------------------------------------------------------------------------------------------------
double values(const Program& p, const TensorSpec& t, const StepSize& size) { return p.rows_of(t.rows, size) * t.width; }

double bytes_of(const Program& p, int weight, const StepSize& size) {
  return size.weight_bytes.empty() ? p.weights()[weight].bytes() : size.weight_bytes.at(weight);
}

// Bytes of all inputs and outputs, once each.
double moved(const Program& p, const OpNode& op, const StepSize& size) {
  double total = 0;
  for (const auto* list : {&op.inputs, &op.outputs})
    for (int t : *list) total += values(p, p.tensors()[t], size) * (p.tensors()[t].type == TensorType::float32 ? 4 : 2);
  return total;
}

template <int kOperations>  // per value of the output
Cost each_value(const Program& p, const OpNode& op, const StepSize& size) {
  return {moved(p, op, size), kOperations * values(p, op.outputs.empty() ? p.in(op) : p.out(op), size)};
}

Cost cost_multiply(const Program& p, const OpNode& op, const StepSize& size) {
  const double count = values(p, p.out(op), size);  // of a second input that may be wider
  return {12 * count, count};
}

Cost cost_rotary_table(const Program&, const OpNode& op, const StepSize& size) {
  const double count = size.rows * op.integer("rotary_dim");
  return {count * 4, count};
}

Cost cost_embedding(const Program& p, const OpNode& op, const StepSize& size) {
  return {moved(p, op, size) + size.rows * bytes_of(p, op.weights[0], size) / p.weights()[op.weights[0]].n, 0};
}

Cost cost_all_reduce(const Program& p, const OpNode& op, const StepSize& size) {
  return {size.world > 1 ? moved(p, op, size) * size.world : 0, values(p, p.in(op), size) * (size.world - 1)};
}

Cost cost_linear(const Program& p, const OpNode& op, const StepSize& size) {
  return {moved(p, op, size) + bytes_of(p, op.weights[0], size),
          2.0 * p.weights()[op.weights[0]].k * values(p, p.out(op), size)};
}

Cost cost_head_norm(const Program& p, const OpNode& op, const StepSize& size) {
  const double count = p.rows_of(p.in(op).rows, size) * op.integer("heads") * op.integer("head_dim");
  return {8 * count, 4 * count};
}

Cost cost_rope(const Program& p, const OpNode& op, const StepSize& size) {
  const double count = p.rows_of(p.in(op).rows, size) * op.integer("heads") * op.integer("rotary_dim");
  return {8 * count, 3 * count};
}

Cost cost_span_attention(const Program& p, const OpNode& op, const StepSize& size) {
  const double written = op.integer("kv_heads") ? size.rows : 0;
  const double cache = (size.context + written) * size.position_bytes * kv_heads_of(op).count;
  const double seen = op.flag("bidirectional") ? 2 * size.seen - size.rows : size.seen;
  return {moved(p, op, size) + cache, seen * op.integer("q_heads") * 4 * op.integer("head_dim")};
}

Cost cost_latent_attention(const Program& p, const OpNode& op, const StepSize& size) {
  const double heads = p.out(op).width / op.integer("latent_dim");
  double seen = size.seen, read = size.context;
  if (op.inputs.size() > 3) seen = std::min(seen, size.rows * p.in(op, 3).width), read = std::min(read, seen);
  const double cache = (read + size.rows) * size.position_bytes;  // read and written
  return {moved(p, op, size) + cache, seen * heads * (4 * op.integer("latent_dim") + 2 * op.integer("rope_dim"))};
}

Cost cost_indexer(const Program& p, const OpNode& op, const StepSize& size) {
  const double cache = (size.context + size.rows) * size.position_bytes;  // read and written
  const double heads = p.in(op, 1).width, rate = std::max(1, op.integer("rate"));
  return {moved(p, op, size) + cache / rate, size.seen / rate * heads * (2 * p.in(op).width / heads + 3)};
}

Cost cost_compress(const Program& p, const OpNode& op, const StepSize& size) {
  const double values = size.rows * p.in(op).width / 2;
  return {3 * moved(p, op, size), 8 * values};  // rows are kept, and read again by later steps
}

Cost cost_compressed_attention(const Program& p, const OpNode& op, const StepSize& size) {
  const double rate = op.integer("rate"), window = size.rows * op.integer("window");
  double entries = rate ? size.seen / rate : 0;
  if (op.inputs.size() > 2) entries = std::min(entries, size.rows * p.in(op, 2).width);
  const double seen = std::min(size.seen, window) + entries;
  return {moved(p, op, size) + (size.rows + std::min(seen, size.context)) * size.position_bytes,
          4 * seen * p.in(op).width};
}

Cost cost_merge_streams(const Program& p, const OpNode& op, const StepSize& size) {
  return {moved(p, op, size), 2 * values(p, p.in(op), size)};
}

Cost cost_mix_streams(const Program& p, const OpNode& op, const StepSize& size) {
  const double streams = p.in(op).width / p.in(op, 1).width;
  return {moved(p, op, size), 2 * (streams + 1) * values(p, p.in(op), size)};
}

Cost cost_head_linear(const Program& p, const OpNode& op, const StepSize& size) {
  return {moved(p, op, size) + bytes_of(p, op.weights[0], size),
          2.0 * p.weights()[op.weights[0]].k * values(p, p.out(op), size)};
}

Cost cost_causal_conv(const Program& p, const OpNode& op, const StepSize& size) {
  return {moved(p, op, size), (2.0 * op.integer("taps") + 5) * values(p, p.out(op), size)};
}

Cost cost_gated_delta(const Program& p, const OpNode& op, const StepSize& size) {
  const double key = op.integer("key_dim"), value = op.integer("value_dim"), heads = p.out(op).width / value;
  const double sequences = size.outputs;  // an estimate: each reads its state once
  // Products with the state for the key, for the query and to advance it, and with half of 64 rows.
  return {moved(p, op, size) + 4 * sequences * heads * key * value,
          size.rows * heads * (6 * key * value + 32 * 4 * (key + value))};
}

Cost cost_ssd(const Program& p, const OpNode& op, const StepSize& size) {
  const double state = op.integer("state_dim"), values = p.out(op).width;
  // Each sequence reads its state once (an estimate). Products with the state for C and to advance it, and with half of
  // 64 rows.
  return {moved(p, op, size) + 4.0 * size.outputs * state * values, size.rows * values * (4 * state + 64)};
}

Cost cost_select_rows(const Program& p, const OpNode& op, const StepSize& size) {
  return {8 * values(p, p.out(op), size), 0};
}

Cost cost_pool_rows(const Program& p, const OpNode& op, const StepSize& size) {
  return {moved(p, op, size), values(p, p.in(op), size)};
}

Cost cost_expert_linear(const Program& p, const OpNode& op, const StepSize& size) {
  const double experts = op.integer("experts"), entries = p.rows_of(p.out(op).rows, size);
  const double touched = entries < experts ? entries / experts : 1;  // an upper bound: entries may share experts
  return {moved(p, op, size) + touched * bytes_of(p, op.weights[0], size),
          2.0 * p.weights()[op.weights[0]].k * values(p, p.out(op), size)};
}

// -- the table -------------------------------------------------------------------------------------------------------
std::vector<OpSpec> table() {
  const auto table_number = within(whole_or("table", 0), 0, 255);
  const auto counted = [](const char* name) { return within(whole_or(name, 0), 0, kLargestCount); };
  const auto positive = [](AttributeSpec a) { return within(std::move(a), 1, kLargestCount); };
  const auto at_least_0 = [](AttributeSpec a) { return a.least = 0, a; };
  const auto of_rank = [](const char* name, RankRule rule, int block = 0, int blocks = 1) {
    AttributeSpec a = whole(name, Scope::rank);
    a.rule = rule, a.block = block, a.blocks = blocks;
    return a;
  };
  const auto optional = [](AttributeSpec a) { return a.required = false, a; };  // the default is 0
  return {
#define OP(name, ...) {Op::name, #name, __VA_ARGS__},
#include "program/op_table.h"
#undef OP
  };
}

}  // namespace

int OpSpec::attribute(const std::string& wanted) const {
  for (size_t i = 0; i < attributes.size(); i++)
    if (wanted == attributes[i].name) return (int)i;
  return -1;
}

const std::vector<OpSpec>& op_specs() {
  static const std::vector<OpSpec> specs = table();
  return specs;
}

const OpSpec& op_spec(const std::string& name) {
  for (const OpSpec& spec : op_specs())
    if (name == spec.name) return spec;
  throw std::invalid_argument("unknown op " + name);
}

const char* name_of(AttributeType type) {
  constexpr const char* kNames[] = {"integer", "number", "flag", "choice"};
  return kNames[(int)type];
}

const char* name_of(Scope scope) {
  constexpr const char* kNames[] = {"model", "rank", "graph"};
  return kNames[(int)scope];
}

const char* name_of(RankRule rule) {
  constexpr const char* kNames[] = {"none",       "offset",    "width",        "heads",   "begin",       "head_begin",
                                    "own_offset", "own_width", "weight_begin", "experts", "expert_begin"};
  return kNames[(int)rule];
}

const char* name_of(RowRule rule) {
  constexpr const char* kNames[] = {"none", "as_input", "all", "plain", "selected", "routed", "expanded", "combined"};
  return kNames[(int)rule];
}

}  // namespace as
