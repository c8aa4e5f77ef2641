// The exchange with ranks of experts (comm/expert_exchange.h). On the model's rank: dispatch_rows and returned_sums. On
// ranks of experts: dispatched_rows, dispatched_choices and return_sums.
#include "comm/expert_exchange.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/ops/ops.h"
#include "cpu/ops/routing.h"

namespace as {
namespace {

class ExchangeOp : public BoundOp {
 public:
  ExchangeOp(const Binding& b, bool with_experts) : core_(b.core), exchange_(exchange_of(b, with_experts)) {}

 protected:
  // Copies a thread's part of `rows` rows of `width` values. With few rows, threads divide the columns.
  void copy(const float* from, float* to, int rows, int width, int thread) const {
    const auto [begin, end] = part(rows * (int64_t)width, thread, core_.pool.size());
    std::copy(from + begin, from + end, to + begin);
  }
  static void check(bool fits, const char* op) {
    if (!fits) throw std::invalid_argument(std::string("op ") + op + ": the exchange's rows are smaller");
  }

  const Core& core_;
  ExpertExchange& exchange_;

 private:
  static std::pair<int64_t, int64_t> part(int64_t n, int thread, int threads) {
    return {n * thread / threads, n * (thread + 1) / threads};
  }
  static ExpertExchange& exchange_of(const Binding& b, bool with_experts) {
    if (!b.exchange || b.exchange->holds_experts() != with_experts)
      throw std::invalid_argument(std::string("op ") + b.parts[0].op.spec->name + ": this rank is none of a mixed " +
                                  "group that has it");
    return *b.exchange;
  }
};

// Sends the rows with their choices of experts.
class DispatchRows : public ExchangeOp {
 public:
  explicit DispatchRows(const Binding& b)
      : ExchangeOp(b, false),
        in_(b.parts[0].in()),
        routing_(b.routing(b.parts[0].in(1).row_set)),
        layer_(b.parts[0].op.integer("layer")) {
    check(in_.width <= exchange_.shape().width && routing_.top <= exchange_.shape().top, "dispatch_rows");
  }

  bool needed(const Batch& batch) const override { return in_.rows(batch); }
  void run(const Batch& batch, int thread) override {
    const int rows = in_.rows(batch), entries = rows * routing_.top;
    copy(in_.data, exchange_.rows(), rows, in_.width, thread);
    if (thread == 0) {
      std::copy_n(routing_.chosen.begin(), entries, exchange_.chosen());
      std::copy_n(routing_.shares.begin(), entries, exchange_.shares());
    }
    if (core_.pool.barrier() && thread == 0) exchange_.send(layer_, rows, (int)batch.outputs.size());
  }

 private:
  const Tensor in_;
  const Routing& routing_;
  const int layer_;
};

// ((rank 1's sums + rank 2's) + rank 3's) + ...
class ReturnedSums : public ExchangeOp {
 public:
  explicit ReturnedSums(const Binding& b) : ExchangeOp(b, false), out_(b.parts[0].out()) {
    check(out_.width <= exchange_.shape().sum_width, "returned_sums");
    for (int n = 0; n < exchange_.expert_ranks(); n++) sums_.push_back(exchange_.sums(n));
  }

  bool needed(const Batch& batch) const override { return out_.rows(batch); }
  void run(const Batch& batch, int thread) override {
    if (thread == 0) exchange_.await_sums();
    if (!core_.pool.barrier()) return;
    const int64_t values = (int64_t)out_.rows(batch) * out_.width, threads = core_.pool.size();
    const int64_t begin = values * thread / threads, end = values * (thread + 1) / threads;
    std::vector<const float*> own;
    for (const float* sums : sums_) own.push_back(sums + begin);
    core_.k.sum_partials(own.data(), (int)own.size(), out_.data + begin, end - begin);
  }

 private:
  const Tensor out_;
  std::vector<const float*> sums_;
};

// Of a rank of the model where another one exchanges the messages: zeros, to which the all-reduce adds its sums.
class NoSums : public RowOp {
 public:
  explicit NoSums(const Binding& b) : out_(b.parts[0].out()), threads_(b.core.pool.size()) {}

 protected:
  int rows(const Batch& batch) const override { return out_.rows(batch); }
  void run_rows(const Batch&, const RowRange& rows, int thread) override {
    const RowRange own = rows.of(thread, threads_);
    std::fill(out_.row(own.begin), out_.row(own.end), 0.0f);
  }

 private:
  const Tensor out_;
  const int threads_;
};

std::unique_ptr<BoundOp> bind_dispatch_rows(const Binding& b) {
  return b.parts[0].op.flag("elsewhere") ? nullptr : std::make_unique<DispatchRows>(b);
}

std::unique_ptr<BoundOp> bind_returned_sums(const Binding& b) {
  if (b.parts[0].op.flag("elsewhere")) return std::make_unique<NoSums>(b);
  return std::make_unique<ReturnedSums>(b);
}

class DispatchedRows : public ExchangeOp {
 public:
  explicit DispatchedRows(const Binding& b)
      : ExchangeOp(b, true), out_(b.parts[0].out()), layer_(b.parts[0].op.integer("layer")) {
    check(out_.width <= exchange_.shape().width, "dispatched_rows");
  }

  bool needed(const Batch& batch) const override { return out_.rows(batch); }
  void run(const Batch& batch, int thread) override {
    const int rows = out_.rows(batch);
    if (thread == 0) {
      exchange_.take();
      if (exchange_.message_layer() != layer_ || exchange_.message_rows() != rows)
        throw std::runtime_error("the model's rank has dispatched " + std::to_string(exchange_.message_rows()) +
                                 " rows of layer " + std::to_string(exchange_.message_layer()) + ", not " +
                                 std::to_string(rows) + " of layer " + std::to_string(layer_));
    }
    if (core_.pool.barrier()) copy(exchange_.rows(), out_.data, rows, out_.width, thread);
  }

 private:
  const Tensor out_;
  const int layer_;
};

// Forms the row set as the router on the model's rank did.
class DispatchedChoices : public ExchangeOp {
 public:
  explicit DispatchedChoices(const Binding& b)
      : ExchangeOp(b, true),
        in_(b.parts[0].in()),
        out_(b.parts[0].out()),
        routing_(b.routing(out_.row_set)),
        experts_(b.parts[0].op.integer("experts")) {
    check(routing_.top <= exchange_.shape().top, "dispatched_choices");
    routing_.begin_router(experts_);
  }

  void run(const Batch& batch, int thread) override {
    if (thread) return;
    const int rows = in_.rows(batch), entries = rows * routing_.top;
    std::copy_n(exchange_.chosen(), entries, routing_.chosen.begin());
    std::copy_n(exchange_.shares(), entries, routing_.shares.begin());
    for (int i = 0; i < entries; i++)
      if (routing_.chosen[i] < -1 || routing_.chosen[i] >= experts_)
        throw std::runtime_error("the model's rank has chosen expert " + std::to_string(routing_.chosen[i]) + " of " +
                                 std::to_string(experts_));
    routing_.group(rows, experts_);
    for (int i = 0; i < entries; i++)
      if (routing_.chosen[i] >= 0) *out_.row(routing_.entry_of[i]) = routing_.shares[i];
  }

 private:
  const Tensor in_, out_;
  Routing& routing_;
  const int experts_;
};

// Returns sums, or entries if the only input has these, or if there are both and the message asks for them. Entries are
// in the order of each row's choices; those of experts that are not here are not written.
class ReturnSums : public ExchangeOp {
 public:
  explicit ReturnSums(const Binding& b)
      : ExchangeOp(b, true),
        in_(b.parts[0].in()),
        entries_(b.parts[0].op.inputs.size() > 1 ? b.parts[0].in(1) : in_),
        entries_of_(entries_.row_set > kOutputRows ? &b.routing(entries_.row_set) : nullptr),
        has_sums_(in_.row_set <= kOutputRows) {
    check(in_.width * (has_sums_ ? 1 : entries_of_->top) <= exchange_.shape().sum_width, "return_sums");
    if (entries_of_) begin_ = entries_of_->begin, end_ = entries_of_->end;
  }

  bool needed(const Batch& batch) const override { return in_.rows(batch); }
  void run(const Batch& batch, int thread) override {
    if (!has_sums_ || exchange_.wants_entries()) copy_entries(entries_.rows(batch), thread);
    else copy(in_.data, exchange_.own_sums(), in_.rows(batch), in_.width, thread);
    if (core_.pool.barrier() && thread == 0) exchange_.send_sums();
  }

 private:
  void copy_entries(int entries, int thread) const {
    if (has_sums_ && (!entries_of_ || entries > exchange_.shape().entry_rows * entries_of_->top))
      throw std::runtime_error("the model's rank has asked for " + std::to_string(entries) + " entries");
    const int threads = core_.pool.size();
    for (int i = entries * thread / threads; i < entries * (thread + 1) / threads; i++)
      if (const int expert = entries_of_->chosen[i]; expert >= begin_ && expert < end_)
        std::copy_n(entries_.row(entries_of_->entry_of[i]), in_.width, exchange_.own_sums() + (size_t)i * in_.width);
  }

  const Tensor in_, entries_;
  const Routing* const entries_of_;  // null: there are none
  const bool has_sums_;
  int begin_ = 0, end_ = 0;
};

}  // namespace

const RegisterCpuOp kDispatchRows({{Op::dispatch_rows}}, bind_dispatch_rows);
const RegisterCpuOp kReturnedSums({{Op::returned_sums}}, bind_returned_sums);
const RegisterCpuOp kDispatchedRows({{Op::dispatched_rows}}, bind_op<DispatchedRows>);
const RegisterCpuOp kDispatchedChoices({{Op::dispatched_choices}}, bind_op<DispatchedChoices>);
const RegisterCpuOp kReturnSums({{Op::return_sums}}, bind_op<ReturnSums>);

}  // namespace as
