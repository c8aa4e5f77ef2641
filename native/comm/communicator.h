// Collectives and commands between the ranks of a group, as backends see them. SharedMemory is the implementation.
//
// All ranks call the collectives in the same order with the same sizes. A collective with parameters (thread, threads)
// is called by every thread of the rank's pool; other threads may read its result after the pool's next barrier.
// Sums are always taken in rank order, whatever the size: ((rank 0's + rank 1's) + rank 2's) + ...
//
// Every wait is bounded. It throws std::runtime_error when a rank has aborted, is silent, or exceeds timeout().
#pragma once
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace as {

// out[i] = ((partials[0][i] + partials[1][i]) + partials[2][i]) + ... for i < n. The backend supplies this kernel.
using SumPartials = void (*)(const float* const* partials, int count, float* out, size_t n);

class Communicator {
 public:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual bool spin() const = 0;       // whether waiting threads may spin
  virtual double timeout() const = 0;  // seconds

  // The half-open range of n scattered rows that belongs to rank r. Sizes differ by at most one. With fewer rows than
  // ranks, some ranks have none.
  std::pair<size_t, size_t> rows_of(size_t n, int r) const { return {n * r / size_, n * (r + 1) / size_}; }

  // Replaces x [n] by its sum over the ranks.
  virtual void all_reduce(float* x, size_t n, int thread, int threads) = 0;
  // Replaces this rank's rows (rows_of) of x [rows, width] by their sums over the ranks. Other rows do not change.
  virtual void reduce_scatter_rows(float* x, size_t rows, size_t width, int thread, int threads) = 0;
  // base holds `rows` rows of `row_bytes` bytes. The caller has set this rank's rows; the call sets the other ranks'
  // rows.
  virtual void all_gather_rows(void* base, size_t rows, size_t row_bytes, int thread, int threads) = 0;

  // Called by one thread a rank. Returns every rank's bytes in rank order on rank 0, and nothing on other ranks.
  virtual std::vector<std::string> gather(const std::string& bytes) = 0;
  // Called by one thread a rank, within a step. Replaces `bytes` by rank 0's. For short messages: the ranks spin.
  virtual void broadcast(std::string& bytes) = 0;

  // Sends a command from rank 0 to the other ranks, which sleep between steps.
  virtual void publish(int kind, const std::string& payload) = 0;
  // Returns false if no command arrives within `timeout` seconds.
  virtual bool wait_command(double timeout, int& kind, std::string& payload) = 0;

  // Ends every wait of every rank with this message. The group cannot be used afterwards. Any thread may call it.
  virtual void abort(const std::string& message) = 0;
  virtual bool aborted(std::string& message) const = 0;

 protected:
  const int rank_, size_;
};

}  // namespace as
