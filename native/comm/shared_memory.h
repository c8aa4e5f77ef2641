// Communication between ranks through shared memory. Ranks of other hosts appear as mirrors, which hosts.h and link.h
// keep up to date.
//
// MPI_Win_allocate_shared allocates the memory and Python passes the addresses; native code does not link MPI. Every
// rank has one segment. Its owner zeroes it; this first touch places it on the owner's NUMA node.
//
// A wait spins briefly (unless `spin` is off: more ranks than cores), then sleeps on a futex. It ends with an error on
// an abort, after `timeout` seconds, or when the awaited rank is silent. A thread of every rank counts heartbeats in
// its segment. A rank is silent if its count does not change while the waiter counts kSilentHeartbeats of its own.
// (Counts, not a clock, because a clock runs on while all ranks are paused.)
//
// A collective runs on lanes. Each rank has a counter and two buffers for each lane. Chunk s goes into buffer s % 2,
// then the counter becomes s + 1. Once a rank has seen s + 1 on every counter, it may read buffers s % 2. It may later
// write chunk s + 2 there, because every rank has read chunk s before it publishes chunk s + 1. In a broadcast only
// rank 0 has chunks; the counters of the other ranks say how many they have taken.
//
// A large sum is scattered and gathered: each rank sums its part of the rows in rank order and passes it to the others.
// That reads n (R - 1) values twice instead of n R (R - 1) values once. The bits are the same.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/hosts.h"
#include "comm/link.h"
#include "comm/silence.h"
#include "common/sync.h"

namespace as {

constexpr int kLanes = 8;                   // of collectives; threads divide them
constexpr int kGatherLane = kLanes;         // one more for gather
constexpr int kBroadcastLane = kLanes + 1;  // one more for broadcast
constexpr int kAllLanes = kLanes + 2;
constexpr int kMaxRanks = 1024;
constexpr size_t kLaneBytes = 256 << 10;   // of one buffer of a lane
constexpr size_t kCommandBytes = 1 << 20;  // of one chunk of a command

struct alignas(64) Lane {
  Signal signal;
};
struct Segment {
  Lane lanes[kAllLanes];
  alignas(64) Signal command;  // rank 0: how many chunks were published
  alignas(64) Signal taken;    // this rank: how many chunks it has taken
  alignas(64) std::atomic<uint64_t> heartbeats;
  alignas(64) std::atomic<uint32_t> aborted;  // 0: no; 1: a thread is writing `message`; 2: it is written
  char message[1020];
  int32_t kind;
  uint32_t length, more;
  alignas(4096) char command_data[kCommandBytes];
  char data[kAllLanes][2][kLaneBytes];
};

class SharedMemory : public Communicator, private LinkEnd {
 public:
  // addresses: every rank's segment, or its mirror on this host. sum: adds partials. heartbeat_seconds: the interval.
  // hosts: null if there is one host. sockets: on rank 0, to the first ranks of the other hosts in order; on such a
  // rank, to rank 0. SharedMemory closes them. first: how many first ranks may also sum by themselves; every rank then
  // has two segments, and all ranks must name the same number. 0: none.
  SharedMemory(int rank, int size, const std::vector<uintptr_t>& addresses, bool spin, double timeout, SumPartials sum,
               double heartbeat_seconds = 1, std::shared_ptr<Hosts> hosts = nullptr,
               const std::vector<int>& sockets = {}, int first = 0);
  ~SharedMemory() override { close(); }

  // Bytes that each rank allocates and zeroes. first: as of the constructor.
  static size_t bytes_needed(int first = 0) { return (first > 0 ? 2 : 1) * sizeof(Segment); }

  // Stops the heartbeats. Must be called before the memory is freed.
  void close();

  // The first `count` ranks alone, for the collectives of what they compute: the model's ranks of a mixed group. Called
  // by these ranks; each call returns the same object, which ends with the group and which this one must outlive.
  // Throws std::invalid_argument for another count than the constructor's, or with several hosts.
  std::shared_ptr<SharedMemory> first_ranks(int count);
  // That count; 0: there is no memory for it.
  int first_count() const { return first_count_; }

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

  // Waits until ready(), as collectives do: spins, if it may, then sleeps by sleep(nanoseconds), which returns early if
  // something changes; at most `slice` ns at a time. Called by one thread of the rank. Throws after an abort or the
  // time limit, or if rank `peer` is silent, with `what` in the message.
  void wait_until(int peer, const char* what, int64_t slice, const std::function<bool()>& ready,
                  const std::function<void(int64_t)>& sleep);

  // Seconds that thread 0 has spent in a step's exchanges, and the part of them spent waiting. Any thread may call
  // these.
  double exchange_seconds() const { return 1e-9 * total(&SharedMemory::exchanged_); }
  double wait_seconds() const { return 1e-9 * total(&SharedMemory::waited_); }

 private:
  // Adds its lifetime to a counter, which one thread writes at a time.
  class Timed {
   public:
    Timed(std::atomic<int64_t>& nanoseconds, bool counts);
    ~Timed();

   private:
    std::atomic<int64_t>& nanoseconds_;
    int64_t start_;  // -1: it does not count
  };
  // The part [begin, end) of a message, in values or bytes.
  struct Range {
    size_t begin, end;
    size_t size() const { return end - begin; }
  };
  // A message of scattered rows, each of `width` values of `bytes` bytes, and the number of lanes that carry it.
  struct Scattered {
    const Communicator& ranks;
    size_t rows, width, bytes;
    int lanes;
    // The part of a rank's rows that a lane carries, and a chunk of it: at most `most` values from `offset` on.
    Range lane(int rank, int lane) const;
    Range share(int rank, int lane, size_t offset, size_t most) const;
    size_t longest(int lane) const;  // the longest of all ranks' parts
    // The distance in values between the parts of adjacent ranks in such a chunk.
    size_t stride(int lane, size_t offset, size_t most) const;
  };
  Scattered scattered(size_t rows, size_t width, size_t bytes) const;
  void reduce_scatter(float* x, const Scattered& shape, int thread, int threads);
  void all_gather(char* base, const Scattered& shape, int thread, int threads);
  void all_reduce_at_once(float* x, size_t n, int thread, int threads);
  char* piece(int rank, int lane, uint32_t sequence) const { return segments_[rank]->data[lane][sequence & 1]; }
  // Publishes this rank's chunk and starts the transfers with other hosts. Without a stride, `bytes` bytes are sent.
  // With one, rank r's part is at r * stride, and each host gets only the parts of its own ranks.
  void publish_piece(int lane, uint32_t sequence, size_t bytes, size_t stride = 0) {
    segments_[rank_]->lanes[lane].signal.publish(sequence + 1);
    if (hosts_) exchange(lane, sequence, bytes, stride);
  }
  void exchange(int lane, uint32_t sequence, size_t bytes, size_t stride);
  // Waits for a rank's chunk.
  void await(int peer, int lane, uint32_t sequence, const char* what) {
    wait(segments_[peer]->lanes[lane].signal, sequence + 1, peer, what, lane);
  }
  // Waits until every rank has published chunk `sequence` of the lane.
  void await_all(int lane, uint32_t sequence, const char* what);
  // Waits until all transfers with other hosts on the lane are complete.
  void finish(int lane, const char* what);

  // Waits until the signal reaches the target. Throws after an abort or the time limit, with `what` in the message.
  // lane: also makes progress with other hosts on this lane; -1: none.
  void wait(Signal& signal, uint32_t target, int peer, const char* what, int lane = -1);
  // The same for any condition. pause() passes the time while it spins, sleep() afterwards.
  template <class Ready, class Pause, class Sleep>
  void wait_for(int peer, const char* what, Ready ready, Pause pause, Sleep sleep);
  [[noreturn]] void give_up(int peer, const char* what);
  // Returns whether all transfers from other hosts on the lane are complete.
  bool all_heard(int lane) { return !hosts_ || lane < 0 || hosts_->progress(lane); }
  int first_here() const { return hosts_ ? hosts_->first(hosts_->own()) : 0; }
  int end_here() const { return hosts_ ? hosts_->end(hosts_->own()) : size_; }
  // Publishes a chunk of a command to the ranks of this host, which have taken `before` chunks.
  void put_command(uint32_t before, int kind, const char* data, size_t bytes, bool more);

  std::vector<uint64_t> heartbeats() const override;
  void heard(int host, const std::vector<uint64_t>& heartbeats) override;
  bool relay(int kind, const char* data, size_t bytes, bool more) override;

  // With what the first ranks have counted by themselves.
  double total(std::atomic<int64_t> SharedMemory::* counter) const;
  void check_abort() const;
  // Aborts and throws if rank `peer` is silent.
  void check_silence(int peer, const char* what);

  std::vector<Segment*> segments_;
  const std::shared_ptr<Hosts> hosts_;
  std::atomic<int64_t> exchanged_{0}, waited_{0};  // nanoseconds, of thread 0
  const bool spin_;
  const double timeout_;
  const SumPartials sum_;
  // A lane's next chunk. Each has its own cache line, because different threads increment them.
  struct alignas(64) Sequence {
    uint32_t next = 0;
  };
  Sequence sequence_[kAllLanes];
  uint32_t commands_ = 0;
  uint32_t relayed_ = 0;  // chunks of commands that the link has passed on

  std::vector<Silence> silence_;  // of each rank
  const int first_count_;
  SharedMemory* all_ = nullptr;  // of first_ranks(): all ranks
  mutable std::mutex making_first_;
  std::shared_ptr<SharedMemory> first_;
  std::mutex closing_;
  std::condition_variable closed_;
  bool is_closed_ = false;
  std::unique_ptr<Link> link_;
  std::thread heartbeat_thread_;  // starts last: nothing may throw once it runs
};

}  // namespace as
