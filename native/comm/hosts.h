// Exchange with the ranks of other hosts, through mirrors in this host's shared memory.
//
// Every remote rank has a mirror: a segment on this host. When a rank publishes a chunk, it also sends it by MPI to one
// rank of every other host, the receiver. The receiver lets MPI write the chunk into the mirror and publishes it there.
// So SharedMemory reads the chunks of local and remote ranks alike and sums them in the same order.
//
// Python passes the addresses of MPI's functions and Open MPI's handles. MPI is called only within steps, by any thread
// of a rank (MPI_THREAD_MULTIPLE). The calls never block.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/sync.h"

namespace as {

struct Mpi {
  int (*isend)(const void*, int, void*, int, int, void*, void**);
  int (*irecv)(void*, int, void*, int, int, void*, void**);
  int (*test)(void**, int*, void*);
  void *byte, *comm;
};

class Hosts {
 public:
  // first: the first rank of each host, ascending from 0, followed by the number of ranks. Ranks are numbered as in
  // `mpi.comm`.
  Hosts(int rank, std::vector<int> first, const Mpi& mpi, int lanes);

  int size() const { return (int)first_.size() - 1; }
  int own() const { return own_; }
  int first(int host) const { return first_[host]; }
  int end(int host) const { return first_[host + 1]; }
  bool here(int rank) const { return rank >= first(own_) && rank < end(own_); }
  // The rank of `host` that receives the messages of `rank`, which is on another host.
  int receiver(int host, int rank) const { return first(host) + rank % (end(host) - first(host)); }

  // Starts a lane's next message to or from a rank. Its arrival sets `arrived` to `value`. Buffers must stay valid
  // until progress() returns true. Only one thread at a time may use a lane.
  void send(int lane, int to, const char* data, size_t bytes);
  void receive(int lane, int from, char* data, size_t most, Signal& arrived, uint32_t value);
  // Returns whether all messages that were started on a lane are complete.
  bool progress(int lane);

 private:
  struct Request {
    void* handle;
    Signal* arrived;  // null for a send
    uint32_t value;
  };
  struct alignas(64) Requests {
    std::vector<Request> open;
  };
  const std::vector<int> first_;
  int own_ = 0;
  const Mpi mpi_;
  std::vector<Requests> lanes_;
};

}  // namespace as
