// The op table: one row for each op. op_spec.h makes the enumeration from it and op_spec.cpp the specs: each defines OP
// and includes this file. A row is
//   OP(name, inputs, outputs, weights, in place, rows, attributes, check, cost)
// clang-format off
// Cosines and sines of the rows' positions. A row's length is its prompt's length, or position + 1 if that is larger.
// Beyond original_max, a dynamic base grows with the length (growth "linear": as in transformers; "powers": as in Qwen
// v1, in powers of two of the prompt's length), or the second weight (long_table) is used. A slot whose initial history
// was longer uses long_table for all rows. temporal, height, width: how many pairs use each component of 3-D positions.
OP(rotary_table, kNone, kNone, {1, 2}, false, RowRule::none,
   {number_or("attention_factor", 1), flag("dynamic"), number_or("base", 0), number_or("factor", 1),
    number_or("original_max", 0), whole("rotary_dim"), table_number, choice("growth", {"linear", "powers"}),
    counted("temporal"), counted("height"), counted("width"), flag("interleaved_sections"), flag("long_table")},
   check_rotary_table, cost_rotary_table)
// Scaled rows of a table; zeros for ids of other ranks. Of rows that the plan gives, the first columns are passed
// through, on rank 0; or, with a given_id, they have the row of that id.
OP(embedding, kNone, kOne, kOne, false, RowRule::all,
   {number_or("scale", 1), within(whole_or("given_id", -1), -1, kLargestCount), of_rank("vocab_begin", RankRule::weight_begin)}, check_embedding, cost_embedding)
// The rows that the plan gives: patches of images, for example. Zeros where it gives none.
OP(given_rows, kNone, kOne, kNone, false, RowRule::all, {}, check_nothing, each_value<0>)
// Adds columns [offset, offset + width) of the rows that the plan gives; other rows do not change.
OP(add_given, kOne, kOne, kNone, true, RowRule::as_input, {counted("offset")}, check_all_rows, each_value<1>)
// Adds a table [side * side, width], interpolated bilinearly: the height and width of the row's rotary position, of an
// image as large as those of the sequence's rows say, are stretched over the side, corners over corners. axes: the table
// is [2, side, width]; the row of the width in its first half is added, and that of the height in the second, the last
// ones beyond it.
OP(grid_embedding, kOne, kOne, kOne, true, RowRule::as_input, {within(whole("side"), 1, 4096), flag("axes")},
   check_grid_embedding, each_value<8>)
// Adds a row of a table of positions: that of the row's position + offset, or the last one beyond it. Then, if there is a second table of segments,
// a row of that one: row 1 for what follows the sequence's first `separator`, row 0 up to it.
OP(position_embedding, kOne, kOne, {1, 2}, true, RowRule::as_input,
   {positive(whole("positions")), counted("offset"), counted("separator")}, check_position_embedding, each_value<1>)
// The sum of the ranks' partial results, in rank order.
OP(all_reduce, kOne, kOne, kNone, true, RowRule::as_input, {}, check_nothing, cost_all_reduce)
// unit_offset: the weight is 1 + w.
OP(rms_norm, kOne, kOne, kOne, false, RowRule::as_input, {number("eps"), flag("unit_offset")},
   check_rms_norm, each_value<4>)
// Each row less its mean, divided by its standard deviation; times the first weight, plus the second.
OP(layer_norm, kOne, kOne, kTwo, false, RowRule::as_input, {number("eps")}, check_layer_norm, each_value<8>)
OP(linear, kOne, kOne, {1, 2}, false, RowRule::as_input, {}, check_linear, cost_linear)
OP(head_norm, kOne, kOne, kOne, true, RowRule::as_input,
   {number("eps"), positive(whole("head_dim")), flag("unit_offset"), of_rank("offset", RankRule::offset),
    of_rank("heads", RankRule::heads), within(whole("block", Scope::graph), 0, 255)},
   check_head_norm, cost_head_norm)
// Input: [queries | keys | values], or queries only. Outputs the sum of squares of all queries and that of all keys. A head
// that several ranks hold is counted on one rank.
OP(qk_square_sums, kOne, kOne, kNone, false, RowRule::as_input,
   {at_least_0(of_rank("q_columns", RankRule::width)),
    at_least_0(optional(of_rank("k_offset", RankRule::own_offset, 1))),
    at_least_0(optional(of_rank("k_columns", RankRule::own_width, 1)))},
   check_qk_square_sums, each_value<1>)
// RMS norm over all queries and over all keys, if there are some, of all ranks (widths q_width and k_width), from the
// square sums (second input) after all_reduce.
OP(qk_norm, kTwo, kOne, {1, 2}, true, RowRule::as_input,
   {number("eps"), positive(whole("q_width")), counted("k_width"), at_least_0(of_rank("q_columns", RankRule::width)),
    at_least_0(optional(of_rank("k_columns", RankRule::width, 1)))},
   check_qk_norm, each_value<2>)
// Rotates rotary_dim features of each head, from feature `skip` on. Pairs are (i, i + rotary_dim / 2) or (2 i, 2 i + 1).
// inverse: rotates them back.
OP(rope, kOne, kOne, kNone, true, RowRule::as_input,
   {positive(whole("head_dim")), whole_or_as("rotary_dim", "head_dim"), table_number,
    choice("pairs", {"halves", "interleaved"}), counted("skip"), flag("inverse"), within(whole_or("block", 0, Scope::graph), 0, 255),
    within(whole_or("blocks", 2, Scope::graph), 1, 255), of_rank("offset", RankRule::offset),
    of_rank("heads", RankRule::heads, 0, 2)},
   check_rope, cost_rope)
// Input: [queries | keys | values]. A query at position p sees positions in (p - window, p]; window 0: all up to p.
// Scores are scale * q k, then soft_cap * tanh(score / soft_cap), plus slope * (key position - p). A sink is one more
// score without a value. logn: queries beyond that position are multiplied by log(p + 1) / log(logn).
// bidirectional: a query sees positions in (p - window, p + window), or all. Then a step has all rows of a sequence, and
// layers may share their place in the cache, because no later step reads it. segments: it sees those of its segment, as
// the plan divides the sequence. images: a query in an image of the prompt also sees all positions of the image; a step
// has all rows that are left of an image. Without KV heads the input is queries alone: they read the keys and values that
// an earlier op keeps in the same layer of the same cache group.
OP(span_attention, kOne, kOne, {0, 2}, false, RowRule::as_input,
   {whole("layer"), positive(whole("head_dim")), whole("group"), number("scale"), within(whole_or("cache_group", 0), 0, 255),
    counted("window"), at_least_0(number_or("soft_cap", 0)), flag("sinks"), flag("alibi"),
    flag("bidirectional"), flag("segments"), flag("images"), at_least_0(number_or("logn", 0)), of_rank("q_heads", RankRule::heads),
    at_least_0(optional(of_rank("kv_heads", RankRule::heads, 1))),
    optional(of_rank("q_head_begin", RankRule::head_begin)), optional(of_rank("kv_begin", RankRule::head_begin, 1))},
   check_span_attention, cost_span_attention)
// Latent attention (DeepSeek-V2). Inputs: queries times the keys' up-projection, `latent_dim` a head; rotated parts of
// the queries, `rope_dim` a head, in the first columns; and the row that the cache keeps, [latent | rotated key].
// Scores are scale * q row over both parts; a head's output is the weighted sum of latents. With a fourth input, that of
// an indexer, a row sees the positions that it selects. rate: that of an indexer that outputs the positions of entries.
OP(latent_attention, {3, 4}, kOne, kNone, false, RowRule::as_input,
   {whole("layer"), positive(whole("latent_dim")), at_least_0(whole("rope_dim")), number("scale"),
    within(whole_or("cache_group", 0), 0, 255), counted("rate")},
   check_latent_attention, cost_latent_attention)
// DeepSeek-V3.2's lightning indexer. Inputs: queries, a weight for each head, and the key, which the cache keeps as a
// layer of its own. A row scores each position up to its own by the sum over heads of weight *
// max(0, query key), and outputs the positions with the largest scores, as many as the output is wide: ascending, then
// -1. The lowest position wins ties. With a rate it has no key: it scores the entries that a compress op with the same
// layer and rate keeps, as far as their positions are not behind the row's, and outputs their numbers. positions: it
// outputs the positions of these entries, and then those up to the row's that no entry has yet: rate - 1 more columns
// than entries have positions (GLM-5.3-Flash).
OP(indexer, {2, 3}, kOne, kNone, false, RowRule::as_input,
   {whole("layer"), within(whole_or("cache_group", 0), 0, 255), counted("rate"), flag("positions")}, check_indexer,
   cost_indexer)
// Compresses each `rate` positions of a sequence, from a multiple of it on, to an entry of the cache (DeepSeek-V4).
// Input: [values | gates]; weights: a bias of gates [rate, gates' width], and the norm's, if there is one. An entry's
// channel is the sum of the values times the softmax over positions of gate + bias; then come the RMS norm, and the
// rotation of the last rotary_dim features, in interleaved pairs, by the first position of the rate. overlapping:
// values and gates are twice as wide; an entry is of the second halves of its own positions, and the first halves of as
// many before them. Rows are kept as `rows_layer` of a sliding or latent group; entries as a layer of a full or latent
// group.
OP(compress, kOne, kNone, {1, 2}, false, RowRule::none,
   {within(whole("rate"), 2, 1 << 16), flag("overlapping"), number("eps"), counted("rotary_dim"), table_number,
    at_least_0(whole("rows_layer")), within(whole("rows_group"), 0, 255), at_least_0(whole("layer")),
    within(whole("cache_group"), 0, 255)},
   check_compress, cost_compress)
// Attention over the last `window` positions of a sliding group and, with a rate, over the entries of a compress op with
// that rate, in entry_group and entry_layer, whose positions are not behind the row's (DeepSeek-V4). Inputs: queries,
// and the row that the cache keeps, both key and value of all heads; with a third one, that of an indexer, a row sees
// the entries that it selects. Weight: a sink for each head, one more score without a value.
OP(compressed_attention, {2, 3}, kOne, kOne, false, RowRule::as_input,
   {at_least_0(whole("layer")), within(whole("cache_group"), 0, 255), positive(whole("window")), number("scale"),
    within(whole_or("rate", 0), 0, 1 << 16), counted("entry_layer"), within(whole_or("entry_group", 0), 0, 255)},
   check_compressed_attention, cost_compressed_attention)
// Multiplies each head with its matrix from a stack. Heads are the columns from `offset` on (of block `block`).
OP(head_linear, kOne, kOne, kOne, false, RowRule::as_input,
   {within(whole_or("block", 0, Scope::graph), 0, 255), at_least_0(of_rank("offset", RankRule::offset)),
    positive(of_rank("heads", RankRule::experts))},
   check_head_linear, cost_head_linear)
// Sums of each channel's last `taps` rows of the sequence times its weights [channels, taps], the last of which is the
// row's own, plus a bias (optional second weight), then SiLU if activated.
OP(causal_conv, kOne, kOne, {1, 2}, false, RowRule::as_input, {within(whole("taps"), 1, 64), flag("activated")},
   check_causal_conv, cost_causal_conv)
// The gated delta rule. Inputs: [queries | keys | values] and [a | b]; weights: A_log and dt_bias. For each value head,
// g = -exp(A_log) log(1 + exp(a + dt_bias)), one for the head or for each of its key's channels; beta = sigmoid(b).
// lower_bound: if it is not 0, g = lower_bound * sigmoid(exp(A_log) (a + dt_bias)) instead.
// With keys and queries of length 1, and queries divided by sqrt(key_dim), a row does S = e^g S, then S += k (beta (v -
// S^T k))^T, and outputs S^T q. A key head serves adjacent value heads.
OP(gated_delta, kTwo, kOne, kTwo, false, RowRule::as_input,
   {positive(whole("key_dim")), positive(whole("value_dim")), flag("channels"),
    within(number_or("lower_bound", 0), -kAnyNumber, 0)}, check_gated_delta, cost_gated_delta)
// Mamba2's selective state space (SSD). Inputs: [x | B | C] and dt; weights: A_log, dt_bias and D. For each head, dt =
// log(1 + exp(dt + dt_bias)) within [least_step, most_step], and a row does S = e^(-exp(A_log) dt) S + B (dt x)^T, and
// outputs S^T C + D x. A group of B and C, of state_dim each, serves adjacent heads.
OP(ssd, kTwo, kOne, {3, 3}, false, RowRule::as_input,
   {positive(whole("state_dim")), positive(whole("head_dim")), number_or("least_step", 0),
    number_or("most_step", kAnyNumber)}, check_ssd, cost_ssd)
// RMS norm of each head, times the activated gate (second input) of each value; or, if gate_first, RMS norm of these
// products, with a weight for each value of all heads.
OP(gated_rms_norm, kTwo, kOne, kOne, true, RowRule::as_input,
   {number("eps"), positive(whole("head_dim")), choice("gate", {"silu", "sigmoid"}), flag("gate_first")},
   check_gated_rms_norm, each_value<9>)
// x * sigmoid(gate), with a gate for each value.
OP(sigmoid_gate, kTwo, kOne, kNone, true, RowRule::as_input, {}, check_add, each_value<5>)
// Activation of the first half of the columns, times the second half.
OP(silu_mul, kOne, kOne, kNone, false, RowRule::as_input, {}, check_gated, each_value<5>)
OP(gelu_tanh_mul, kOne, kOne, kNone, false, RowRule::as_input, {}, check_gated, each_value<9>)
OP(gelu_mul, kOne, kOne, kNone, false, RowRule::as_input, {}, check_gated, each_value<12>)
// gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within +-limit.
OP(clamped_silu_mul, kOne, kOne, kNone, false, RowRule::as_input, {number("alpha"), number("limit")},
   check_gated, each_value<9>)
// silu(gate) * up, with gate at most `limit` and up within +-limit.
OP(limited_silu_mul, kOne, kOne, kNone, false, RowRule::as_input, {within(number("limit"), 0, kAnyNumber)},
   check_gated, each_value<7>)
// An activation of each value. gelu: x / 2 * (1 + erf(x / sqrt(2))). quick_gelu: x * sigmoid(1.702 x).
OP(activate, kOne, kOne, kNone, true, RowRule::as_input,
   {choice("function", {"gelu", "gelu_tanh", "silu", "tanh", "relu", "quick_gelu"})}, check_nothing, each_value<9>)
// x^2 where x is positive, otherwise 0.
OP(relu_square, kOne, kOne, kNone, true, RowRule::as_input, {}, check_nothing, each_value<2>)
OP(add, kTwo, kOne, kNone, true, RowRule::as_input, {}, check_add, each_value<1>)
// Products of the values of two tensors. offset: the second one's columns begin there.
OP(multiply, kTwo, kOne, kNone, true, RowRule::as_input, {counted("offset")}, check_multiply, cost_multiply)
// x * factor, times the one value of the weight, if there is one.
OP(scale, kOne, kOne, {0, 1}, true, RowRule::as_input, {number_or("factor", 1)}, check_scale, each_value<1>)
// Each value, but no less than the one value of the first weight and no more than that of the second.
OP(clamp, kOne, kOne, kTwo, true, RowRule::as_input, {}, check_clamp, each_value<2>)
// Each row, less the first weight, times the second.
OP(standardize, kOne, kOne, kTwo, true, RowRule::as_input, {}, check_standardize, each_value<2>)
// cap * tanh(x / cap)
OP(soft_cap, kOne, kOne, kNone, true, RowRule::as_input, {within(number("cap"), 1e-30, kAnyNumber)},
   check_nothing, each_value<3>)
// Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): a row has `streams` streams of the residual, one after
// the other. stream_weights, in place: of products [pre | post | mix], the latter a matrix by rows, each times the part's
// factor (first weight) plus its base (second weight). pre becomes sigmoid + eps; post 2 sigmoid; of mix, the softmax of
// each row, plus eps, is divided by its columns' sums plus eps, and then as many times as there are further iterations by
// the rows' and by the columns'. Or pre alone.
OP(stream_weights, kOne, kOne, kTwo, true, RowRule::as_input,
   {within(whole("streams"), 1, 64), within(whole("iterations"), 1, 1000), number("eps")}, check_stream_weights,
   each_value<200>)
// The sum of the streams times pre (second input: weights); without weights, the mean of the streams.
OP(merge_streams, {1, 2}, kOne, kNone, false, RowRule::as_input, {}, check_merge_streams, cost_merge_streams)
// Stream k becomes post[k] * y + the sum over j of mix[j][k] * stream j. Inputs: streams, y and weights.
OP(mix_streams, {3, 3}, kOne, kNone, true, RowRule::as_input, {}, check_mix_streams, cost_mix_streams)
// Input: logits of experts. Forms the output's row set, top_k entries for each row, and outputs their weights. Scores
// plus the correction (optional weight) select: first top_groups groups by the sum of their two largest (or by the
// largest), then experts; the lowest index wins ties. Weights are the plain scores, optionally normalized to sum 1,
// times scale. expert_scales: and times the expert's value of the last weight. by_token: the only weight is a table
// [tokens, top_k] of the experts for each token, in place of a choice. sqrt_softplus: sqrt(log(1 + e^logit)).
OP(router, kOne, kOne, {0, 2}, false, RowRule::routed,
   {positive(whole("top_k")), choice("scores", {"softmax", "sigmoid", "sqrt_softplus"}), flag("normalized"), number_or("scale", 1),
    positive(whole_or("groups", 1)), positive(whole_or("top_groups", 1)),
    choice("group_scores", {"two_largest", "largest"}), flag("expert_scales"), flag("by_token")},
   check_router, each_value<8>)
// Multiplies each entry with its expert's matrix from a stack of `experts` matrices (and biases). The rank has these
// experts from expert_begin on. Entries of other ranks' experts become zero.
OP(expert_linear, kOne, kOne, {1, 2}, false, RowRule::expanded,
   {positive(of_rank("experts", RankRule::experts)),
    at_least_0(optional(of_rank("expert_begin", RankRule::expert_begin)))},
   check_expert_linear, cost_expert_linear)
// Sums each row's entries times their weights (second input), in ascending order of experts.
OP(combine_experts, kTwo, kOne, kNone, false, RowRule::combined, {}, check_combine_experts, each_value<2>)
// In a mixed group, the model's rank sends rows (first input), with the experts that the router of the second input's row
// set has chosen for each, to ranks that hold slices of the experts; and outputs the sum of the partial sums that these
// return, in rank order. layer: the number of these experts among all that are sent rows, on both sides. elsewhere:
// another model rank exchanges the messages. dispatch_rows then sends nothing and returned_sums outputs zeros; the
// all-reduce that follows adds the sender's sums.
OP(dispatch_rows, kTwo, kNone, kNone, false, RowRule::none, {at_least_0(whole("layer")), flag("elsewhere")},
   check_dispatch_rows, each_value<0>)
OP(returned_sums, kNone, kOne, kNone, false, RowRule::plain, {flag("elsewhere")}, check_nothing, each_value<1>)
// A rank of experts: the rows that it was sent; the row set, and the entries' weights, that it was sent with them, formed
// of its input's rows; and what it returns: a sum for each row, or the entries of a row set, which the model's rank sums.
OP(dispatched_rows, kNone, kOne, kNone, false, RowRule::plain, {at_least_0(whole("layer"))}, check_nothing,
   each_value<0>)
OP(dispatched_choices, kOne, kOne, kNone, false, RowRule::routed, {positive(whole("experts"))}, check_dispatched_choices,
   each_value<0>)
// The partial sums, or entries; with both inputs the latter where a message asks for them.
OP(return_sums, {1, 2}, kNone, kNone, false, RowRule::none, {}, check_return_sums, each_value<0>)
// y * sigmoid(gate of the row)
OP(sigmoid_mul, kTwo, kOne, kNone, true, RowRule::as_input, {}, check_sigmoid_mul, each_value<1>)
// Adds B A x of the row's adapter to columns [offset, offset + columns) of y, which hold `blocks` blocks. target: which
// of the adapter's pairs of matrices. Follows the linear that computes y. Rows without an adapter do not change.
OP(lora, kTwo, kOne, kNone, true, RowRule::as_input,
   {at_least_0(whole("target")), within(whole_or("block", 0, Scope::graph), 0, 255),
    within(whole_or("blocks", 1, Scope::graph), 1, 255),
    at_least_0(of_rank("offset", RankRule::offset)), at_least_0(of_rank("columns", RankRule::width))},
   check_lora, each_value<1>)
// The same for entries of a row set: expert e of `experts` has target + e. The second input has a row for each entry, or
// for each row that the entries are of. Follows the expert_linear that computes y.
OP(expert_lora, kTwo, kOne, kNone, true, RowRule::as_input,
   {at_least_0(whole("target")), positive(whole("experts")), within(whole_or("block", 0, Scope::graph), 0, 255),
    at_least_0(of_rank("offset", RankRule::offset)), at_least_0(of_rank("columns", RankRule::width))},
   check_expert_lora, each_value<1>)
// The columns of all inputs, one after the other.
OP(concat, {2, 3}, kOne, kNone, false, RowRule::as_input, {}, check_concat, each_value<0>)
// The logits of a smaller vocabulary as those of the whole one: the weight names the input's column for each column of
// the output; -1: none, the logit is -infinity.
OP(spread_columns, kOne, kOne, kOne, false, RowRule::as_input, {}, check_spread_columns, each_value<1>)
// Keeps the rows, hidden states, for a draft head: a program whose kept_hidden outputs, for each of its rows, a row
// that the model or the draft head itself has kept in an earlier step.
OP(keep_hidden, kOne, kNone, kNone, false, RowRule::none, {}, check_all_rows, each_value<0>)
OP(kept_hidden, kNone, kOne, kNone, false, RowRule::all, {}, check_nothing, each_value<0>)
OP(select_rows, kOne, kOne, kNone, false, RowRule::selected, {}, check_select_rows, cost_select_rows)
// One row for each sequence, of which the step has all rows: its first or last row, or the mean of its rows.
OP(pool_rows, kOne, kOne, kNone, false, RowRule::selected, {choice("pooling", {"cls", "mean", "last"})}, check_pool_rows,
   cost_pool_rows)
// One row for each `count` adjacent rows of a sequence, of which the step has all rows: their columns one after the
// other ("concat"), their values of each column one after the other ("interleave"), or their mean.
OP(merge_rows, kOne, kOne, kNone, false, RowRule::selected,
   {within(whole("count"), 1, 4096), choice("how", {"concat", "interleave", "mean"})}, check_merge_rows, cost_pool_rows)
// Outputs hidden states for items that request them.
OP(hidden_states, kOne, kNone, kNone, false, RowRule::none, {}, check_hidden_states, each_value<0>)
// Samples a token for each item that generates, and computes log probabilities of prompt tokens for the others.
OP(sample, kOne, kNone, kNone, false, RowRule::none, {whole("vocab_size"), of_rank("vocab_begin", RankRule::begin)},
   check_sample, each_value<1>)
