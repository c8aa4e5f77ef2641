#include "program/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace as {
namespace {

std::string text_of(double value) {
  std::ostringstream out;
  out.precision(12);
  out << value;
  return out.str();
}

std::string text_of(const AttributeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return "'" + *text + "'";
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* whole = std::get_if<int64_t>(&value)) return std::to_string(*whole);
  return text_of(std::get<double>(value));
}

std::string allowed_of(const AttributeSpec& a) {
  if (a.type == AttributeType::flag) return "true or false";
  if (a.type == AttributeType::choice) {
    std::string all;
    for (const char* c : a.choices) all += (all.empty() ? "one of " : ", ") + std::string(c);
    return all;
  }
  return std::string(a.type == AttributeType::integer ? "an integer" : "a number") + " of " + text_of(a.least) +
         " to " + text_of(a.most);
}

// Converts a given value to the spec's type. Returns NaN if it does not fit.
double typed(const AttributeSpec& a, const AttributeValue& given) {
  if (const auto* text = std::get_if<std::string>(&given)) {
    if (a.type != AttributeType::choice) return NAN;
    for (size_t i = 0; i < a.choices.size(); i++)
      if (*text == a.choices[i]) return (double)i;
    return NAN;
  }
  if (a.type == AttributeType::choice) return NAN;
  double value;
  if (const auto* flag = std::get_if<bool>(&given)) value = *flag;
  else if (const auto* whole = std::get_if<int64_t>(&given)) value = (double)*whole;
  else value = std::get<double>(given);
  if (a.type == AttributeType::flag) return value == 0 || value == 1 ? value : NAN;
  if (!(value >= a.least && value <= a.most)) return NAN;
  return a.type == AttributeType::integer && value != std::floor(value) ? NAN : value;
}

std::vector<double> typed_values(const OpSpec& spec, const AttributeValues& given) {
  const std::string op = std::string("op ") + spec.name;
  std::vector<double> values;
  for (const AttributeSpec& a : spec.attributes) {
    if (a.scope == Scope::graph) {  // lowering replaced it
      values.push_back(0);
      continue;
    }
    const auto found = given.find(a.name);
    if (found == given.end()) {
      if (a.required) throw std::invalid_argument(op + " needs attribute " + a.name);
      values.push_back(a.otherwise_as ? values.at(spec.attribute(a.otherwise_as)) : a.otherwise);
      continue;
    }
    values.push_back(typed(a, found->second));
    if (std::isnan(values.back()))
      throw std::invalid_argument(op + ": attribute " + a.name + " is " + text_of(found->second) + ": expected " +
                                  allowed_of(a));
  }
  for (const auto& [name, value] : given) {
    const int i = spec.attribute(name);
    if (i >= 0 && spec.attributes[i].scope != Scope::graph) continue;
    std::string known;
    for (const AttributeSpec& a : spec.attributes)
      if (a.scope != Scope::graph) known += (known.empty() ? "" : ", ") + std::string(a.name);
    throw std::invalid_argument(op + " has no attribute " + name + ": " +
                                (known.empty() ? "it takes none" : "known are " + known));
  }
  return values;
}

std::string text_of(Arity arity) {
  return std::to_string(arity.least) + (arity.most > arity.least ? " to " + std::to_string(arity.most) : "");
}

bool fits(size_t n, Arity arity) { return (int)n >= arity.least && (int)n <= arity.most; }

}  // namespace

double OpNode::value(const char* name, AttributeType type) const {
  const int i = spec->attribute(name);
  if (i < 0 || spec->attributes[i].type != type)
    throw std::logic_error(std::string("op ") + spec->name + " has no " + name_of(type) + " " + name);
  return values[i];
}

const char* OpNode::choice(const char* name) const {
  const double index = value(name, AttributeType::choice);
  return spec->attributes[spec->attribute(name)].choices[(size_t)index];
}

void OpNode::allow_only(std::initializer_list<const char*> known, const char* backend) const {
  for (size_t i = 0; i < values.size(); i++) {
    const AttributeSpec& a = spec->attributes[i];
    const bool is_known =
        std::any_of(known.begin(), known.end(), [&](const char* k) { return !std::strcmp(k, a.name); });
    const double otherwise = a.otherwise_as ? values.at(spec->attribute(a.otherwise_as)) : a.otherwise;
    if (a.scope == Scope::graph || is_known || values[i] == otherwise) continue;
    const std::string value = a.type == AttributeType::choice ? choice(a.name) : text_of(values[i]);
    throw std::invalid_argument(std::string(backend) + " has no " + spec->name + " with " + a.name + " " + value);
  }
}

int Program::add_matrix(int out_features, int in_features, const std::string& format, int group_size,
                        const ScaleLayout& layout) {
  const WeightSpec matrix{out_features, in_features, format, group_size, layout};
  check_matrix(matrix);
  weights_.push_back(matrix);
  return (int)weights_.size() - 1;
}

int Program::add_vector(int n) {
  if (n < 0) throw std::invalid_argument("vector of " + std::to_string(n) + " values");
  weights_.push_back({n, 0, "float32", 0, {}});
  return (int)weights_.size() - 1;
}

int Program::add_row_set(int of, int times) {
  if (of < 0 || of >= (int)row_sets_.size()) throw std::invalid_argument("no row set " + std::to_string(of));
  if (times < 1 || times > kLargestCount)
    throw std::invalid_argument("row set of " + std::to_string(times) + " entries for each row");
  row_sets_.push_back({of, times});
  return (int)row_sets_.size() - 1;
}

int Program::add_tensor(int width, int rows, TensorType type) {
  if (width < 1) throw std::invalid_argument("tensor width must be positive, got " + std::to_string(width));
  if (rows < 0 || rows >= (int)row_sets_.size()) throw std::invalid_argument("no row set " + std::to_string(rows));
  tensors_.push_back({width, rows, type});
  return (int)tensors_.size() - 1;
}

int Program::add_cache_group(CacheKind kind, int window) {
  if ((kind == CacheKind::sliding) != (window > 0) || window < 0 || window > kLargestCount)
    throw std::invalid_argument(std::string("cache group of kind ") + name_of(kind) + " with a window of " +
                                std::to_string(window) + ": sliding ones have one, others do not");
  cache_groups_.push_back({kind, window});
  return (int)cache_groups_.size() - 1;
}

std::vector<int> Program::windows() const {
  std::vector<int> windows;
  for (const CacheGroup& group : cache_groups_) windows.push_back(group.window);
  return windows;
}

int Program::add_op(const std::string& name, std::vector<int> inputs, std::vector<int> outputs,
                    std::vector<int> weights, const AttributeValues& attributes) {
  if (cache_groups_.empty()) add_cache_group(CacheKind::full);
  const OpSpec& spec = op_spec(name);
  const std::string text = "op " + name;
  if (spec.in_place && spec.inputs.most == 1 && inputs.size() != 1)
    throw std::invalid_argument(text + " takes one input, changed in place");
  if (spec.in_place && outputs.empty() && !inputs.empty()) outputs = {inputs[0]};
  if (!fits(inputs.size(), spec.inputs) || !fits(outputs.size(), spec.outputs) || !fits(weights.size(), spec.weights))
    throw std::invalid_argument(
        text + ": wrong number of inputs, outputs or weights: " + std::to_string(inputs.size()) + ", " +
        std::to_string(outputs.size()) + " and " + std::to_string(weights.size()) + ", expected " +
        text_of(spec.inputs) + ", " + text_of(spec.outputs) + " and " + text_of(spec.weights));
  for (const auto* list : {&inputs, &outputs})
    for (int t : *list)
      if (t < 0 || t >= (int)tensors_.size()) throw std::invalid_argument(text + ": no tensor " + std::to_string(t));
  for (int w : weights)
    if (w < 0 || w >= (int)weights_.size()) throw std::invalid_argument(text + ": no weight " + std::to_string(w));
  if (spec.in_place && outputs[0] != inputs[0])
    throw std::invalid_argument(text + " changes its input in place: its output must be tensor " +
                                std::to_string(inputs[0]));
  OpNode op{&spec, std::move(inputs), std::move(outputs), std::move(weights), typed_values(spec, attributes)};
  check_rows(op);
  spec.check(*this, op);
  ops_.push_back(std::move(op));
  return (int)ops_.size() - 1;
}

// Checks that the outputs have the rows that the spec requires.
void Program::check_rows(const OpNode& op) const {
  const std::string text = std::string("op ") + op.spec->name;
  const auto differ = [&] { return std::invalid_argument(text + ": input and output differ in rows"); };
  switch (op.spec->rows) {
    case RowRule::none:
      return;
    case RowRule::as_input:
      for (int t : op.outputs)
        if (tensors_[t].rows != in(op).rows) throw differ();
      return;
    case RowRule::all:
      if (out(op).rows != kAllRows) throw std::invalid_argument(text + ": its output must have a row for each token");
      return;
    case RowRule::plain:
      if (out(op).rows > kOutputRows)
        throw std::invalid_argument(text + ": its output must have a row for each token or output");
      return;
    case RowRule::selected:
      if (in(op).rows != kAllRows) throw std::invalid_argument(text + ": its input must have a row for each token");
      if (out(op).rows != kOutputRows) throw differ();
      return;
    case RowRule::routed:
      if (out(op).rows <= kOutputRows || row_sets_[out(op).rows].of != in(op).rows)
        throw std::invalid_argument(text + ": its output must have a row set formed of its input's rows");
      return;
    case RowRule::expanded:
      if (out(op).rows <= kOutputRows || (in(op).rows != out(op).rows && in(op).rows != row_sets_[out(op).rows].of))
        throw std::invalid_argument(text +
                                    ": its output must have a row set formed of its input's rows, or those rows");
      return;
    case RowRule::combined:
      if (in(op).rows <= kOutputRows || out(op).rows != row_sets_[in(op).rows].of)
        throw std::invalid_argument(text + ": its output must have the rows that its input's were formed of");
      return;
  }
}

double Program::rows_of(int row_set, const StepSize& size) const {
  if (row_set == kAllRows) return size.rows;
  if (row_set == kOutputRows) return size.outputs;
  return row_sets_[row_set].times * rows_of(row_sets_[row_set].of, size);
}

const char* name_of(TensorType type) { return type == TensorType::float32 ? "float32" : "bfloat16"; }

const char* name_of(CacheKind kind) {
  constexpr const char* kNames[] = {"full", "sliding", "latent", "recurrent"};
  return kNames[(int)kind];
}

TensorType tensor_type_of(const std::string& name) {
  for (TensorType type : {TensorType::float32, TensorType::bfloat16})
    if (name == name_of(type)) return type;
  throw std::invalid_argument("a tensor's type must be float32 or bfloat16, got " + name);
}

CacheKind cache_kind_of(const std::string& name) {
  for (CacheKind kind : {CacheKind::full, CacheKind::sliding, CacheKind::latent, CacheKind::recurrent})
    if (name == name_of(kind)) return kind;
  throw std::invalid_argument("a cache group must be full, sliding, latent or recurrent, got " + name);
}

}  // namespace as
