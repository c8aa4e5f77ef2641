// Ops of vision towers, and of models that take their rows.
#include <string>

#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

int bind_given_rows(Binding& b, size_t i) {
  b.add_launch(kAllRows, [y = b.out(b.ops[i]).rows, data = &*b.workspace.data, queue = b.queue](int rows) {
    copy_given(data->given(), true, false, rows, y, queue);
  });
  return 0;
}

int bind_add_given(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.launches.push_back([x = b.in(op).rows, offset = op.integer("offset"), data = &*b.workspace.data,
                        queue = b.queue](const Binding::Size& size) {
    if (size.given) add_given(data->given(), offset, x.values, x.width, size.rows, queue);
  });
  return 0;
}

int bind_grid_embedding(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  const StepData* data = &*b.workspace.data;
  const GridTable grid{b.vector(op, 0), op.integer("side"), op.flag("axes"), data->image_heights(),
                       data->image_widths()};
  b.add_launch(kAllRows, [=, x = b.in(op).rows, queue = b.queue](int rows) {
    add_grid(grid, data->places(), x.values, x.width, rows, queue);
  });
  return 0;
}

int bind_position_embedding(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  const PositionTable table{b.vector(op, 0), op.integer("positions"), op.integer("offset"), b.vector(op, 1)};
  b.add_launch(kAllRows, [=, x = b.in(op).rows, data = &*b.workspace.data, queue = b.queue](int rows) {
    add_positions(table, data->positions(), data->segments(), x.values, x.width, rows, queue);
  });
  return 0;
}

int bind_merge_rows(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const std::string how = op.choice("how");
  const Merge merge = how == "mean" ? Merge::mean : how == "interleave" ? Merge::interleave : Merge::concat;
  // Sequences are whole, so that the outputs of all of them follow one another as their rows do.
  b.add_launch(kOutputRows, [=, x = b.in(op).rows, y = b.out(op).rows, count = op.integer("count"), queue = b.queue](
                                int rows) { merge_rows(x.values, x.width, count, merge, rows, y, queue); });
  return 0;
}

int bind_layer_norm(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const LayerNorm norm{b.vector(op, 0), b.vector(op, 1), (float)op.number("eps")};
  b.add_launch(b.in(op).row_set, [=, x = b.in(op), y = b.out(op).rows, queue = b.queue](int rows) {
    layer_norm(x.values(), norm, rows, y, queue);
  });
  return 0;
}

Activation activation_of(const OpNode& op) {
  constexpr std::pair<const char*, Activation> kNames[] = {
      {"gelu", Activation::gelu}, {"gelu_tanh", Activation::gelu_tanh}, {"silu", Activation::silu},
      {"tanh", Activation::tanh}, {"relu", Activation::relu},           {"quick_gelu", Activation::quick_gelu}};
  for (const auto& [name, function] : kNames)
    if (std::string(op.choice("function")) == name) return function;
  refuse(std::string("activation ") + op.choice("function"));
}

// A linear that alone reads the values, in 16 bits, computes the activation as it converts them.
int bind_activate(Binding& b, size_t i) {
  const OpNode &op = b.ops[i], &next = b.ops[i + 1];
  b.check_in_place(op);
  const Activation function = activation_of(op);
  const Tensor x = b.in(op);
  if (next.is(Op::linear) && next.inputs[0] == op.inputs[0] && !has(next.outputs, op.inputs[0]) && !x.rows.tiles &&
      b.matrix(next).takes_tiles() && !b.matrix(next).order && !read_from(b.ops, i + 2, op.inputs[0])) {
    b.activations[op.inputs[0]] = function, b.deferred = true;
    return 0;
  }
  b.add_launch(x.row_set, [=, queue = b.queue](int rows) { activate(x.values(), function, rows, x.rows, queue); });
  return 0;
}

const RegisterCudaOp kGivenRows(Op::given_rows, bind_given_rows, OutputForm::tiles),
    kAddGiven(Op::add_given, bind_add_given), kGridEmbedding(Op::grid_embedding, bind_grid_embedding),
    kPositionEmbedding(Op::position_embedding, bind_position_embedding),
    kMergeRows(Op::merge_rows, bind_merge_rows, OutputForm::tiles),
    kLayerNorm(Op::layer_norm, bind_layer_norm, OutputForm::both), kActivate(Op::activate, bind_activate);

}  // namespace
}  // namespace as::cuda
