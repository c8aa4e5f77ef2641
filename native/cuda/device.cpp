#include "cuda/device.h"

#include <cstring>
#include <stdexcept>

namespace as {
namespace cuda {
namespace {

constexpr int kLeastCapability = 80;

std::string version_of(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

std::string mib(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(result));
}

int device_count() {
  int driver = 0, count = 0;
  cudaDriverGetVersion(&driver);
  if (!driver)
    throw std::invalid_argument(
        "there is no NVIDIA driver: install it, until nvidia-smi lists the GPUs (in a container, "
        "start that with its GPUs: --gpus all), or use compute_unit='CPU:0'");
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaErrorInsufficientDriver)
    throw std::invalid_argument("the NVIDIA driver is too old: it is for CUDA " + version_of(driver) +
                                ", and this build needs one for CUDA " + version_of(CUDART_VERSION) +
                                ": update it, or build with an older nvcc");
  if (result == cudaErrorNoDevice || (result == cudaSuccess && !count))
    throw std::invalid_argument(
        "the NVIDIA driver sees no GPU: look at nvidia-smi and at CUDA_VISIBLE_DEVICES, or use "
        "compute_unit='CPU:0'");
  if (result != cudaSuccess)
    throw std::invalid_argument(std::string("the NVIDIA driver does not answer: ") + cudaGetErrorString(result));
  return count;
}

namespace {

void check_index(int index) {
  const int count = device_count();
  if (index < 0 || index >= count)
    throw std::invalid_argument("there is no GPU " + std::to_string(index) + ": compute_unit may name 0 to " +
                                std::to_string(count - 1));
}

}  // namespace

void check_peer(int device, int other) {
  check_index(device), check_index(other);
  if (device == other) return;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device, other), "asking whether GPUs reach each other");
  if (!can)
    throw std::invalid_argument(
        "GPU " + std::to_string(device) + " cannot reach the memory of GPU " + std::to_string(other) +
        " (neither NVLink nor PCIe peer access; nvidia-smi topo -p2p r tells which can): take GPUs of one group that "
        "do, or start a group for each");
}

Device::Device(int index) : index_(index) {
  check_index(index);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "asking what the GPU is");
  name_ = properties.name;
  capability_ = 10 * properties.major + properties.minor, processors_ = properties.multiProcessorCount;
  if (capability_ < kLeastCapability)
    throw std::invalid_argument("GPU " + std::to_string(index) + " is a " + name_ + " of compute capability " +
                                std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                                ": there are kernels for 8.0 (Ampere) and later; use compute_unit='CPU:0'");
  use();
  if (capability_ == 90) {  // others have no kernel that wants it
    sums_ = Memory(kScratchBlocks * kScratchFloats * sizeof(float), "sums of products");
    flags_ = Memory(kScratchBlocks * kScratchFlags * sizeof(int), "sums of products");
    pieces_ = Memory(kScratchPieces * sizeof(float), "sums of products");
    arrivals_ = Memory(kScratchCounts * sizeof(int), "sums of products");
    scratch_ = {sums_.as<float>(), flags_.as<int>(), pieces_.as<float>(), arrivals_.as<int>()};
  }
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

Device::~Device() {
  if (cudaSetDevice(index_) == cudaSuccess) cudaStreamDestroy(stream_);
}

size_t Device::free_bytes() const {
  use();
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free memory");
  return free;
}

Memory::Memory(size_t bytes, const char* purpose, Where where) : bytes_(bytes), where_(where) {
  if (!bytes) return;
  const cudaError_t result = where == Where::device ? cudaMalloc(&data_, bytes) : cudaMallocHost(&data_, bytes);
  if (result != cudaSuccess) {
    cudaGetLastError();  // it is told here
    size_t free = 0, total = 0;
    std::string text = "cannot allocate " + mib(bytes) +
                       (where == Where::device ? " of the GPU's memory" : " of pinned memory") + " for " + purpose +
                       ": ";
    if (where == Where::device && result == cudaErrorMemoryAllocation && cudaMemGetInfo(&free, &total) == cudaSuccess)
      text += mib(free) + " of " + mib(total) + " are free";
    else text += cudaGetErrorString(result);
    throw std::runtime_error(text);
  }
  if (where == Where::host) std::memset(data_, 0, bytes);
  else check(cudaMemset(data_, 0, bytes), "clearing memory"), check(cudaStreamSynchronize(nullptr), "clearing memory");
}

Memory::~Memory() {
  if (!data_) return;
  if (where_ == Where::device) cudaFree(data_);
  else cudaFreeHost(data_);
}

}  // namespace cuda
}  // namespace as
