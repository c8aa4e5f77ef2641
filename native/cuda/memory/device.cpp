#include "cuda/memory/device.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "cuda/kernels/common/shared_limit.h"
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {
namespace {

constexpr int kLeastCapability = 80;

std::string version_of(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

std::string mib(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // resets the error, which is reported here
  if (result == cudaErrorNoKernelImageForDevice)
    throw std::runtime_error(
        "this build of the CUDA backend has kernels for compute capability " AS_CUDA_CHIPS
        " alone, and the GPU is another one: build it on this machine, or with ALLSPARK_CUDA_CHIPS=all");
  throw_error(result, what);
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
  if (loses_device(result)) throw_error(result, "counting GPUs");
  if (result != cudaSuccess)
    throw std::invalid_argument(std::string("the NVIDIA driver does not answer: ") + cudaGetErrorString(result));
  return count;
}

void check_index(int index) {
  const int count = device_count();
  if (index < 0 || index >= count)
    throw std::invalid_argument("there is no GPU " + std::to_string(index) + ": compute_unit may name 0 to " +
                                std::to_string(count - 1));
}

bool may_reach_peers() {
  const char* wanted = std::getenv("ALLSPARK_PEER_ACCESS");
  return !wanted || std::strcmp(wanted, "0");
}

bool reaches_peer(int device, int other) {
  check_index(device), check_index(other);
  if (!may_reach_peers()) return false;
  if (device == other) return true;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device, other), "asking whether GPUs reach each other");
  return can;
}

// The place for waits that fail (errors.h). It is never freed, as an error may be read when all else has gone.
static int* report() {
  static const Memory* const place = new Memory(sizeof(int), "a report", Memory::Where::host);
  given_up = place->as<int>();
  return place->as<int>();
}

Device::Device(int index, const ChipCosts& costs) : index_(index), costs_(costs) {
  check_index(index);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "asking what the GPU is");
  name_ = properties.name;
  capability_ = 10 * properties.major + properties.minor, sm_count_ = properties.multiProcessorCount;
  // Tests run the kernels of older chips.
  if (const char* pretended = std::getenv("ALLSPARK_TEST_CAPABILITY"))
    capability_ = std::min(capability_, std::atoi(pretended));
  if (capability_ < kLeastCapability)
    throw std::invalid_argument("GPU " + std::to_string(index) + " is a " + name_ + " of compute capability " +
                                std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                                ": there are kernels for 8.0 (Ampere) and later; use compute_unit='CPU:0'");
  use();
  if (capability_ == 90) {  // only Hopper's kernels use it
    sums_ = Memory(kScratchCtas * kScratchFloats * sizeof(float), "sums of products");
    flags_ = Memory(kScratchCtas * kScratchFlags * sizeof(int), "sums of products");
    k_parts_ = Memory(kScratchParts * sizeof(float), "sums of products");
    arrivals_ = Memory(kScratchCounts * sizeof(int), "sums of products");
    scratch_ = {sums_.as<float>(), flags_.as<int>(), k_parts_.as<float>(), arrivals_.as<int>()};
  }
  scratch_.given_up = report();
  for (cudaStream_t* stream : {&stream_, &side_})
    check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream");
  for (cudaEvent_t* event : {&forked_, &joined_})
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
}

Device::~Device() {
  if (cudaSetDevice(index_) != cudaSuccess) return;
  for (cudaEvent_t event : {forked_, joined_}) cudaEventDestroy(event);
  for (cudaStream_t stream : {stream_, side_}) cudaStreamDestroy(stream);
}

void Device::fork() const {
  check(cudaEventRecord(forked_, stream_), "beginning launches beside others");
  check(cudaStreamWaitEvent(side_, forked_), "beginning launches beside others");
}

void Device::join() const {
  check(cudaEventRecord(joined_, side_), "waiting for launches beside others");
  check(cudaStreamWaitEvent(stream_, joined_), "waiting for launches beside others");
}

Chip Device::chip(DType16 dtype) const {
  use();
  return {capability_, sm_count_, max_shared(), capability_ == 90 ? prefill_clusters(dtype) : 0, costs_};
}

size_t Device::free_bytes() const {
  use();
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free memory");
  return free;
}

// The driver's functions that map and unmap physical pages at a reserved address.
namespace {

constexpr size_t kLeastLent = 1 << 20;  // bytes: smaller allocations share pages and cannot be given back

struct Pages {
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;

  Pages() {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    const auto find = [&](auto& function, const char* name) {
      function = driver ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(driver, name)) : nullptr;
      there = there && function;
    };
    find(granularity, "cuMemGetAllocationGranularity"), find(reserve, "cuMemAddressReserve");
    find(free, "cuMemAddressFree"), find(create, "cuMemCreate"), find(release, "cuMemRelease");
    find(map, "cuMemMap"), find(unmap, "cuMemUnmap"), find(set_access, "cuMemSetAccess");
  }
  bool there = true;
};

const Pages& pages() {
  static const Pages found;
  return found;
}

CUmemAllocationProp pages_of(int device) {
  CUmemAllocationProp wanted = {};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE, wanted.location.id = device;
  return wanted;
}

// Driver and runtime use the same error numbers.
cudaError_t error_of(CUresult result) { return static_cast<cudaError_t>(result); }
static_assert((int)CUDA_ERROR_OUT_OF_MEMORY == cudaErrorMemoryAllocation &&
              (int)CUDA_ERROR_NOT_SUPPORTED == cudaErrorNotSupported);

CUdeviceptr address_of(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

void Memory::fail(cudaError_t result) const {
  cudaGetLastError();  // reported here
  if (loses_device(result)) throw_error(result, std::string("allocating memory for ") + purpose_);
  size_t free = 0, total = 0;
  std::string text = "cannot allocate " + mib(bytes_) +
                     (where_ == Where::host ? " of pinned memory" : " of the GPU's memory") + " for " + purpose_ + ": ";
  if (where_ != Where::host && result == cudaErrorMemoryAllocation && cudaMemGetInfo(&free, &total) == cudaSuccess)
    text += mib(free) + " of " + mib(total) + " are free";
  else text += cudaGetErrorString(result);
  throw std::runtime_error(text);
}

Memory::Memory(size_t bytes, const char* purpose, Where where) : bytes_(bytes), where_(where), purpose_(purpose) {
  if (!bytes) return;
  if (where == Where::lent && (bytes < kLeastLent || !pages().there)) where_ = Where::device;
  size_t page = 0;
  if (where_ == Where::lent) {
    check(cudaGetDevice(&device_), "asking for the GPU in use");
    const CUmemAllocationProp wanted = pages_of(device_);
    const cudaError_t result = error_of(pages().granularity(&page, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    if (result == cudaErrorNotSupported) where_ = Where::device;  // some virtual GPUs: the memory cannot be given back
    else if (result != cudaSuccess) fail(result);
  }
  if (where_ == Where::lent) {
    pages_ = (bytes + page - 1) / page * page;
    CUdeviceptr address = 0;
    if (const cudaError_t result = error_of(pages().reserve(&address, pages_, 0, 0, 0)); result != cudaSuccess)
      fail(result);
    data_ = reinterpret_cast<void*>(address);
    try {
      take_again();
    } catch (...) {  // no destructor runs
      pages().free(address, pages_);
      throw;
    }
  } else if (const cudaError_t result =
                 where_ == Where::device ? cudaMalloc(&data_, bytes) : cudaMallocHost(&data_, bytes);
             result != cudaSuccess) {
    fail(result);
  }
  if (where_ == Where::host) {
    std::memset(data_, 0, bytes);
    return;
  }
  try {
    check(cudaMemset(data_, 0, bytes), "clearing memory"), check(cudaStreamSynchronize(nullptr), "clearing memory");
  } catch (...) {  // no destructor runs
    release();
    throw;
  }
}

void Memory::give_back() {
  if (!lent() || !there_) return;
  pages().unmap(address_of(data_), pages_), pages().release(handle_);
  there_ = false;
}

void Memory::take_again() {
  if (!lent() || there_) return;
  const CUmemAllocationProp wanted = pages_of(device_);
  if (const cudaError_t result = error_of(pages().create(&handle_, pages_, &wanted, 0)); result != cudaSuccess)
    fail(result);
  CUmemAccessDesc access = {};
  access.location = wanted.location, access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  cudaError_t result = error_of(pages().map(address_of(data_), pages_, 0, handle_, 0));
  if (result == cudaSuccess) {
    if ((result = error_of(pages().set_access(address_of(data_), pages_, &access, 1))) == cudaSuccess) {
      there_ = true;
      return;
    }
    pages().unmap(address_of(data_), pages_);
  }
  pages().release(handle_);
  fail(result);
}

Memory::~Memory() { release(); }

void Memory::release() {
  if (!data_) return;
  if (where_ == Where::lent) give_back(), pages().free(address_of(data_), pages_);
  else if (where_ == Where::device) cudaFree(data_);
  else cudaFreeHost(data_);
}

}  // namespace as::cuda
