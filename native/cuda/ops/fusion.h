// Which adjacent ops one launch computes. `ops` is the list of ops of one form of a program.
#pragma once
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/ops/ops.h"

namespace as::cuda {

constexpr int kMaxNormed = 8192;  // columns: up to this width all kernels norm with the same bits

// The ops of a form: all ops with adapters, all except those of adapters without.
std::vector<OpNode> ops_of(const Program& program, bool adapted);

// Whether an op from `first` on reads a tensor before one overwrites it.
bool read_from(const std::vector<OpNode>& ops, size_t first, int tensor);
// Whether ops[linear] computes gate and up columns that only the next op reads, which multiplies them.
bool is_gated(const std::vector<OpNode>& ops, const Weights& weights, size_t linear);
// The add after ops[i], if it is the only reader of `tensor`. Skips an all_reduce between them if there is one rank.
std::optional<size_t> add_after(const Binding& b, size_t i, int tensor);

// The norm behind ops[last], which changes its first input in place, if the kernel of that op can compute it. Its op is
// then `last`.
void take_norm(const Binding& b, size_t& last, Norm& norm, Rows& normed);

// Whether ops[norm] writes 8-bit activations that only the next linear reads.
bool norms_to_bytes(const Binding& b, size_t norm);
// Whether ops[linear] makes products of residual streams, which become weights.
bool multiplies_streams(const Binding& b, size_t linear);
// Whether only the next linear reads what ops[norm] writes. The linear may then norm the single row of a step itself,
// or all rows if it multiplies streams.
bool norms_for_linear(const Binding& b, size_t norm);
// Whether the ops behind ops[weights], which makes weights of residual streams, sum the streams by these and norm the
// sums, and no other op reads the sums; only mix_streams reads the weights later.
bool merges_and_norms(const Binding& b, size_t weights);
// Whether ops[norm] is computed together with the logits of the router that follows it, in steps of one row.
bool norms_with_router(const Binding& b, size_t norm);
// Whether the layer of ops[router] has special kernels for steps of one row.
bool has_row_kernels_at(const Binding& b, size_t router);
// The GEMM of a router's logits.
GemmArgs logits_of(const Binding& b, size_t linear);
// Whether ops[rope] rotates all queries and keys of the attention that follows.
bool rotates_in_attention(const Binding& b, size_t rope);
// Whether ops[norm] and the next op norm all queries and all keys of the attention that follows, and no other op reads
// the normed heads.
bool norms_in_attention(const Binding& b, size_t norm);

// Where ops[i], which changes its first input in place, writes it: as the 16-bit tiles that the next op, a linear,
// would make of it, if no other op reads it.
Rows tiles_or_values(Binding& b, size_t i);

// Where ops[i] writes its output directly if the next op sums that over ranks.
std::optional<Rows> partial_of(const Binding& b, size_t i);
// The other rank's buffer to which the GEMM ops[i] pushes its partial sums of few rows; null: it does not push.
uint16_t* place_of(const Binding& b, size_t i);

}  // namespace as::cuda
