// Errors of the CUDA runtime as exceptions.
#pragma once
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace as::cuda {

// After this error every call to the GPU fails, until the process is started anew.
struct DeviceLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Kernels whose CTAs wait for other CTAs of their launch (waits.cuh).
enum class Waiter { none, attend_decode, gemm_prefill, gemm_8bit_prefill, gemm_stream_k, gemm_quantized_stream_k };
inline const char* name_of(Waiter waiter) {
  constexpr const char* kNames[] = {"none",          "attend_decode",          "gemm_prefill", "gemm_8bit_prefill",
                                    "gemm_stream_k", "gemm_quantized_stream_k"};
  return kNames[(int)waiter];
}
// In host memory, where kernels write it: the Waiter that has given up, or 0. Null if this process has used no GPU.
inline const volatile int* given_up = nullptr;

// Whether an error ends the use of the GPU by this process. By number, because older toolkits lack some of the names.
inline bool loses_device(cudaError_t error) {
  // Of the hardware: ECC, NVLink, contained. Of a kernel: address, time, context, assertion, stack, instruction,
  // alignment, address space, program counter, any other, tensor memory. Ended by MPS. Of an external device.
  for (int lost : {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
    if ((int)error == lost) return true;
  return false;
}

// Throws DeviceLost or std::runtime_error. what: failed.
[[noreturn]] inline void throw_error(cudaError_t error, const std::string& what) {
  std::string text = "CUDA: " + what + ": " + cudaGetErrorString(error);
  if (!loses_device(error)) throw std::runtime_error(text);
  if (given_up && *given_up)
    text +=
        std::string("; ") + name_of((Waiter)*given_up) +
        " waited half a minute for a CTA of its own launch that did not run (another process may keep a part of the "
        "GPU busy)";
  throw DeviceLost(text + "; this process can no longer use its GPUs and must be started anew");
}

// A kernel's function as C++ writes it.
inline std::string kernel_name(const void* kernel) {
#if CUDART_VERSION >= 12030
  if (const char* symbol = nullptr; cudaFuncGetName(&symbol, kernel) == cudaSuccess) {
    char* readable = abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr);
    const std::string name = readable ? readable : symbol;
    std::free(readable);
    return name;
  }
#endif
  return "a kernel";
}

}  // namespace as::cuda
