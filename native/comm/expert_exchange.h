// What the ranks of a mixed group exchange. One rank computes the model but for its routed experts; the others hold a
// slice of every expert. Once a layer, the model's rank dispatches its rows and their choices of experts, and every
// rank of experts returns its partial sums, which the model's rank adds in rank order.
//
// The memory is shared between processes (comm/shared_block.h): the model's rank has a block for what it dispatches,
// each rank of experts one for its sums. One buffer a block is enough, because messages alternate: a layer is
// dispatched after the sums of the previous one were read, and its sums are written after that.
//
// A step of the model's rank may run the program any number of times. Ranks of experts run theirs once for each first
// message that they find, from its layer on, until the model's rank says that the step has ended. So they need not know
// the step's plan. A layer of no rows has no message.
//
// The model's rank may also compute on a GPU, whose kernels write and read this memory. Then `sent` changes without a
// wake-up call. What that backend calls is defined here, because it is a library of its own.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/shared_block.h"
#include "comm/shared_memory.h"

namespace as {

// The largest message: rows of so many values, choices of experts for each row, and values of its sum. entry_rows: rows
// of the largest message that asks for the entries of its rows, [rows, top, sum_width], in place of their sums; 0: none
// does.
struct ExpertShape {
  int rows = 0, width = 0, top = 0, sum_width = 0, entry_rows = 0;
};

class ExpertExchange {
 public:
  // The model's rank comes first. by_gpu: its GPU sends and receives. model_ranks: how many ranks compute the model, of
  // which only the first takes part; those of experts follow them, and count from 1 here. Throws std::invalid_argument
  // for a shape that is not positive, and std::runtime_error if memory is short.
  ExpertExchange(std::shared_ptr<SharedMemory> ranks, const ExpertShape& shape, bool by_gpu = false,
                 int model_ranks = 1);
  ExpertExchange(const ExpertExchange&) = delete;
  ExpertExchange& operator=(const ExpertExchange&) = delete;

  // Bytes of shared memory that a rank allocates.
  static size_t bytes_needed(const ExpertShape& shape, bool holds_experts);

  bool holds_experts() const { return rank_ > 0; }
  int expert_ranks() const { return size_ - 1; }
  // The number in the group of a rank that takes part, for messages.
  int number_of(int rank) const { return rank ? rank + others_ : 0; }
  double timeout() const { return ranks_->timeout(); }  // seconds
  const ExpertShape& shape() const { return shape_; }
  // The address by which other ranks open this rank's memory.
  std::string address() const;
  // Opens the memory of all ranks that take part. addresses: of each, in rank order. Throws std::invalid_argument.
  void connect(const std::vector<std::string>& addresses);
  // Throws std::invalid_argument if connect() was not called.
  void check_connected() const {
    if (!connected_) throw std::invalid_argument("connect() of ranks of experts comes before allocate()");
  }

  // A message: rows [rows, width]; the experts of each row, ascending, [rows, top]; and their weights.
  float* rows() const { return reinterpret_cast<float*>(blocks_[0].data() + kHeader); }
  int32_t* chosen() const { return reinterpret_cast<int32_t*>(rows() + (size_t)shape_.rows * shape_.width); }
  float* shares() const { return reinterpret_cast<float*>(chosen() + (size_t)shape_.rows * shape_.top); }
  // The sums [rows, sum_width] of a rank of experts, the n-th.
  float* sums(int n) const { return reinterpret_cast<float*>(blocks_[1 + n].data() + kHeader); }
  float* own_sums() const { return sums(rank_ - 1); }

  // The model's rank, one thread: says that a message of a layer, of so many rows, stands in memory. outputs: rows with
  // outputs of the step, which are those of later layers.
  void send(int layer, int rows, int outputs);
  // Waits until all ranks of experts have returned their sums of the latest message.
  void await_sums();
  // Ends a step. Ranks of experts return from it once they have answered all messages.
  void end_step() {
    Dispatch& d = dispatch();
    d.ended.fetch_add(1, std::memory_order_seq_cst);
    d.changed.publish(d.changed.value.load(std::memory_order_relaxed) + 1);
  }

  // A rank of experts, one thread: begins a step.
  void begin_step() { step_++; }
  // Waits for the next message, or the end of the step. Returns false at the end. It may be the first message of a
  // later step: the ranks of experts are one behind while they compute it.
  bool await_message() { return await(true); }
  // The layer and the number of rows of the latest message, and how many rows of the step have outputs.
  int message_layer() const { return dispatch().layer; }
  int message_rows() const { return dispatch().rows; }
  int message_outputs() const { return dispatch().outputs; }
  // Whether it asks for entries in place of sums.
  bool wants_entries() const { return dispatch().entries != 0; }
  // Waits for the next message, whatever has ended, and takes it: the sums that are returned next are its sums.
  void take() {
    await(false), received_++, count(message_rows());
    taken_ = std::chrono::steady_clock::now();
  }
  void send_sums();

  // How many messages this rank has sent or taken, and how many rows they had. A GPU's are not counted where it sends.
  // Any thread may call these.
  int64_t messages() const { return messages_.load(std::memory_order_relaxed); }
  int64_t messages_rows() const { return messages_rows_.load(std::memory_order_relaxed); }

  // What a rank of experts, the n-th, has computed so far, from taking a message to its answer: nanoseconds for all
  // messages; those that asked for entries, and how many these were.
  struct Computed {
    int64_t nanoseconds = 0, nanoseconds_of_entries = 0, entries = 0;
  };
  // Any thread may call it, once connected.
  Computed computed(int n) const {
    const Returned& of = returned(1 + n);
    return {of.nanoseconds.load(std::memory_order_relaxed), of.nanoseconds_of_entries.load(std::memory_order_relaxed),
            of.entries.load(std::memory_order_relaxed)};
  }

  // How many messages the model's rank has sent, also from a GPU. Any thread may call it.
  int64_t sent_messages() const { return dispatch().sent.load(std::memory_order_relaxed); }

  // For a GPU: where memory lies in this process, and flags in it.
  char* block(int rank) const { return blocks_[rank].data(); }
  size_t block_bytes(int rank) const { return blocks_[rank].size(); }
  static constexpr size_t kHeader = 4096;

  // At the start of the block of the model's rank, and of one of experts.
  struct Dispatch {
    alignas(64) std::atomic<uint32_t> sent;   // messages so far
    alignas(16) int32_t layer;                // of the latest one, as the three that follow
    int32_t rows, outputs, entries;           // entries: whether it asks for entries
    alignas(64) std::atomic<uint32_t> ended;  // steps so far
    alignas(64) Signal changed;               // one of these
  };
  struct Returned {
    alignas(64) Signal sent;                       // answered messages so far
    alignas(64) std::atomic<int64_t> nanoseconds;  // as of Computed
    std::atomic<int64_t> nanoseconds_of_entries, entries;
  };

 private:
  bool await(bool or_end);
  void count(int rows) {
    messages_.fetch_add(1, std::memory_order_relaxed);
    messages_rows_.fetch_add(rows, std::memory_order_relaxed);
  }
  Dispatch& dispatch() const { return *reinterpret_cast<Dispatch*>(blocks_[0].data()); }
  Returned& returned(int rank) const { return *reinterpret_cast<Returned*>(blocks_[rank].data()); }
  struct Address;

  const std::shared_ptr<SharedMemory> ranks_;
  const int others_, rank_, size_;  // ranks that take no part; this rank among those that do, and their number
  const ExpertShape shape_;
  const bool by_gpu_;
  std::vector<SharedBlock> blocks_;  // by rank
  bool connected_ = false;
  uint32_t sent_ = 0, received_ = 0, step_ = 0;
  std::chrono::steady_clock::time_point taken_;  // the latest message
  std::atomic<int64_t> messages_{0}, messages_rows_{0};
};

}  // namespace as
