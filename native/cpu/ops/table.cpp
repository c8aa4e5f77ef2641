// The CPU's ops: one row each.
#include <map>

#include "cpu/ops/ops.h"

namespace as {

std::unique_ptr<BoundOp> bind_by_value(const Binding&);
std::unique_ptr<BoundOp> bind_combine_experts(const Binding&);
std::unique_ptr<BoundOp> bind_embedding(const Binding&);
std::unique_ptr<BoundOp> bind_expert_linear(const Binding&);
std::unique_ptr<BoundOp> bind_gated_mul(const Binding&);
std::unique_ptr<BoundOp> bind_head_norm(const Binding&);
std::unique_ptr<BoundOp> bind_hidden_states(const Binding&);
std::unique_ptr<BoundOp> bind_linear(const Binding&);
std::unique_ptr<BoundOp> bind_lora(const Binding&);
std::unique_ptr<BoundOp> bind_qk_norm(const Binding&);
std::unique_ptr<BoundOp> bind_qk_square_sums(const Binding&);
std::unique_ptr<BoundOp> bind_rope(const Binding&);
std::unique_ptr<BoundOp> bind_rotary_table(const Binding&);
std::unique_ptr<BoundOp> bind_router(const Binding&);
std::unique_ptr<BoundOp> bind_sample(const Binding&);
std::unique_ptr<BoundOp> bind_select_rows(const Binding&);
std::unique_ptr<BoundOp> bind_sigmoid_mul(const Binding&);
std::unique_ptr<BoundOp> bind_span_attention(const Binding&);
std::unique_ptr<BoundOp> bind_sum(const Binding&);

Bind cpu_op(const std::string& name) {
  static const std::map<std::string, Bind> ops = {
      {"add", bind_sum},
      {"add+rms_norm", bind_sum},
      {"all_reduce", bind_sum},
      {"all_reduce+add", bind_sum},
      {"all_reduce+add+rms_norm", bind_sum},
      {"clamped_silu_mul", bind_gated_mul},
      {"combine_experts", bind_combine_experts},
      {"embedding", bind_embedding},
      {"expert_linear", bind_expert_linear},
      {"expert_linear+silu_mul", bind_expert_linear},
      {"gelu_tanh_mul", bind_gated_mul},
      {"head_norm", bind_head_norm},
      {"hidden_states", bind_hidden_states},
      {"linear", bind_linear},
      {"linear+add", bind_linear},
      {"linear+silu_mul", bind_linear},
      {"lora", bind_lora},
      {"lora+lora", bind_lora},
      {"lora+lora+lora", bind_lora},
      {"qk_norm", bind_qk_norm},
      {"qk_square_sums", bind_qk_square_sums},
      {"rms_norm", bind_sum},
      {"rms_norm+linear", bind_linear},
      {"rms_norm+linear+silu_mul", bind_linear},
      {"rope", bind_rope},
      {"rotary_table", bind_rotary_table},
      {"router", bind_router},
      {"sample", bind_sample},
      {"scale", bind_by_value},
      {"select_rows", bind_select_rows},
      {"sigmoid_mul", bind_sigmoid_mul},
      {"silu_mul", bind_gated_mul},
      {"soft_cap", bind_by_value},
      {"span_attention", bind_span_attention},
  };
  // Any number of norms and rotations of heads before it.
  const std::string attention = "+span_attention";
  const bool attends =
      name.size() > attention.size() && !name.compare(name.size() - attention.size(), attention.size(), attention);
  const auto found = ops.find(attends ? "span_attention" : name);
  return found == ops.end() ? nullptr : found->second;
}

}  // namespace as
