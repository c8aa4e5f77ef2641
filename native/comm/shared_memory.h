// What the ranks of one host exchange through shared memory; and with those of other hosts, whose segments are mirrors
// that hosts.h and link.h keep up to date.
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
// all have read piece s before they published s + 2's predecessor. In a broadcast only rank 0 has pieces; the others'
// counters say how many they have taken.
//
// A large sum is scattered and gathered: each rank adds up its part of the rows in rank order and hands it to the
// others, so that n (R - 1) values are read twice, not n R (R - 1) values once. The bits are the same.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/hosts.h"
#include "comm/link.h"
#include "common/sync.h"

namespace as {

constexpr int kLanes = 8;                   // channels of collectives; threads share them out among themselves
constexpr int kGatherLane = kLanes;         // one more for gather,
constexpr int kBroadcastLane = kLanes + 1;  // and one for broadcast
constexpr int kAllLanes = kLanes + 2;
constexpr int kMostRanks = 1024;
constexpr size_t kLaneBytes = 256 << 10;   // of one buffer of a channel
constexpr size_t kCommandBytes = 1 << 20;  // of one piece of a command
constexpr uint64_t kSilentBeats = 15;      // at one a second later than the supervisor (10 s), who knows more

struct alignas(64) Lane {
  Signal signal;
};
struct Segment {
  Lane lanes[kAllLanes];
  alignas(64) Signal command;  // rank 0: how many pieces were published
  alignas(64) Signal taken;    // this rank: how many pieces it has taken
  alignas(64) std::atomic<uint64_t> beats;
  alignas(64) std::atomic<uint32_t> aborted;  // 0: no; 1: somebody writes `message`; 2: it is there
  char message[1020];
  int32_t kind;
  uint32_t length, more;
  alignas(4096) char command_data[kCommandBytes];
  char data[kAllLanes][2][kLaneBytes];
};

class Window : public Communicator, private LinkEnd {
 public:
  // beat_seconds: from one beat to the next. addresses: of every rank's segment, or its mirror here. hosts: null where
  // there is one. sockets: of rank 0, connected to the first ranks of the other hosts, in their order; of such a rank,
  // to rank 0. They are the window's.
  Window(int rank, int size, const std::vector<uintptr_t>& addresses, bool spin, double timeout,
         double beat_seconds = 1, std::shared_ptr<Hosts> hosts = nullptr, const std::vector<int>& sockets = {});
  ~Window() override { close(); }

  // No more beats: to be called before the memory goes away.
  void close();

  bool spin() const override { return spin_; }
  double timeout() const override { return timeout_; }

  void all_reduce(float* x, size_t n, int thread, int threads) override;
  void reduce_scatter_rows(float* x, size_t rows, size_t width, int thread, int threads) override;
  void all_gather_rows(void* base, size_t rows, size_t row_bytes, int thread, int threads) override;
  std::vector<std::string> gather(const std::string& bytes) override;
  void broadcast(std::string& bytes) override;
  void publish(int kind, const std::string& payload) override;
  bool wait_command(double timeout, int& kind, std::string& payload) override;
  void abort(const std::string& message) override;
  bool aborted(std::string& message) const override;

  // Seconds that thread 0 has spent in exchanges of steps, and of these waiting for other ranks. Any thread.
  double exchange_seconds() const { return 1e-9 * exchanged_.load(std::memory_order_relaxed); }
  double wait_seconds() const { return 1e-9 * waited_.load(std::memory_order_relaxed); }

 private:
  // Adds the time of its life to a count that one thread at a time writes.
  class Timed {
   public:
    Timed(std::atomic<int64_t>& nanoseconds, bool counts);
    ~Timed();

   private:
    std::atomic<int64_t>& nanoseconds_;
    int64_t start_;  // -1: it does not count
  };
  // A part of a message: values, or bytes, [begin, end).
  struct Range {
    size_t begin, end;
    size_t size() const { return end - begin; }
  };
  // A message of rows that are scattered, each of `width` values of `bytes` bytes, and how many lanes it takes.
  struct Scattered {
    const Communicator& ranks;
    size_t rows, width, bytes;
    int lanes;
    // What a rank has of it, a lane has of that, and of that a piece of `most` values from `offset` on.
    Range lane(int rank, int lane) const;
    Range share(int rank, int lane, size_t offset, size_t most) const;
    size_t longest(int lane) const;  // of all ranks' parts
    // Of such a piece, when every rank's has its place: values from one to the next.
    size_t stride(int lane, size_t offset, size_t most) const;
  };
  Scattered scattered(size_t rows, size_t width, size_t bytes) const;
  void reduce_scatter(float* x, const Scattered& shape, int thread, int threads);
  void all_gather(char* base, const Scattered& shape, int thread, int threads);
  void all_reduce_at_once(float* x, size_t n, int thread, int threads);
  char* piece(int rank, int lane, uint32_t sequence) const { return segments_[rank]->data[lane][sequence & 1]; }
  // This rank's piece is there, and those of other hosts may come: its first `bytes` bytes, or, with a stride, so many
  // for each rank, which only that one reads.
  void publish_piece(int lane, uint32_t sequence, size_t bytes, size_t stride = 0) {
    segments_[rank_]->lanes[lane].signal.publish(sequence + 1);
    if (hosts_) exchange(lane, sequence, bytes, stride);
  }
  void exchange(int lane, uint32_t sequence, size_t bytes, size_t stride);
  // Until a rank's piece is there.
  void await(int peer, int lane, uint32_t sequence, const char* what) {
    wait(segments_[peer]->lanes[lane].signal, sequence + 1, peer, what, lane);
  }
  // Until every rank has published piece `sequence` of the lane.
  void await_all(int lane, uint32_t sequence, const char* what);
  // Until all that was begun with other hosts on the lane is done.
  void finish(int lane, const char* what);

  // Until the signal has reached the target. Throws when aborted or after the time limit; `what` is for that message.
  // lane: on which other hosts are heard meanwhile; -1: none.
  void wait(Signal& signal, uint32_t target, int peer, const char* what, int lane = -1);
  [[noreturn]] void give_up(int peer, const char* what);
  // Whether waiting ends somewhere for what other hosts send.
  bool all_heard(int lane) { return !hosts_ || lane < 0 || hosts_->progress(lane); }
  int first_here() const { return hosts_ ? hosts_->first(hosts_->own()) : 0; }
  int end_here() const { return hosts_ ? hosts_->end(hosts_->own()) : size_; }
  // A command, or a piece of it, for the ranks of this host, who have taken `before` pieces.
  void put_command(uint32_t before, int kind, const char* data, size_t bytes, bool more);

  std::vector<uint64_t> beats() const override;
  void heard(int host, const std::vector<uint64_t>& beats) override;
  bool relay(int kind, const char* data, size_t bytes, bool more) override;

  void check_abort() const;
  // Throws, for all, when rank `peer` is silent.
  void check_silence(int peer, const char* what);

  std::vector<Segment*> segments_;
  const std::shared_ptr<Hosts> hosts_;
  std::atomic<int64_t> exchanged_{0}, waited_{0};  // nanoseconds, of thread 0
  bool spin_;
  double timeout_;
  // Of a lane: the piece that comes next. A line each: different threads count.
  struct alignas(64) Sequence {
    uint32_t next = 0;
  };
  Sequence sequence_[kAllLanes];
  uint32_t commands_ = 0;
  uint32_t relayed_ = 0;  // pieces of commands, by the link

  // A rank's beats when somebody here last saw another number, and how many beats this rank had then.
  struct Watched {
    std::atomic<uint64_t> beats{0}, since{0};
  };
  std::vector<Watched> watched_;
  std::mutex closing_;
  std::condition_variable closed_;
  bool is_closed_ = false;
  std::thread beating_;
  std::unique_ptr<Link> link_;
};

}  // namespace as
