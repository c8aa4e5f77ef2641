// The CPU's ops: one row each.
#include <map>

#include "cpu/ops/ops.h"

namespace as {

std::unique_ptr<BoundOp> bind_add(const Binding&);
std::unique_ptr<BoundOp> bind_add_rms_norm(const Binding&);
std::unique_ptr<BoundOp> bind_all_reduce(const Binding&);
std::unique_ptr<BoundOp> bind_embedding(const Binding&);
std::unique_ptr<BoundOp> bind_head_norm(const Binding&);
std::unique_ptr<BoundOp> bind_linear(const Binding&);
std::unique_ptr<BoundOp> bind_linear_silu_mul(const Binding&);
std::unique_ptr<BoundOp> bind_rms_norm(const Binding&);
std::unique_ptr<BoundOp> bind_rope(const Binding&);
std::unique_ptr<BoundOp> bind_rotary_table(const Binding&);
std::unique_ptr<BoundOp> bind_sample(const Binding&);
std::unique_ptr<BoundOp> bind_select_rows(const Binding&);
std::unique_ptr<BoundOp> bind_silu_mul(const Binding&);
std::unique_ptr<BoundOp> bind_span_attention(const Binding&);

Bind cpu_op(const std::string& name) {
  static const std::map<std::string, Bind> ops = {
      {"add", bind_add},
      {"add+rms_norm", bind_add_rms_norm},
      {"all_reduce", bind_all_reduce},
      {"embedding", bind_embedding},
      {"head_norm", bind_head_norm},
      {"linear", bind_linear},
      {"linear+silu_mul", bind_linear_silu_mul},
      {"rms_norm", bind_rms_norm},
      {"rope", bind_rope},
      {"rotary_table", bind_rotary_table},
      {"sample", bind_sample},
      {"select_rows", bind_select_rows},
      {"silu_mul", bind_silu_mul},
      {"span_attention", bind_span_attention},
  };
  const auto found = ops.find(name);
  return found == ops.end() ? nullptr : found->second;
}

}  // namespace as
