// One rank's ops of a model as validated data, which backends compile. Independent of rows, memory and devices.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "program/op_spec.h"
#include "program/weight_spec.h"

namespace as {

// An attribute as given. A node stores it in the type of its spec.
using AttributeValue = std::variant<bool, int64_t, double, std::string>;
using AttributeValues = std::map<std::string, AttributeValue>;

enum class TensorType { float32, bfloat16 };

// A set of rows that tensors share. Sets 0 and 1 always exist. A router forms others within the step: `times` entries
// for each row of set `of`.
constexpr int kAllRows = 0, kOutputRows = 1;
struct RowSet {
  int of, times;
};

struct TensorSpec {
  int width, rows;  // rows: index of a row set
  TensorType type;
};

// What a cache group keeps of a sequence: every position, the last `window` ones, compressed positions, or a state.
enum class CacheKind { full, sliding, latent, recurrent };
struct CacheGroup {
  CacheKind kind;
  int window;  // of sliding groups
};

struct OpNode {
  const OpSpec* spec;
  std::vector<int> inputs, outputs, weights;
  std::vector<double> values;  // of the spec's attributes; choices as indices

  Op kind() const { return spec->op; }
  // Whether it adds an adapter's product.
  bool adapts() const { return is(Op::lora) || is(Op::expert_lora); }
  bool is(Op op) const { return spec->op == op; }
  // Attributes by name and type. Throw std::logic_error if the spec has no such attribute.
  int integer(const char* name) const { return (int)value(name, AttributeType::integer); }
  double number(const char* name) const { return value(name, AttributeType::number); }
  bool flag(const char* name) const { return value(name, AttributeType::flag) != 0; }
  const char* choice(const char* name) const;
  // For backends: throws std::invalid_argument naming the first attribute that is not in `known` and not at its
  // default.
  void allow_only(std::initializer_list<const char*> known, const char* backend) const;

 private:
  double value(const char* name, AttributeType type) const;
};

struct HeadRange {
  int begin, count;
};

// The KV heads of all ranks that a span_attention op sees.
inline HeadRange kv_heads_of(const OpNode& op) {
  if (op.integer("kv_heads")) return {op.integer("kv_begin"), op.integer("kv_heads")};
  const int first = op.integer("q_head_begin"), group = op.integer("group");
  return {first / group, (first + op.integer("q_heads") - 1) / group - first / group + 1};
}

// Whether a list of tensors has this one.
inline bool has(const std::vector<int>& tensors, int tensor) {
  return std::find(tensors.begin(), tensors.end(), tensor) != tensors.end();
}

// Every add function returns the new item's index. If it throws std::invalid_argument, the program is unchanged.
class Program {
 public:
  int add_matrix(int out_features, int in_features, const std::string& format, int group_size,
                 const ScaleLayout& layout = {});
  int add_vector(int n);
  int add_weight(const WeightSpec& weight) { return weights_.push_back(weight), (int)weights_.size() - 1; }
  int add_row_set(int of, int times);
  int add_tensor(int width, int rows = kAllRows, TensorType type = TensorType::float32);
  int add_cache_group(CacheKind kind, int window = 0);
  int add_op(const std::string& name, std::vector<int> inputs, std::vector<int> outputs, std::vector<int> weights,
             const AttributeValues& attributes);

  const std::vector<WeightSpec>& weights() const { return weights_; }
  const std::vector<RowSet>& row_sets() const { return row_sets_; }
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  // If no group was added, the first op adds one with full attention.
  const std::vector<CacheGroup>& cache_groups() const { return cache_groups_; }
  std::vector<int> windows() const;  // of each cache group
  const std::vector<OpNode>& ops() const { return ops_; }

  const TensorSpec& in(const OpNode& op, int i = 0) const { return tensors_[op.inputs[i]]; }
  const TensorSpec& out(const OpNode& op, int i = 0) const { return tensors_[op.outputs[i]]; }
  // How many rows a row set has in such a step.
  double rows_of(int row_set, const StepSize& size) const;
  Cost cost(const OpNode& op, const StepSize& size) const { return op.spec->cost(*this, op, size); }

 private:
  void check_rows(const OpNode& op) const;

  std::vector<WeightSpec> weights_;
  std::vector<RowSet> row_sets_{{kAllRows, 1}, {kAllRows, 1}};
  std::vector<TensorSpec> tensors_;
  std::vector<CacheGroup> cache_groups_;
  std::vector<OpNode> ops_;
};

const char* name_of(TensorType type);
const char* name_of(CacheKind kind);
// Throw std::invalid_argument for an unknown name.
TensorType tensor_type_of(const std::string& name);
CacheKind cache_kind_of(const std::string& name);

}  // namespace as
