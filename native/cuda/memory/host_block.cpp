#include "cuda/memory/host_block.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/memory/device.h"

namespace as::cuda {

// A file in memory has no limit of its own, as /dev/shm has in a container.
HostBlock::HostBlock(size_t bytes) {
  try {
    file_ = memfd_create("allspark-ranks", MFD_CLOEXEC);
    const int error = file_ < 0                        ? errno
                      : ftruncate(file_, (off_t)bytes) ? errno
                                                       : posix_fallocate(file_, 0, (off_t)bytes);
    if (error)
      throw std::runtime_error("cannot allocate " + std::to_string(bytes >> 20) +
                               " MiB of shared host memory for what GPUs exchange: " + std::strerror(error));
    map(bytes);
  } catch (...) {  // no destructor runs
    release();
    throw;
  }
  std::memset(data_, 0, bytes);
}

HostBlock::HostBlock(const Name& name, size_t bytes) {
  try {
    const std::string path = "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
    file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat found{};
    if (file_ < 0 || fstat(file_, &found) || (size_t)found.st_size != bytes)
      throw std::invalid_argument("the host memory of another rank cannot be opened (" + path + ": " +
                                  (file_ < 0 ? std::strerror(errno) : "another file") +
                                  "): all ranks must run as one user in one container, or in several that share "
                                  "process ids");
    map(bytes);
  } catch (...) {
    release();
    throw;
  }
}

HostBlock::Name HostBlock::name() const { return {(int)getpid(), file_}; }

void HostBlock::map(size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapped == MAP_FAILED)
    throw std::runtime_error(std::string("cannot map what GPUs exchange by host memory: ") + std::strerror(errno));
  data_ = static_cast<char*>(mapped), bytes_ = bytes;
  void* on_gpu = nullptr;
  check(cudaHostRegister(data_, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
        "pinning host memory that GPUs exchange by");
  on_gpu_ = data_;  // pinned
  check(cudaHostGetDevicePointer(&on_gpu, data_, 0), "mapping host memory that GPUs exchange by");
  on_gpu_ = static_cast<char*>(on_gpu);
}

HostBlock::~HostBlock() { release(); }

void HostBlock::release() {
  if (on_gpu_) cudaHostUnregister(data_);
  if (data_) munmap(data_, bytes_);
  if (file_ >= 0) close(file_);
}

void HostBlock::swap(HostBlock& other) {
  std::swap(file_, other.file_), std::swap(bytes_, other.bytes_);
  std::swap(data_, other.data_), std::swap(on_gpu_, other.on_gpu_);
}

}  // namespace as::cuda
