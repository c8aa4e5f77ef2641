// Shared device code: launches, conversions, reductions, copies to shared memory, mma.sync.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>
#include <type_traits>

#include "cuda/kernels/common/dtype16.h"
#include "cuda/kernels/common/errors.h"
#include "cuda/kernels/common/shared_limit.h"

#define AS_TEXT_OF(name) #name
#define AS_TEXT(name) AS_TEXT_OF(name)
#define AS_DTYPE16_TEXT AS_TEXT(AS_DTYPE16)  // name in PTX instructions

namespace as::cuda {
namespace AS_DTYPE16 {

// Raises a kernel's limit of dynamic shared memory, by default 48 KiB less its static shared memory.
template <typename Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
  if (bytes > 32 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

// Throws DeviceLost or std::runtime_error if the previous launch, of this kernel, failed.
inline void launched(const void* kernel) {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw_error(error, "launching " + kernel_name(kernel));
}

// Launches a kernel. On capability 9.0 it may start while the previous kernel of the stream still runs (programmatic
// dependent launch). Every kernel calls after_previous() before it touches memory that others write, so all kernels are
// ordered. Other chips run code compiled for 8.0, which never waits. own: null, or one more attribute. Throws if the
// launch fails.
template <typename... Parameters, typename... Arguments>
void start_with(const Queue& queue, const cudaLaunchAttribute* own, void (*kernel)(Parameters...), dim3 grid,
                int threads, size_t shared, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = !queue.no_pdl;
  if (own) attributes[1] = *own;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
  config.stream = queue.stream, config.attrs = attributes;
  config.numAttrs = queue.capability != 90 ? 0 : own ? 2 : 1;
  allow_shared(kernel, shared);
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  launched(reinterpret_cast<const void*>(kernel));
}
template <typename... Parameters, typename... Arguments>
void start(const Queue& queue, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
           const Arguments&... arguments) {
  start_with(queue, nullptr, kernel, grid, threads, shared, arguments...);
}
template <typename... Parameters, typename... Arguments>
void start_clusters(const Queue& queue, void (*kernel)(Parameters...), dim3 grid, dim3 cluster, int threads,
                    size_t shared, const Arguments&... arguments) {
  cudaLaunchAttribute own;
  own.id = cudaLaunchAttributeClusterDimension;
  own.val.clusterDim.x = cluster.x, own.val.clusterDim.y = cluster.y, own.val.clusterDim.z = cluster.z;
  const bool alone = cluster.x * cluster.y * cluster.z == 1;
  start_with(queue, alone ? nullptr : &own, kernel, grid, threads, shared, arguments...);
}

// Marks memory that a kernel reads once, such as the weights of a GEMM of few rows, to be evicted from the L2 cache
// first. So activations that small kernels have written are still cached when they are read.
struct ReadOnce {
  const void* data;
  size_t bytes;
};
template <typename... Parameters, typename... Arguments>
void start_reading(const Queue& queue, const ReadOnce& once, void (*kernel)(Parameters...), dim3 grid, int threads,
                   size_t shared, const Arguments&... arguments) {
  int device = 0, most = 0;  // bytes that a launch can mark
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxAccessPolicyWindowSize, device);
  cudaLaunchAttribute own;
  own.id = cudaLaunchAttributeAccessPolicyWindow;
  auto& window = own.val.accessPolicyWindow;
  window.base_ptr = const_cast<void*>(once.data), window.num_bytes = once.bytes < (size_t)most ? once.bytes : most;
  window.hitRatio = 1, window.hitProp = window.missProp = cudaAccessPropertyStreaming;
  start_with(queue, most > 0 ? &own : nullptr, kernel, grid, threads, shared, arguments...);
}

// let_next_begin() allows the next kernel of the stream to start. await_previous() waits until the previous one has
// ended.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void after_previous() { let_next_begin(), await_previous(); }

// SMs of the current device.
inline int sm_count() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

inline int ceil_div(size_t n, int by) { return (int)((n + by - 1) / by); }

// Conversions to and from 16 bits; a pair has its first value in the low half. Values too large for float16 become its
// maximum; NaN stays NaN.
__device__ inline uint16_t to_dtype16(float x) {
  if constexpr (kDType16 == DType16::bf16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  } else {
    uint16_t rounded;
    asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
  }
}
__device__ inline float from_dtype16(uint16_t x) {
  if constexpr (kDType16 == DType16::bf16) return __uint_as_float((uint32_t)x << 16);
  else return __half2float(__ushort_as_half(x));
}
__device__ inline uint32_t to_dtype16x2(float low, float high) {
  uint32_t both;
  if constexpr (kDType16 == DType16::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// A checkpoint's value: float, __half or __nv_bfloat16.
template <typename T>
__device__ float widened(T x) {
  if constexpr (sizeof(T) == 4) return x;
  else if constexpr (std::is_same_v<T, __half>) return __half2float(x);
  else return __bfloat162float(x);
}
__device__ inline float low_of(uint32_t pair) { return from_dtype16((uint16_t)pair); }
__device__ inline float high_of(uint32_t pair) {
  return kDType16 == DType16::bf16 ? __uint_as_float(pair & 0xffff0000u) : from_dtype16((uint16_t)(pair >> 16));
}

// Sum over a warp's lanes, with the same bits in all lanes: pairs at growing distance.
__device__ inline float warp_sum(float x) {
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Sum over a CTA of at most kMost threads, the same in all: over each warp's lanes, then over warps in ascending order.
template <int kMost>
__device__ inline float block_sum(float x, unsigned threads) {
  __shared__ float sums[kMost / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (unsigned i = 0; i < threads / 32; i++) total += sums[i];
  return total;
}

__device__ inline float warp_max(float x) {
  for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ inline void store_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// Copies 16 bytes from global memory asynchronously: the first `bytes` and zeros behind them, all of them or zeros.
__device__ inline void copy_up_to_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copy_16(uint32_t to, const void* from, bool there = true) {
  copy_up_to_16(to, from, there ? 16 : 0);
}
// The same of 4 bytes.
__device__ inline void copy_4(uint32_t to, const void* from, bool there) {
  const int bytes = there ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ inline void store_16(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Loads from shared memory.
__device__ inline uint4 load_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ inline float load_float(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ inline float4 load_floats(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ inline uint32_t load_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ inline uint2 load_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// Loads four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_cores(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_cores_transposed(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// d [16, 8] += a [16, 16] b [8, 16]^T
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." AS_DTYPE16_TEXT "." AS_DTYPE16_TEXT
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Writes to the memory of another GPU, which polls for the values (sum_ranks.cu).
__device__ inline void push(uint16_t* to, uint16_t value) {
  asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory");
}
__device__ inline void push(uint16_t* to, const uint2& values) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(values.x), "r"(values.y) : "memory");
}
__device__ inline void push(uint16_t* to, const uint4& values) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(values.y),
               "r"(values.z), "r"(values.w)
               : "memory");
}

// Stores an output value to tiles, float32 rows or both. kPushes: also to another GPU if out.copy is set.
template <bool kPushes = false>
__device__ inline void put(const Rows& out, int row, int column, float value) {
  if (out.tiles) {
    const size_t at = tile_offset(row, column, blocks_of(out.width));
    out.tiles[at] = to_dtype16(value);
    if (kPushes && out.copy) push(out.copy + at, to_dtype16(value));
  }
  if (out.values) out.values[(size_t)row * out.width + column] = value;
}

// Reads four values of a row; those from `width` on are zero.
__device__ inline float4 read_four(const float* row, int column, int width) {
  if (width % 4 == 0) return *reinterpret_cast<const float4*>(row + column);
  return make_float4(row[column], column + 1 < width ? row[column + 1] : 0, column + 2 < width ? row[column + 2] : 0,
                     column + 3 < width ? row[column + 3] : 0);
}
__device__ inline float4 sum_of(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
// Stores four values, except those from `width` on; by one instruction if aligned.
template <bool kPushes = false>
__device__ inline void put_four(const Rows& out, int row, int column, int width, const float4& x) {
  const float values[4] = {x.x, x.y, x.z, x.w};
  if (column + 4 > width || (!out.tiles && out.width % 4)) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (column + i < width) put<kPushes>(out, row, column + i, values[i]);
  } else if (out.tiles) {
    const size_t at = tile_offset(row, column, blocks_of(out.width));
    const uint2 four = make_uint2(to_dtype16x2(x.x, x.y), to_dtype16x2(x.z, x.w));
    *reinterpret_cast<uint2*>(out.tiles + at) = four;
    if (kPushes && out.copy) push(out.copy + at, four);
  } else {
    *reinterpret_cast<float4*>(out.values + (size_t)row * out.width + column) = x;
  }
}
// silu(gate) * up in six instructions; the error is a few units in the last place, less than that of 16-bit rounding.
__device__ inline float silu_times(float gate, float up) {
  float power, share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269504088896341f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
  return gate * share * up;
}

// Gating as in types.h; NaN is propagated.
__device__ inline float gated_by(const Gating& g, float gate, float up) {
  gate = gate > g.limit ? g.limit : gate, up = up > g.limit ? g.limit : up < -g.limit ? -g.limit : up;
  return __fdividef(gate, 1.0f + __expf(-g.alpha * gate)) * (up + g.shift);
}

// Reads eight values of a row, the first a multiple of eight; those from `width` on are zero. Vectorized if aligned.
__device__ inline void read_eight(const float* row, int column, int width, float (&values)[8]) {
  if (width % 4 == 0 && column + 8 <= width) {
    const float4* from = reinterpret_cast<const float4*>(row + column);
    const float4 low = from[0], high = from[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) values[j] = column + j < width ? row[column + j] : 0.0f;
  }
}
__device__ inline void put_eight(const Rows& out, int row, int column, int width, const float (&values)[8]) {
  if (column >= width) return;
  if (out.tiles) {  // a chunk of a block; columns from `width` on are padding, which is zero
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      pairs[j] =
          to_dtype16x2(column + 2 * j < width ? values[2 * j] : 0, column + 2 * j + 1 < width ? values[2 * j + 1] : 0);
    *reinterpret_cast<uint4*>(out.tiles + tile_offset(row, column, blocks_of(out.width))) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  if (!out.values) return;
  if (out.width % 4 == 0 && column + 8 <= width) {
    float4* to = reinterpret_cast<float4*>(out.values + (size_t)row * out.width + column);
    to[0] = make_float4(values[0], values[1], values[2], values[3]);
    to[1] = make_float4(values[4], values[5], values[6], values[7]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (column + j < width) out.values[(size_t)row * out.width + column + j] = values[j];
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
