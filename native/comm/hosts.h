// The ranks of other hosts, as those of a window see them.
//
// Each has a segment here as well, its mirror. What a rank publishes on its own host it also sends to every other host
// by MPI, where one rank, the receiver, has it put into the mirror and then publishes there, too: so a window reads the
// pieces of all ranks alike and adds them up in the same order, on one host or on many.
//
// MPI comes as Python has it: addresses of functions and Open MPI's handles. It is called inside of steps only, by any
// thread of a rank (MPI_THREAD_MULTIPLE), never so that it blocks.
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
  // first: of each host the first rank, ascending from 0, and behind them how many ranks there are. Ranks are those of
  // `mpi.comm`.
  Hosts(int rank, std::vector<int> first, const Mpi& mpi, int lanes);

  int size() const { return (int)first_.size() - 1; }
  int own() const { return own_; }
  int first(int host) const { return first_[host]; }
  int end(int host) const { return first_[host + 1]; }
  bool here(int rank) const { return rank >= first(own_) && rank < end(own_); }
  // Who gets on a host what a rank of another one sends.
  int receiver(int host, int rank) const { return first(host) + rank % (end(host) - first(host)); }

  // A lane's next message to or from a rank. Once it has come, `arrived` is told `value`. What is named must stay until
  // progress() says so. One thread a lane at a time.
  void send(int lane, int to, const char* data, size_t bytes);
  void receive(int lane, int from, char* data, size_t most, Signal& arrived, uint32_t value);
  // Whether all that was begun on a lane is done.
  bool progress(int lane);

 private:
  struct Request {
    void* handle;
    Signal* arrived;  // null: one that is sent
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
