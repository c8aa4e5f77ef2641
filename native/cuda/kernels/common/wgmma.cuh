// Hopper instructions: wgmma, bulk copies, and their barriers.
#pragma once
#include <cuda.h>

#include "cuda/kernels/common/waits.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void barriers_are_there() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_expect(uint64_t* barrier, int bytes) { barrier_expect(shared_address(barrier), bytes); }
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) { barrier_arrive(shared_address(barrier)); }
// The address of the same place in another CTA of the cluster.
__device__ inline uint32_t address_at(const void* shared, int block) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(block));
  return there;
}
// Arrives at a barrier of another CTA of the cluster. It signals the end of reads, so it needs no fence of writes.
__device__ inline void barrier_arrive_at(uint32_t there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
__device__ inline void barrier_arrive_at(uint64_t* barrier, int block) {
  barrier_arrive_at(address_at(barrier, block));
}
__device__ inline void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void barrier_wait(uint64_t* barrier, int parity) { barrier_wait(shared_address(barrier), parity); }
// Synchronizes all threads of a cluster, and makes their writes visible to one another.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_barrier() { cluster_arrive(), cluster_wait(); }
// send() writes a word to the shared memory of a CTA of the cluster and signals four bytes at that CTA's barrier;
// await_sent() waits until all expected bytes have arrived.
__device__ inline void send(const void* to, int block, uint32_t word, const uint64_t* barrier) {
  asm volatile(
      "{ .reg .b32 there, told;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 told, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [told]; }" ::"r"(shared_address(to)),
      "r"(shared_address(barrier)), "r"(block), "r"(word)
      : "memory");
}
__device__ inline void await_sent(const uint64_t* barrier) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished: }" ::"r"(shared_address(barrier))
      : "memory");
}
__device__ inline float4 read_at(uint32_t address, int block) {
  float4 v;
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(block)
      : "memory");
  return v;
}

// True in one thread of a warp. The compiler knows that it is one, and generates no loop for copies behind it.
__device__ inline bool elected() {
  int chosen;
  asm volatile(
      "{ .reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(chosen));
  return chosen;
}

__device__ inline void copy_bulk(uint32_t to, const char* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Cache policy for data that is read once in a step.
__device__ inline uint64_t evicted_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void copy_bulk(uint32_t to, const char* from, int bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// Copies a box of a tensor of four dimensions, from the beginning of the first and the third one.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int second, int fourth, uint32_t barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(0), "r"(second), "r"(fourth), "r"(barrier), "l"(policy)
      : "memory");
}
// Copies to the same place in several CTAs of the cluster, and signals their barriers.
__device__ inline void copy_bulk_to(uint32_t to, const char* from, int bytes, uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}
// This thread's copies by copy_16() arrive at a barrier once they have ended.
__device__ inline void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// wgmma reads shared memory by the async proxy, copy_16() writes it by the generic one.
__device__ inline void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A thread's warpgroup. The compiler sees that it is uniform in a warp, so it computes descriptors only once.
__device__ inline int warpgroup() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); }

// Descriptor of rows of blocks (tiles.h); address: the first of 16 columns. 128-byte swizzle, 1024 bytes from eight
// rows to the next.
__device__ inline uint64_t descriptor(uint32_t address) {
  return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | (uint64_t)(8 * kRowBytes >> 4) << 32 | 1ull << 62;
}
// Descriptor of 16 rows of adjacent blocks, for an operand whose rows are summed over; address: the first row in the
// first block.
__device__ inline uint64_t descriptor_of_columns(uint32_t address) {
  return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(kBlockBytes >> 4) << 16 |
         (uint64_t)(8 * kRowBytes >> 4) << 32 | 1ull << 62;
}
// Descriptor of rows of blocks of bytes (gemm_integer.h): 64-byte swizzle, 512 bytes from eight rows to the next.
__device__ inline uint64_t byte_descriptor(uint32_t address) {
  return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | (uint64_t)(8 * kBlock >> 4) << 32 | 2ull << 62;
}
// The descriptor of an operand `bytes` bytes further on.
__device__ inline uint64_t further(uint64_t descriptor, int bytes) {
  return descriptor & ~0ull << 32 | ((uint32_t)descriptor + (bytes >> 4));
}
constexpr int kStepBytes = 32;  // bytes from 16 columns to the next
__device__ inline void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ inline void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from reading the products' registers before this point.
template <int kValues>
__device__ inline void settle(float (&d)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kValues>
__device__ inline void settle(int (&d)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// d [64, N] (+)= a [64, K] b [N, K]^T by a warpgroup; if `keeps` is 0, d is overwritten. Number i of a thread belongs
// to row 16 * warp + lane / 4 + 8 * (i % 4 / 2) and column 8 * (i / 4) + 2 * (lane % 4) + i % 2. K is 16, of bytes 32.
//   - Both operands in shared memory: 16-bit floats; e4m3; integers, which are signed 8-bit activations and unsigned
//     quantized values, the latter as the second operand or (QuantTile) as the first; 16-bit floats with b [K, N] by
//     descriptor_of_columns() (ColumnsTile).
//   - a in registers, each warp's 16 of 64 rows in the order of mma.sync's first operand: 16-bit floats; signed
//     integers; 16-bit floats with b [K, N] by descriptor_of_columns().
template <int N>
struct Tile;
template <int N>
struct Float8Tile;
template <int N>
struct IntegerTile;
template <int N>
struct QuantTile;
template <int N>
struct RegisterTile;
template <int N>
struct ByteTile;
template <int N>
struct WeighedTile;
template <int N>
struct ColumnsTile;

// Names and operands of the sums' registers for the instruction's text. c: constraint of a sum.
#define AS_NAMES_4 "%0, %1, %2, %3"
#define AS_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define AS_NAMES_16 AS_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define AS_NAMES_24 AS_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define AS_NAMES_32 AS_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define AS_NAMES_40 AS_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define AS_NAMES_48 AS_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define AS_NAMES_56 AS_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define AS_NAMES_64 AS_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define AS_NAMES_72 AS_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define AS_NAMES_80 AS_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define AS_NAMES_88 AS_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define AS_NAMES_96 AS_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define AS_NAMES_104 AS_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define AS_NAMES_112 AS_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define AS_NAMES_120 AS_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define AS_NAMES_128 AS_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define AS_FOUR(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define AS_SUMS_4(c) AS_FOUR(c, 0)
#define AS_SUMS_8(c) AS_FOUR(c, 0), AS_FOUR(c, 4)
#define AS_SUMS_16(c) AS_SUMS_8(c), AS_FOUR(c, 8), AS_FOUR(c, 12)
#define AS_SUMS_24(c) AS_SUMS_16(c), AS_FOUR(c, 16), AS_FOUR(c, 20)
#define AS_SUMS_32(c) AS_SUMS_24(c), AS_FOUR(c, 24), AS_FOUR(c, 28)
#define AS_SUMS_40(c) AS_SUMS_32(c), AS_FOUR(c, 32), AS_FOUR(c, 36)
#define AS_SUMS_48(c) AS_SUMS_40(c), AS_FOUR(c, 40), AS_FOUR(c, 44)
#define AS_SUMS_56(c) AS_SUMS_48(c), AS_FOUR(c, 48), AS_FOUR(c, 52)
#define AS_SUMS_64(c) AS_SUMS_56(c), AS_FOUR(c, 56), AS_FOUR(c, 60)
#define AS_SUMS_72(c) AS_SUMS_64(c), AS_FOUR(c, 64), AS_FOUR(c, 68)
#define AS_SUMS_80(c) AS_SUMS_72(c), AS_FOUR(c, 72), AS_FOUR(c, 76)
#define AS_SUMS_88(c) AS_SUMS_80(c), AS_FOUR(c, 80), AS_FOUR(c, 84)
#define AS_SUMS_96(c) AS_SUMS_88(c), AS_FOUR(c, 88), AS_FOUR(c, 92)
#define AS_SUMS_104(c) AS_SUMS_96(c), AS_FOUR(c, 96), AS_FOUR(c, 100)
#define AS_SUMS_112(c) AS_SUMS_104(c), AS_FOUR(c, 104), AS_FOUR(c, 108)
#define AS_SUMS_120(c) AS_SUMS_112(c), AS_FOUR(c, 112), AS_FOUR(c, 116)
#define AS_SUMS_128(c) AS_SUMS_120(c), AS_FOUR(c, 120), AS_FOUR(c, 124)
#define AS_MULTIPLY(n, types, count, left, b, adds, tail)                                                            \
  "{ .reg .pred p;\nsetp.ne.b32 p, %" #adds ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types " {" AS_NAMES_##count \
      "}, " left ", %" #b ", p" tail "; }"
// a0 to adds: the operands' numbers, which follow the `count` sums.
#define AS_TILE(tile, sum, c, types, tail, n, count, a, b, adds)                                 \
  template <>                                                                                    \
  struct tile<n> {                                                                               \
    static __device__ void multiply(sum (&d)[count], uint64_t left, uint64_t right, int keeps) { \
      asm volatile(AS_MULTIPLY(n, types, count, "%" #a, b, adds, tail)                           \
                   : AS_SUMS_##count(c)                                                          \
                   : "l"(left), "l"(right), "r"(keeps));                                         \
    }                                                                                            \
  };
#define AS_REGISTER_TILE(tile, sum, c, types, tail, n, count, a0, a1, a2, a3, b, adds)                       \
  template <>                                                                                                \
  struct tile<n> {                                                                                           \
    static __device__ void multiply(sum (&d)[count], const uint32_t (&left)[4], uint64_t right, int keeps) { \
      asm volatile(AS_MULTIPLY(n, types, count, "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}", b, adds, tail)   \
                   : AS_SUMS_##count(c)                                                                      \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(keeps));        \
    }                                                                                                        \
  };
#define AS_FLOATS "k16.f32." AS_DTYPE16_TEXT "." AS_DTYPE16_TEXT
#define AS_TILES(n, count, i0, i1, i2, i3, i4, i5)                                                      \
  AS_TILE(Tile, float, "+f", AS_FLOATS, ", 1, 1, 0, 0", n, count, i0, i1, i2)                           \
  AS_TILE(ColumnsTile, float, "+f", AS_FLOATS, ", 1, 1, 0, 1", n, count, i0, i1, i2)                    \
  AS_TILE(Float8Tile, float, "+f", "k32.f32.e4m3.e4m3", ", 1, 1", n, count, i0, i1, i2)                 \
  AS_TILE(IntegerTile, int, "+r", "k32.s32.s8.u8", "", n, count, i0, i1, i2)                            \
  AS_TILE(QuantTile, int, "+r", "k32.s32.u8.s8", "", n, count, i0, i1, i2)                              \
  AS_REGISTER_TILE(RegisterTile, float, "+f", AS_FLOATS, ", 1, 1, 0", n, count, i0, i1, i2, i3, i4, i5) \
  AS_REGISTER_TILE(ByteTile, int, "+r", "k32.s32.s8.s8", "", n, count, i0, i1, i2, i3, i4, i5)          \
  AS_REGISTER_TILE(WeighedTile, float, "+f", AS_FLOATS, ", 1, 1, 1", n, count, i0, i1, i2, i3, i4, i5)
AS_TILES(8, 4, 4, 5, 6, 7, 8, 9)
AS_TILES(16, 8, 8, 9, 10, 11, 12, 13)
AS_TILES(32, 16, 16, 17, 18, 19, 20, 21)
AS_TILES(48, 24, 24, 25, 26, 27, 28, 29)
AS_TILES(64, 32, 32, 33, 34, 35, 36, 37)
AS_TILES(80, 40, 40, 41, 42, 43, 44, 45)
AS_TILES(96, 48, 48, 49, 50, 51, 52, 53)
AS_TILES(112, 56, 56, 57, 58, 59, 60, 61)
AS_TILES(128, 64, 64, 65, 66, 67, 68, 69)
AS_TILES(144, 72, 72, 73, 74, 75, 76, 77)
AS_TILES(160, 80, 80, 81, 82, 83, 84, 85)
AS_TILES(176, 88, 88, 89, 90, 91, 92, 93)
AS_TILES(192, 96, 96, 97, 98, 99, 100, 101)
AS_TILES(208, 104, 104, 105, 106, 107, 108, 109)
AS_TILES(224, 112, 112, 113, 114, 115, 116, 117)
AS_TILES(240, 120, 120, 121, 122, 123, 124, 125)
AS_TILES(256, 128, 128, 129, 130, 131, 132, 133)

// The next stage of a pipeline, and the parity of its barriers, which changes with each pass over all stages.
template <int kStages>
struct Pipeline {
  int stage = 0, parity = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The same with a number of stages chosen at launch.
struct DynamicPipeline {
  int count, stage = 0, parity = 0;

  __device__ explicit DynamicPipeline(int count) : count(count) {}
  __device__ void next() {
    if (++stage == count) stage = 0, parity ^= 1;
  }
};

// Returns x as a new value to the compiler, so that values derived from it are not kept in registers during products.
template <typename Number>
__device__ inline Number afresh(Number x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Loads four values, or zeros. The compiler does not move the load.
__device__ inline float4 read_if(const float* from, bool there) {
  float4 v;
  asm volatile(
      "{ .reg .pred there;\n"
      "setp.ne.b32 there, %5, 0;\n"
      "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n"
      "@there ld.global.v4.f32 {%0, %1, %2, %3}, [%4]; }"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "l"(from), "r"((int)there));
  return v;
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
