// router: chooses each row's experts and their weights from its logits, then sorts the row set's entries by expert. In
// double precision, with functions that have the same bits everywhere.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/exact.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/routing.h"
#include "program/token_experts.h"

namespace as {

void Routing::group(int rows, int experts) {
  first.assign(experts + 1, 0);
  for (int i = 0; i < rows * top; i++)
    if (chosen[i] >= 0) first[chosen[i] + 1]++;
  std::partial_sum(first.begin(), first.end(), first.begin());
  for (int r = 0; r < rows; r++)  // first[e] advances to where the next expert begins
    for (int i = r * top; i < (r + 1) * top; i++)
      if (chosen[i] >= 0) row_of[entry_of[i] = first[chosen[i]]++] = r;
  std::copy_backward(first.begin(), first.end() - 1, first.end());
  first[0] = 0;
}

namespace {

constexpr double kLeast = -std::numeric_limits<double>::infinity();

class Router : public BoundOp {
 public:
  explicit Router(const Binding& b)
      : core_(b.core),
        in_(b.parts[0].in()),
        out_(b.parts[0].out()),
        routing_(b.routing(out_.row_set)),
        expert_scales_(b.parts[0].op.flag("expert_scales") ? b.parts[0].vector((int)b.parts[0].op.weights.size() - 1)
                                                           : nullptr),
        table_(b.parts[0].op.flag("by_token") ? &b.parts[0].weights.vector(b.parts[0].op.weights[0]) : nullptr),
        correction_(!table_ && b.parts[0].op.weights.size() > (expert_scales_ ? 1 : 0) ? b.parts[0].vector() : nullptr),
        sigmoid_(!std::strcmp(b.parts[0].op.choice("scores"), "sigmoid")),
        sqrt_softplus_(!std::strcmp(b.parts[0].op.choice("scores"), "sqrt_softplus")),
        normalized_(b.parts[0].op.flag("normalized")),
        scale_(b.parts[0].op.number("scale")),
        groups_(b.parts[0].op.integer("groups")),
        top_groups_(b.parts[0].op.integer("top_groups")),
        by_largest_(!std::strcmp(b.parts[0].op.choice("group_scores"), "largest")) {
    if (table_) check_token_experts(table_->data(), table_->size(), routing_.top, in_.width);
    routing_.begin_router(in_.width);
    for (int i = 0; i < core_.pool.size(); i++) scratch_.emplace_back(in_.width, groups_);
  }

  void run(const Batch& batch, int thread) override {
    const int rows = in_.rows(batch);
    if (rows > 1 || thread == 0) {
      const auto [r0, r1] = rows > 1 ? part(rows, thread, core_.pool.size()) : std::pair<int, int>(0, rows);
      for (int r = r0; r < r1; r++)
        if (table_) route_by_token(r, batch.rows[in_.of_outputs ? batch.outputs[r].row : r].token);
        else route(r, scratch_[thread]);
    }
    if (rows > 1 && !core_.pool.barrier()) return;
    if (thread != 0) return;
    routing_.group(rows, in_.width);
    for (int i = 0; i < rows * routing_.top; i++) *out_.row(routing_.entry_of[i]) = routing_.shares[i];
  }

 private:
  struct Own {  // of a thread
    std::vector<double> scores, choice, group_scores;
    std::vector<int> order, group_order;
    Own(int experts, int groups)
        : scores(experts), choice(experts), group_scores(groups), order(experts), group_order(groups) {}
  };

  // Moves the indices of the `count` largest values to the front; the lowest index wins ties.
  static void best(const std::vector<double>& values, int count, std::vector<int>& order) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(),
                      [&](int a, int b) { return values[a] > values[b] || (values[a] == values[b] && a < b); });
  }

  // A score that does not depend on those of other experts.
  double own_score(float logit) const {
    return sigmoid_ ? exact::sigmoid(logit) : std::sqrt(exact::softplus((double)logit));
  }

  // The table's experts, in ascending order. A token beyond the table has the last row's.
  void route_by_token(int r, int token) {
    const int top = routing_.top, rows = (int)table_->size() / top;
    const float* experts = table_->data() + (size_t)std::clamp(token, 0, rows - 1) * top;
    int* chosen = &routing_.chosen[r * top];
    for (int i = 0; i < top; i++) chosen[i] = (int)experts[i];
    std::sort(chosen, chosen + top);
    double total = normalized_ ? 0 : 1;
    for (int i = 0; i < top && normalized_; i++) total += own_score(in_.row(r)[chosen[i]]);
    for (int i = 0; i < top; i++)
      routing_.shares[r * top + i] = (float)(own_score(in_.row(r)[chosen[i]]) / total * scale_);
  }

  void route(int r, Own& own) {
    const float* logits = in_.row(r);
    const int experts = in_.width, top = routing_.top;
    const float most = *std::max_element(logits, logits + experts);
    // The softmax keeps the order of the logits, and its sum cancels out of normalized weights.
    const bool softmax = !sigmoid_ && !sqrt_softplus_;
    const bool plain = softmax && !correction_ && top_groups_ == groups_;
    const bool few = plain && normalized_;  // only the chosen experts' scores are needed
    const auto score = [&](int e) { return softmax ? exact::exp((double)logits[e] - most) : own_score(logits[e]); };
    double sum = 1;
    for (int e = 0; e < experts && !few; e++) own.scores[e] = score(e);
    if (softmax && (!normalized_ || !plain)) sum = std::accumulate(own.scores.begin(), own.scores.end(), 0.0);
    for (int e = 0; e < experts; e++) {
      if (!few) own.scores[e] /= sum;
      double& c = own.choice[e];
      c = plain ? logits[e] : own.scores[e] + (correction_ ? correction_[e] : 0.0f);
      if (!(c == c)) c = kLeast;  // the weights of such a row are NaN, too
    }
    if (top_groups_ < groups_) keep_groups(own);
    best(own.choice, top, own.order);
    std::sort(own.order.begin(), own.order.begin() + top);
    for (int i = 0; i < top && few; i++) own.scores[own.order[i]] = score(own.order[i]);
    double total = 1;
    if (normalized_) {
      total = 0;
      for (int i = 0; i < top; i++) total += own.scores[own.order[i]];
    }
    for (int i = 0; i < top; i++) {
      routing_.chosen[r * top + i] = own.order[i];
      const double scale = expert_scales_ ? scale_ * expert_scales_[own.order[i]] : scale_;
      routing_.shares[r * top + i] = (float)(own.scores[own.order[i]] / total * scale);
    }
  }

  // Restricts the choice to the groups with the largest sums of their two best experts, or with the best expert.
  void keep_groups(Own& own) const {
    const int size = in_.width / groups_;
    for (int g = 0; g < groups_; g++) {
      double first = kLeast, second = kLeast;
      for (int e = g * size; e < (g + 1) * size; e++) {
        const double c = own.choice[e];
        if (c > first) second = first, first = c;
        else if (c > second) second = c;
      }
      own.group_scores[g] = size > 1 && !by_largest_ ? first + second : first;
    }
    best(own.group_scores, top_groups_, own.group_order);
    for (int i = top_groups_; i < groups_; i++)
      std::fill_n(own.choice.begin() + own.group_order[i] * size, size, kLeast);
  }

  const Core& core_;
  const Tensor in_, out_;
  Routing& routing_;
  const float* const expert_scales_;
  const std::vector<float>* const table_;  // of the experts of each token; null: scores choose
  const float* const correction_;
  const bool sigmoid_, sqrt_softplus_, normalized_;
  const double scale_;
  const int groups_, top_groups_;
  const bool by_largest_;
  std::vector<Own> scratch_;
};

}  // namespace

const RegisterCpuOp kRouter({{Op::router}}, bind_op<Router>);

}  // namespace as
