#include "comm/hosts.h"

#include <stdexcept>
#include <string>

namespace as {
namespace {

void check(int error, const char* what) {
  if (error) throw std::runtime_error(std::string("MPI: ") + what + " failed with error " + std::to_string(error));
}

}  // namespace

Hosts::Hosts(int rank, std::vector<int> first, const Mpi& mpi, int lanes)
    : first_(std::move(first)), mpi_(mpi), lanes_(lanes) {
  bool ascending = first_.size() >= 2 && first_[0] == 0;
  for (size_t h = 1; ascending && h < first_.size(); h++) ascending = first_[h] > first_[h - 1];
  if (!ascending || rank < 0 || rank >= first_.back())
    throw std::invalid_argument("hosts: the first ranks must ascend from 0 and end with the number of ranks");
  if (!mpi.isend || !mpi.irecv || !mpi.test || !mpi.byte || !mpi.comm)
    throw std::invalid_argument("hosts: MPI's functions and handles are missing");
  while (rank >= end(own_)) own_++;
}

void Hosts::send(int lane, int to, const char* data, size_t bytes) {
  Request request{nullptr, nullptr, 0};
  check(mpi_.isend(data, (int)bytes, mpi_.byte, to, lane, mpi_.comm, &request.handle), "MPI_Isend");
  lanes_[lane].open.push_back(request);
}

void Hosts::receive(int lane, int from, char* data, size_t most, Signal& arrived, uint32_t value) {
  Request request{nullptr, &arrived, value};
  check(mpi_.irecv(data, (int)most, mpi_.byte, from, lane, mpi_.comm, &request.handle), "MPI_Irecv");
  lanes_[lane].open.push_back(request);
}

bool Hosts::progress(int lane) {
  auto& open = lanes_[lane].open;
  for (size_t i = 0; i < open.size();) {
    int done = 0;
    check(mpi_.test(&open[i].handle, &done, nullptr), "MPI_Test");
    if (!done) {
      i++;
      continue;
    }
    if (open[i].arrived) open[i].arrived->publish(open[i].value);
    open[i] = open.back();
    open.pop_back();
  }
  return open.empty();
}

}  // namespace as
