// Ops that are compiled once for each 16-bit type (kernels/common/dtype16.h), in a namespace of each.
#pragma once
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/attention/compress.h"
#include "cuda/kernels/attention/indexer.h"
#include "cuda/kernels/comm/sum_ranks.h"
#include "cuda/kernels/common/roofline.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/kernels/gemm/gemm_heads.h"
#include "cuda/kernels/lora/lora.h"
#include "cuda/kernels/moe/moe.h"
#include "cuda/kernels/norm/streams.h"
#include "cuda/kernels/norm/vision.h"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {

#define AS_OPS                   \
  AS_OP(pack_rows);              \
  AS_OP(read_row);               \
  AS_OP(pair_rows);              \
  AS_OP(embed);                  \
  AS_OP(rms_norm);               \
  AS_OP(silu_mul);               \
  AS_OP(gelu_tanh_mul);          \
  AS_OP(select_rows);            \
  AS_OP(keep_and_select);        \
  AS_OP(to_tiles);               \
  AS_OP(gather_columns);         \
  AS_OP(copy_given);             \
  AS_OP(merge_rows);             \
  AS_OP(layer_norm);             \
  AS_OP(activate);               \
  AS_OP(merge_and_norm);         \
  AS_OP(gelu_mul);               \
  AS_OP(prefill_clusters);       \
  AS_OP(gemm_dtype16);           \
  AS_OP(add_lora);               \
  AS_OP(silu_mul_pairs);         \
  AS_OP(add_expert_lora);        \
  AS_OP(gate_entries);           \
  AS_OP(store_cache);            \
  AS_OP(attend_decode);          \
  AS_OP(attend_prefill);         \
  AS_OP(attend_prefill_ropes);   \
  AS_OP(store_and_attend);       \
  AS_OP(store_latent);           \
  AS_OP(attend_latent_decode);   \
  AS_OP(attend_latent_prefill);  \
  AS_OP(attend_latent_selected); \
  AS_OP(score_positions);        \
  AS_OP(compress);               \
  AS_OP(gemm_heads);             \
  AS_OP(sum_ranks);              \
  AS_OP(gemm_experts);           \
  AS_OP(combine_experts);        \
  AS_OP(add_shared_expert);      \
  AS_OP(norms_with_logits);      \
  AS_OP(norm_and_logits);        \
  AS_OP(gate_row);               \
  AS_OP(combine_row);            \
  AS_OP(gemm_chosen_experts);    \
  AS_OP(gated_rms_norm);         \
  AS_OP(relu_square);            \
  AS_OP(sigmoid_gate);           \
  AS_OP(fill_noise);

#define AS_OP(op) decltype(cuda::op) op
namespace bf16 {
AS_OPS
}
namespace f16 {
AS_OPS
}
#undef AS_OPS
#undef AS_OP

}  // namespace as::cuda
