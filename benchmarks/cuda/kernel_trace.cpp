// Records the kernels and copies of a process on request, for bench_served.py --timeline: the driver loads this library
// into each process that uses a GPU if CUDA_INJECTION64_PATH names it.
//   g++ -std=c++17 -O2 -shared -fPIC -I$CUDA/include -I$CUDA/extras/CUPTI/include benchmarks/cuda/kernel_trace.cpp
//       -L$CUDA/extras/CUPTI/lib64 -lcupti -o kernel_trace.so
// KERNEL_TRACE is a folder. Once its file `go` has a name that is new and a number of seconds, the library records for
// that long, and then writes NAME-PID.trace: a line for each kernel and copy, "begin end name", in nanoseconds.
#include <cupti.h>
#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

namespace {

std::mutex mutex;
FILE* out = nullptr;
constexpr size_t kBytes = 8 << 20;  // of a buffer

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(64, kBytes)), *size = kBytes, *most = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard<std::mutex> lock(mutex);
  CUpti_Activity* record = nullptr;
  while (out && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      int status = 0;
      char* name = abi::__cxa_demangle(kernel->name, nullptr, nullptr, &status);
      std::fprintf(out, "%llu %llu %s\n", (unsigned long long)kernel->start, (unsigned long long)kernel->end,
                   name ? name : kernel->name);
      std::free(name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      std::fprintf(out, "%llu %llu copy\n", (unsigned long long)copy->start, (unsigned long long)copy->end);
    }
  }
  std::free(buffer);
}

void record(bool records) {
  for (const auto kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY})
    records ? cuptiActivityEnable(kind) : cuptiActivityDisable(kind);
}

void watch(const std::string& folder) {
  std::string last;
  for (;; usleep(20000)) {
    char name[64];
    double seconds = 0;
    FILE* go = std::fopen((folder + "/go").c_str(), "r");
    if (!go) continue;
    const int found = std::fscanf(go, "%63s %lf", name, &seconds);
    std::fclose(go);
    if (found != 2 || last == name) continue;
    last = name;
    const std::string path = folder + "/" + last + "-" + std::to_string(getpid());
    {
      const std::lock_guard<std::mutex> lock(mutex);
      out = std::fopen((path + ".part").c_str(), "w");
    }
    record(true);
    usleep((useconds_t)(seconds * 1e6));
    record(false);
    cuptiActivityFlushAll(1);
    const std::lock_guard<std::mutex> lock(mutex);
    if (out) std::fclose(out);
    out = nullptr;
    std::rename((path + ".part").c_str(), (path + ".trace").c_str());
  }
}

}  // namespace

extern "C" int InitializeInjection() {
  const char* folder = std::getenv("KERNEL_TRACE");
  if (!folder) return 1;
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  record(true), record(false);  // so that the kernels of graphs made before a recording are known
  std::thread(watch, std::string(folder)).detach();
  return 1;
}
