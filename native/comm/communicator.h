// What the ranks of a group exchange. Backends know nothing of how: Window (ranks of one host, shared memory) is the
// one implementation that CPUs need today.
//
// Collectives are called by all ranks in the same order with the same sizes. Those that take (thread, threads) are
// called by every thread of a rank's pool; what a call leaves may be read by other threads after the pool's next
// barrier. Sums are taken in rank order, whatever the message's size: ((rank 0's + rank 1's) + rank 2's) + ...
//
// Every wait is bounded: it throws std::runtime_error when a rank has aborted, is silent, or is later than timeout().
#pragma once
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace as {

class Communicator {
 public:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual bool spin() const = 0;       // whether waiting threads may keep their processors busy
  virtual double timeout() const = 0;  // seconds

  // The half-open range that rank r has of n rows that are scattered: sizes differ by at most one; with fewer rows than
  // ranks some have none.
  std::pair<size_t, size_t> rows_of(size_t n, int r) const { return {n * r / size_, n * (r + 1) / size_}; }

  // x [n] becomes the sum over ranks.
  virtual void all_reduce(float* x, size_t n, int thread, int threads) = 0;
  // x [rows, width]: this rank's rows (rows_of) become the sums over ranks; the others are as they were.
  virtual void reduce_scatter_rows(float* x, size_t rows, size_t width, int thread, int threads) = 0;
  // base: `rows` rows of `row_bytes` bytes, of which this rank has its own; it gets the others from their ranks.
  virtual void all_gather_rows(void* base, size_t rows, size_t row_bytes, int thread, int threads) = 0;

  // By one thread a rank. Rank 0 gets every rank's bytes, in rank order; the others get nothing.
  virtual std::vector<std::string> gather(const std::string& bytes) = 0;
  // By one thread a rank, within a step: `bytes` becomes rank 0's. Meant for short messages: the ranks spin for it.
  virtual void broadcast(std::string& bytes) = 0;

  // Between steps: rank 0 gives the others work, for which they sleep.
  virtual void publish(int kind, const std::string& payload) = 0;
  // False: no command within `timeout` seconds.
  virtual bool wait_command(double timeout, int& kind, std::string& payload) = 0;

  // Ends every wait of every rank with this message; the group is of no more use. By any thread.
  virtual void abort(const std::string& message) = 0;
  virtual bool aborted(std::string& message) const = 0;

 protected:
  const int rank_, size_;
};

}  // namespace as
