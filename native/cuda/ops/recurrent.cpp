// Layers that keep a state: causal convolution, gated delta rule and their gates.
#include <cstring>

#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

int bind_causal_conv(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  CausalConv p;
  p.channels = b.in(op).rows.width, p.taps = op.integer("taps"), p.activated = op.flag("activated");
  p.x = b.in(op).values(), p.y = b.out(op).values(), p.weight = b.vector(op, 0), p.bias = b.vector(op, 1);
  if (p.x == p.y) refuse("op causal_conv in place");
  p.pages = b.workspace.state_pages.at(b.next_state++);
  b.launches.push_back([=, data = &*b.workspace.data, queue = b.queue](const Binding::Size& size) {
    causal_conv(p, data->state_rows(size), queue);
  });
  return 0;
}

// The kernels for prompts normalize queries and keys in the input.
int bind_gated_delta(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  if (read_from(b.ops, i + 1, op.inputs[0])) refuse("op gated_delta whose input other ops read");
  GatedDelta p;
  p.shape = delta_shape(b.workspace.program, op);
  p.x = b.in(op).values(), p.gates = b.in(op, 1).values(), p.y = b.out(op).values();
  p.a_log = b.vector(op, 0), p.dt_bias = b.vector(op, 1), p.lower_bound = (float)op.number("lower_bound");
  if (p.lower_bound != 0 && !p.shape.channels) refuse("op gated_delta with bounded decays of whole heads");
  p.pages = b.workspace.state_pages.at(b.next_state++);
  p.scratch = b.workspace.delta_rows.as(), p.max_rows = b.workspace.limits.max_rows;
  b.launches.push_back([=, data = &*b.workspace.data, queue = b.queue](const Binding::Size& size) {
    gated_delta(p, data->state_rows(size), queue);
  });
  return 0;
}

int bind_ssd(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  GatedDelta p;
  p.shape = delta_shape(b.workspace.program, op);
  p.x = b.in(op).values(), p.gates = b.in(op, 1).values(), p.y = b.out(op).values();
  p.a_log = b.vector(op, 0), p.dt_bias = b.vector(op, 1), p.skip = b.vector(op, 2);
  p.least_step = op.number("least_step"), p.most_step = op.number("most_step");
  p.pages = b.workspace.state_pages.at(b.next_state++);
  p.scratch = b.workspace.delta_rows.as(), p.max_rows = b.workspace.limits.max_rows;
  b.launches.push_back([=, data = &*b.workspace.data, queue = b.queue](const Binding::Size& size) {
    gated_delta(p, data->state_rows(size), queue);
  });
  return 0;
}

int bind_gated_rms_norm(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  const GatedNorm norm{b.vector(op, 0), op.integer("head_dim"), (float)op.number("eps"),
                       !std::strcmp(op.choice("gate"), "sigmoid"), op.flag("gate_first")};
  b.add_launch(b.in(op).row_set, [=, x = b.in(op), gate = b.in(op, 1), out = tiles_or_values(b, i), queue = b.queue](
                                     int rows) { gated_rms_norm(x.values(), gate.values(), norm, out, rows, queue); });
  return 0;
}

int bind_relu_square(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), out = tiles_or_values(b, i), queue = b.queue](int rows) {
    relu_square(x.values(), out, rows, queue);
  });
  return 0;
}

int bind_sigmoid_gate(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), gate = b.in(op, 1), out = tiles_or_values(b, i), queue = b.queue](
                                     int rows) { sigmoid_gate(x.values(), gate.values(), out, rows, queue); });
  return 0;
}

const RegisterCudaOp kCausalConv(Op::causal_conv, bind_causal_conv), kGatedDelta(Op::gated_delta, bind_gated_delta),
    kSsd(Op::ssd, bind_ssd), kGatedRmsNorm(Op::gated_rms_norm, bind_gated_rms_norm),
    kReluSquare(Op::relu_square, bind_relu_square), kSigmoidGate(Op::sigmoid_gate, bind_sigmoid_gate);

}  // namespace
}  // namespace as::cuda
