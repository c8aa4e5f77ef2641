// Products in bfloat16 by wgmma, for many rows: the bits are those of linear_bf16.cu.
//
// A block of threads has 128 columns (rows of the weights) and 128 rows of activations. One thread has blocks of both
// sides copied into shared memory, several stages ahead; two warpgroups multiply, each 64 columns with all rows. Sums
// of a piece of K (tiles.h) are added to those of the pieces before in registers.
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kColumns = 128, kRows = 128, kConsumers = 2, kStages = 6;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kStageBytes = (kColumns + kRows) / kBlock * kBlockBytes;
constexpr int kSharedBytes = kStages * kStageBytes + 1024;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

__device__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished: }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ void copy_block(char* to, const char* from, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(kBlockBytes), "r"(shared_address(barrier))
               : "memory");
}

// Of core matrices that are 128 bytes apart along K, and 1024 along the rows.
__device__ uint64_t descriptor(uint32_t address) {
  return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(kCoreBytes >> 4) << 16 |
         (uint64_t)(8 * kCoreBytes >> 4) << 32;
}

// d [64, 128] (+)= a [64, 16] b [128, 16]^T; adds 0: it begins anew.
__device__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int adds) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(adds));
}

__device__ void copy_blocks(const Product& p, int column_block, int row_block, int column_blocks, int row_blocks,
                            const Pieces& k, char* stages, Barriers& barriers) {
  const char* weights = reinterpret_cast<const char*>(p.w.tiles);
  const char* x = reinterpret_cast<const char*>(p.x.tiles);
  const int columns = min(kColumns / kBlock, column_blocks - column_block),
            rows = min(kRows / kBlock, row_blocks - row_block);
  for (int b = 0; b < k.blocks; b++) {
    const int stage = b % kStages;
    if (b >= kStages) barrier_wait(&barriers.empty[stage], (b / kStages - 1) % 2);
    char* to = stages + stage * kStageBytes;
    barrier_expect(&barriers.full[stage], (columns + rows) * kBlockBytes);
    for (int i = 0; i < columns; i++)
      copy_block(to + i * kBlockBytes, weights + ((size_t)(column_block + i) * k.blocks + b) * kBlockBytes,
                 &barriers.full[stage]);
    for (int i = 0; i < rows; i++)
      copy_block(to + (kColumns / kBlock + i) * kBlockBytes, x + ((size_t)(row_block + i) * k.blocks + b) * kBlockBytes,
                 &barriers.full[stage]);
  }
}
#endif

__global__ void __launch_bounds__(kThreads, 1)
    linear_wgmma_kernel(const __grid_constant__ Product p, int rows, Pieces k) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers barriers;
  const int column_block = blockIdx.y * (kColumns / kBlock), row_block = blockIdx.x * (kRows / kBlock);
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&barriers.full[i], 1), barrier_init(&barriers.empty[i], kConsumers);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  await_previous();
  const int group = threadIdx.x / 128;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      copy_blocks(p, column_block, row_block, blocks_of(p.w.n), blocks_of(rows), k, shared, barriers);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  float d[64], total[64];
  const uint32_t own = shared_address(shared) + (group - 1) * kBlockBytes,
                 theirs = shared_address(shared) + kColumns / kBlock * kBlockBytes;
  const bool tells = threadIdx.x % 128 == 0;
  for (int piece = 0, b = 0; piece < k.count; piece++) {
    const int first = b, end = min(b + k.length, k.blocks);
    for (; b < end; b++) {
      const int stage = b % kStages;
      barrier_wait(&barriers.full[stage], b / kStages % 2);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int step = 0; step < 4; step++) {
        const uint32_t at = stage * kStageBytes + step * 2 * kCoreBytes;
        multiply(d, descriptor(own + at), descriptor(theirs + at), step > 0 || b > first);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (b > first && tells) barrier_arrive(&barriers.empty[(b - 1) % kStages]);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (tells) barrier_arrive(&barriers.empty[(b - 1) % kStages]);
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i])::"memory");  // not read before it is there
#pragma unroll
    for (int i = 0; i < 64; i++) total[i] = piece ? __fadd_rn(total[i], d[i]) : d[i];
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first = (column_block + group - 1) * kBlock + warp * 16;  // column of this warp
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int row = row_block * kBlock + i / 4 * 8 + lane % 4 * 2 + i % 2, column = first + lane / 4 + i % 4 / 2 * 8;
    if (p.gated) {
      const int gates = first / 2 + lane / 4;
      if (i % 4 < 2 && row < rows && gates < p.y.width) finish_gated(p, row, gates, total[i], total[i + 2]);
    } else if (row < rows && column < p.w.n) {
      finish(p, row, column, total[i]);
    }
  }
#endif
}

}  // namespace

void linear_wgmma(const Product& p, int rows, const Queue& queue) {
  allow_shared(linear_wgmma_kernel, kSharedBytes);
  start(queue, linear_wgmma_kernel, dim3(ceil_div(rows, kRows), ceil_div(p.w.n, kColumns)), kThreads, kSharedBytes, p,
        rows, Pieces(p.w.k));
  launched("linear in bfloat16 by wgmma");
}

}  // namespace cuda
}  // namespace as
