#include "cuda/memory/host_block.h"

#include <utility>

#include "cuda/memory/device.h"

namespace as::cuda {
namespace {

constexpr const char* kPurpose = "what GPUs exchange";

}  // namespace

Pinned::Pinned(char* data, size_t bytes) {
  check(cudaHostRegister(data, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
        "pinning host memory that ranks exchange by");
  data_ = data;
  void* on_gpu = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&on_gpu, data_, 0);
  if (mapped != cudaSuccess) cudaHostUnregister(data_);  // no destructor runs
  check(mapped, "mapping host memory that ranks exchange by");
  on_gpu_ = static_cast<char*>(on_gpu);
}

Pinned::~Pinned() {
  if (data_) cudaHostUnregister(data_);
}

void Pinned::swap(Pinned& other) { std::swap(data_, other.data_), std::swap(on_gpu_, other.on_gpu_); }

HostBlock::HostBlock(size_t bytes) : block_(bytes, kPurpose), pinned_(block_.data(), bytes) {}

HostBlock::HostBlock(const Name& name, size_t bytes) : block_(name, bytes, kPurpose), pinned_(block_.data(), bytes) {}

}  // namespace as::cuda
