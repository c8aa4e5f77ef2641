// Memory that processes of a host share: a file in memory, which has no limit of its own, as /dev/shm has in a
// container. Others find it by the process that made it.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace as {

class SharedBlock {
 public:
  // How another process of this host finds the memory. All of them must count processes in the same way.
  struct Name {
    int process = 0, file = -1;
  };

  SharedBlock() = default;
  // New memory, zeroed by this thread, which places it on the thread's NUMA node. Throws std::runtime_error.
  SharedBlock(size_t bytes, const char* purpose) {
    try {
      file_ = memfd_create("allspark-ranks", MFD_CLOEXEC);
      const int error = file_ < 0                        ? errno
                        : ftruncate(file_, (off_t)bytes) ? errno
                                                         : posix_fallocate(file_, 0, (off_t)bytes);
      if (error)
        throw std::runtime_error("cannot allocate " + std::to_string(bytes >> 20) + " MiB of shared host memory for " +
                                 purpose + ": " + std::strerror(error));
      map(bytes, purpose);
    } catch (...) {  // no destructor runs
      release();
      throw;
    }
    std::memset(data_, 0, bytes);
  }
  // New memory of zeros, from a huge page's boundary on. The thread that writes a page first places it; other pages
  // take no memory. Throws std::runtime_error.
  struct Untouched {};
  SharedBlock(Untouched, size_t bytes, const char* purpose) {
    try {
      file_ = memfd_create("allspark-ranks", MFD_CLOEXEC);
      if (file_ < 0 || ftruncate(file_, (off_t)bytes))
        throw std::runtime_error("cannot make " + std::to_string(bytes >> 20) + " MiB of shared host memory for " +
                                 purpose + ": " + std::strerror(errno));
      map(bytes, purpose, kHugePage);
    } catch (...) {
      release();
      throw;
    }
    madvise(data_, bytes, MADV_HUGEPAGE);  // failure is harmless
  }
  // Another process' memory, or this one's a second time. Throws std::invalid_argument that says what to do.
  SharedBlock(const Name& name, size_t bytes, const char* purpose) {
    try {
      const std::string path = "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
      file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
      struct stat found{};
      if (file_ < 0 || fstat(file_, &found) || (size_t)found.st_size != bytes)
        throw std::invalid_argument("the host memory of another rank cannot be opened (" + path + ": " +
                                    (file_ < 0 ? std::strerror(errno) : "another file") +
                                    "): all ranks must run as one user in one container, or in several that share "
                                    "process ids");
      map(bytes, purpose, bytes < kHugePage ? 0 : kHugePage);
    } catch (...) {
      release();
      throw;
    }
  }
  ~SharedBlock() { release(); }
  SharedBlock(SharedBlock&& other) noexcept { swap(other); }
  SharedBlock& operator=(SharedBlock&& other) noexcept {
    swap(other);
    return *this;
  }

  Name name() const { return {(int)getpid(), file_}; }
  char* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  void swap(SharedBlock& other) {
    std::swap(file_, other.file_), std::swap(bytes_, other.bytes_), std::swap(data_, other.data_);
  }
  // The address is a multiple of `aligned` (0: of a page).
  void map(size_t bytes, const char* purpose, size_t aligned = 0) {
    void* place = nullptr;
    if (aligned) {  // leaves unused address space before and behind it
      void* room = mmap(nullptr, bytes + aligned, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (room != MAP_FAILED)
        place = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room) + aligned - 1) / aligned * aligned);
    }
    void* mapped = mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (place ? MAP_FIXED : 0), file_, 0);
    if (mapped == MAP_FAILED)
      throw std::runtime_error(std::string("cannot map shared host memory for ") + purpose + ": " +
                               std::strerror(errno));
    data_ = static_cast<char*>(mapped), bytes_ = bytes;
  }
  void release() {
    if (data_) munmap(data_, bytes_);
    if (file_ >= 0) close(file_);
  }

  static constexpr size_t kHugePage = 2 << 20;

  int file_ = -1;
  size_t bytes_ = 0;
  char* data_ = nullptr;
};

}  // namespace as
