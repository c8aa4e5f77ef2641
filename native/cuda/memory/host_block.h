// Memory of the host that the processes of a group share, mapped for each process' GPU.
#pragma once
#include <cstddef>

namespace as::cuda {

class HostBlock {
 public:
  // How another process of this host finds the memory. All of them must count processes in the same way.
  struct Name {
    int process = 0, file = -1;
  };

  HostBlock() = default;
  // New memory, zeroed by this thread, for this thread's current GPU. Throws std::runtime_error.
  explicit HostBlock(size_t bytes);
  // Another process' memory, or this one's a second time. Throws std::invalid_argument that says what to do.
  HostBlock(const Name& name, size_t bytes);
  ~HostBlock();
  HostBlock(HostBlock&& other) noexcept { swap(other); }
  HostBlock& operator=(HostBlock&& other) noexcept {
    swap(other);
    return *this;
  }

  Name name() const;
  char* data() const { return data_; }      // the host's address
  char* on_gpu() const { return on_gpu_; }  // the GPU's address

 private:
  void swap(HostBlock& other);
  void map(size_t bytes);
  void release();

  int file_ = -1;
  size_t bytes_ = 0;
  char *data_ = nullptr, *on_gpu_ = nullptr;
};

}  // namespace as::cuda
