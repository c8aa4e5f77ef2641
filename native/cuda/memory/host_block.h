// Memory of the host that the processes of a group share, mapped for each process' GPU.
#pragma once
#include <cstddef>

#include "comm/shared_block.h"

namespace as::cuda {

// Memory that this process has mapped anyway, pinned and mapped for a GPU. It must be unmapped afterwards.
class Pinned {
 public:
  Pinned() = default;
  // For this thread's current GPU. Throws std::runtime_error.
  Pinned(char* data, size_t bytes);
  ~Pinned();
  Pinned(Pinned&& other) noexcept { swap(other); }
  Pinned& operator=(Pinned&& other) noexcept {
    swap(other);
    return *this;
  }

  char* on_gpu() const { return on_gpu_; }  // the GPU's address

 private:
  void swap(Pinned& other);

  char *data_ = nullptr, *on_gpu_ = nullptr;
};

class HostBlock {
 public:
  using Name = SharedBlock::Name;

  HostBlock() = default;
  // New memory, zeroed by this thread, for this thread's current GPU. Throws std::runtime_error.
  explicit HostBlock(size_t bytes);
  // Another process' memory, or this one's a second time. Throws std::invalid_argument that says what to do.
  HostBlock(const Name& name, size_t bytes);

  Name name() const { return block_.name(); }
  char* data() const { return block_.data(); }       // the host's address
  char* on_gpu() const { return pinned_.on_gpu(); }  // the GPU's address

 private:
  SharedBlock block_;
  Pinned pinned_;  // of block_: destroyed first
};

}  // namespace as::cuda
