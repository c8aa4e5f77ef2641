// Ops that select rows: the embedding, rows with outputs, hidden states and the logits that are sampled.
#include "cuda/kernels/sampling/argmax.h"
#include "cuda/ops/fusion.h"

namespace as::cuda {

std::optional<RankSamples> rank_samples(const Ranks* ranks, const Workspace& workspace, const OpNode& sample,
                                        int width) {
  if (!ranks) return std::nullopt;
  return ranks->exchange.samples(sample.integer("vocab_begin"), width, workspace.data->step());
}

namespace {

int bind_embedding(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const Rows y = partial_of(b, i).value_or(b.out(op).rows);
  const StepData* data = &*b.workspace.data;
  TokenRows tokens;
  tokens.tokens = data->tokens(), tokens.sampled = b.workspace.argmax.as<Argmax>();
  if (b.workspace.needs.given && op.integer("given_id") >= 0)
    tokens.numbers = data->given().numbers, tokens.given_id = op.integer("given_id");
  b.add_launch(kAllRows,
               [=, table = b.matrix(op), begin = op.integer("vocab_begin"), factor = (float)op.number("scale"),
                queue = b.queue](int rows) { embed(table, tokens, rows, begin, factor, y, queue); });
  return 0;
}

// Rows that the plan gives replace those of the table, unless they have the row of an id.
int bind_embedding_and_given(Binding& b, size_t i) {
  bind_embedding(b, i);
  if (!b.workspace.needs.given || b.ops[i].integer("given_id") >= 0) return 0;
  const Rows y = partial_of(b, i).value_or(b.out(b.ops[i]).rows);
  const bool own = !b.ranks || b.ranks->communicator.rank() == 0;  // the first rank's part of the sum over ranks
  b.launches.push_back([=, data = &*b.workspace.data, queue = b.queue](const Binding::Size& size) {
    if (size.given) copy_given(data->given(), own, true, size.rows, y, queue);
  });
  return 0;
}

int bind_select_rows(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.add_launch(kOutputRows, [x = b.in(op), y = b.out(op), data = &*b.workspace.data, queue = b.queue](int rows) {
    select_rows(x.rows, data->chosen(), rows, y.rows, queue);
  });
  return 0;
}

// Rows are copied to the host when the step is sampled.
int bind_hidden_states(Binding& b, size_t i) {
  b.hidden_tensor = b.ops[i].inputs[0], b.heads_from = b.launches.size();
  return 0;
}

int bind_sample(Binding& b, size_t i) {
  const Tensor& logits = b.in(b.ops[i]);
  b.add_launch(kOutputRows, [logits, to = b.workspace.argmax.as<Argmax>(), queue = b.queue,
                             ranks = rank_samples(b.ranks, b.workspace, b.ops[i], logits.rows.width)](int rows) {
    argmax(logits.values(), logits.rows.width, rows, to, queue);
    if (ranks) agree_argmaxes(*ranks, to, rows, queue);
  });
  return 0;
}

const RegisterCudaOp kEmbedding(Op::embedding, bind_embedding_and_given),
    kSelectRows(Op::select_rows, bind_select_rows, OutputForm::both),
    kHiddenStates(Op::hidden_states, bind_hidden_states), kSample(Op::sample, bind_sample);

}  // namespace
}  // namespace as::cuda
