// What the ranks of one host exchange through shared memory: commands of rank 0, allreduce, gather.
//
// The memory comes from MPI_Win_allocate_shared (Python hands over the addresses; native code links no MPI): one
// segment a rank, zeroed by its owner, first touched there and so on its node. Every wait spins briefly (not when
// `spin` is off: more ranks than cores), then sleeps on a futex, notices an abort and gives up after `timeout` seconds,
// or when the rank it waits for is silent: each window's thread counts beats in its segment, whatever the rank is
// doing, and a rank whose count stands still for kSilentBeats of the waiter's own is dead or stopped. (No clock says
// so, as that goes on while all ranks are paused.)
//
// A collective runs on channels. A channel of a rank is a counter and two buffers: piece s goes into buffer s % 2, then
// the counter says s + 1. Who has seen everybody's s + 1 may read buffers s % 2, and may later write piece s + 2 there:
// all have read piece s before they published s + 2's predecessor.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/sync.h"

namespace as {

constexpr int kLanes = 8;                  // channels of allreduce; threads share them out among themselves
constexpr int kGatherLane = kLanes;        // one more for gather
constexpr size_t kLaneBytes = 256 << 10;   // of one buffer of a channel
constexpr size_t kCommandBytes = 1 << 20;  // of one piece of a command
constexpr uint64_t kSilentBeats = 15;      // at one a second later than the supervisor (10 s), who knows more

struct alignas(64) Lane {
  Signal signal;
};
struct Segment {
  Lane lanes[kLanes + 1];
  alignas(64) Signal command;  // rank 0: how many pieces were published
  alignas(64) Signal taken;    // this rank: how many pieces it has taken
  alignas(64) std::atomic<uint64_t> beats;
  alignas(64) std::atomic<uint32_t> aborted;  // 0: no; 1: somebody writes `message`; 2: it is there
  char message[1020];
  int32_t kind;
  uint32_t length, more;
  alignas(4096) char command_data[kCommandBytes];
  char data[kLanes + 1][2][kLaneBytes];
};

class Window {
 public:
  // beat_seconds: from one beat to the next.
  Window(int rank, int size, const std::vector<uintptr_t>& addresses, bool spin, double timeout,
         double beat_seconds = 1);
  ~Window() { close(); }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // No more beats: to be called before the memory goes away.
  void close();

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool spin() const { return spin_; }
  double timeout() const { return timeout_; }

  // Sum over ranks in rank order, in place; n and the order of calls must be the same on every rank. Called by every
  // thread of the rank's pool with its index.
  void all_reduce(float* x, size_t n, int thread, int threads);
  // Rank 0 gets every rank's bytes, in rank order; the others get nothing. One thread a rank.
  std::vector<std::string> gather(const std::string& bytes);

  void publish(int kind, const std::string& payload);
  // False: no command within `timeout` seconds.
  bool wait_command(double timeout, int& kind, std::string& payload);

  void abort(const std::string& message);
  bool aborted(std::string& message) const;

 private:
  // Until the signal has reached the target. Throws when aborted or after the time limit; `what` is for that message.
  void wait(Signal& signal, uint32_t target, int peer, const char* what);
  void check_abort() const;
  // Throws, for all, when rank `peer` is silent.
  void check_silence(int peer, const char* what);

  int rank_, size_;
  std::vector<Segment*> segments_;
  bool spin_;
  double timeout_;
  uint32_t sequence_[kLanes + 1] = {};
  uint32_t commands_ = 0;

  // A rank's beats when somebody here last saw another number, and how many beats this rank had then.
  struct Watched {
    std::atomic<uint64_t> beats{0}, since{0};
  };
  std::vector<Watched> watched_;
  std::mutex closing_;
  std::condition_variable closed_;
  bool is_closed_ = false;
  std::thread beating_;
};

}  // namespace as
