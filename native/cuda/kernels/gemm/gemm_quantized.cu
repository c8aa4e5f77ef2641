// GEMMs of quantized weights with bfloat16 activations. Kernels round weights to bfloat16 when they use them. The sums
// are those of gemm_dtype16() with the rounded matrix, bit for bit, so any kernel may serve. Few rows: kernels
// dequantize weights in registers, here by mma.sync (gemm_mma.cuh). Many rows: the matrix is dequantized into
// tiles for gemm_dtype16(), some of its rows at a time.
#include "cuda/kernels/by_dtype16.h"
#include "cuda/kernels/gemm/gemm_mma.cuh"
#include "cuda/kernels/gemm/gemm_quantized.h"
#include "cuda/kernels/gemm/gemv_plan.h"

namespace as::cuda {
namespace {

constexpr int kMostShared = 108 << 10;  // two CTAs fit an SM of Hopper or the A100

template <typename Type, int kTiles, int kColumnTiles>
void start_tiles(const GemmArgs& p, int rows, const Queue& queue) {
  constexpr bool kSmall = Type::kBits == 4;
  constexpr int kStages = kTiles == 1 ? (kSmall ? 9 : 7) : kTiles == 2 ? (kSmall ? 5 : 4) : 3;
  start_gemm_mma<MmaShape<Type, false, kTiles, kColumnTiles, kStages, kMostShared>>(p, rows, queue);
}

// A warp dequantizes 16 rows of one block of columns. It goes through shared memory to write whole cache lines.
template <int kBits, Codes kCodes>
__global__ void __launch_bounds__(128) widen_kernel(Quants quants, int k, int first_block, uint16_t* to) {
  after_previous();
  __shared__ __align__(16) char shared[4][kTileRows * kRowBytes];
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32, blocks = blocks_of(k);
  const int row_block = first_block + blockIdx.y, block = blockIdx.x, there = k - block * kBlock;
  using Lane = LaneQuants<kBits, kCodes>;
  Lane own;
#pragma unroll
  for (int i = 0; i < Lane::kLoads; i++)
    own.loaded[i] =
        reinterpret_cast<const uint4*>(quants.words + ((size_t)row_block * blocks + block) *
                                                          quant_words(kBits))[(tile * Lane::kLoads + i) * 32 + lane];
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const int group = min(block * kBlock + step * 16, k - 1) / quants.group;
    const uint32_t* scales =
        quants.scales + ((size_t)row_block * quants.groups + group) * kScaleWords + tile * kTileRows + lane / 4 * 2;
    Affine rows[2];
    rows[0].set(scales[0]), rows[1].set(scales[1]);
    uint32_t a[4];
    own.fragment(step, rows, a);
    if (there < kBlock) cut_fragment(a, there - step * 16);
#pragma unroll
    for (int i = 0; i < 4; i++)
      *reinterpret_cast<uint32_t*>(shared[tile] + chunk_offset(lane / 4 + i % 2 * 8, step * 2 + i / 2) + lane % 4 * 4) =
          a[i];
  }
  __syncwarp();
  uint4* out =
      reinterpret_cast<uint4*>(to + ((size_t)blockIdx.y * blocks + block) * kBlockValues + tile * kTileRows * kBlock);
#pragma unroll
  for (int i = 0; i < kTileRows * kRowBytes / 512; i++)
    out[i * 32 + lane] = reinterpret_cast<const uint4*>(shared[tile])[i * 32 + lane];
}

void widen(const Matrix& w, int first_block, int row_blocks, uint16_t* to, const Queue& queue) {
  const Codes codes = w.quants.codes;
  const auto kernel = codes == Codes::mxfp4   ? widen_kernel<4, Codes::mxfp4>
                      : codes == Codes::nvfp4 ? widen_kernel<4, Codes::nvfp4>
                      : codes == Codes::nf4   ? widen_kernel<4, Codes::nf4>
                      : w.quants.bits == 4    ? widen_kernel<4, Codes::integers>
                                              : widen_kernel<8, Codes::integers>;
  start(queue, kernel, dim3(blocks_of(w.k), row_blocks), 128, 0, w.quants, w.k, first_block, to);
}

constexpr int kTogether = 4;                 // blocks of rows; a part of a matrix has whole tiles of gemm_prefill()
constexpr size_t kWidenedBytes = 256 << 20;  // approximate size of a part

// Rows of a part of a matrix. A gated product needs all rows in one call.
int part_rows(int n, int k, bool gated) {
  const size_t row_bytes = (size_t)blocks_of(k) * kRowBytes;
  if (gated || row_bytes * n <= kWidenedBytes) return n;
  return std::max<int>(1, (int)(kWidenedBytes / row_bytes / (kTogether * kBlock))) * kTogether * kBlock;
}

void gemm_widened(const GemmArgs& p, int rows, const Queue& queue) {
  const int part = part_rows(p.w.n, p.w.k, p.gated);
  Queue no_pdl = queue;
  no_pdl.no_pdl = true;
  for (int first = 0; first < p.w.n; first += part) {
    const int n = std::min(part, p.w.n - first);
    GemmArgs some = p;
    widen(p.w, first / kBlock, blocks_of(n), p.widened, queue);
    some.w = {n, p.w.k, Kind::dtype16, DType16::bf16, nullptr, p.widened};
    some.w.max_split_k = p.w.max_split_k;
    if (first) {  // a multiple of a block of columns
      if (p.y.values) some.y.values += first;
      if (p.y.tiles) some.y.tiles += (size_t)first / kBlock * kBlockValues;
      if (p.bias) some.bias += first;
    }
    bf16::gemm_dtype16(some, rows, no_pdl, queue.capability == 90 ? GemmAlgo::prefill : GemmAlgo::mma_prefill);
  }
}

}  // namespace

void widen_quantized(const Matrix& w, uint16_t* to, const Queue& queue) { widen(w, 0, blocks_of(w.n), to, queue); }

size_t widened_bytes(int n, int k, bool gated, int rows) {
  return rows > kLeastWidened ? tiles_bytes(part_rows(n, k, gated), k) : 0;
}

void gemm_quantized_mma(const GemmArgs& p, int rows, const Queue& queue) {
  const auto start = [&](auto type) {
    using Type = decltype(type);
    // Few columns: tiles are small, so that all SMs have some.
    if (rows <= 2 && p.w.n < kManyColumns) start_tiles<Type, 1, 1>(p, rows, queue);
    else if (rows <= 8) start_tiles<Type, 1, 2>(p, rows, queue);
    else if (rows <= 16) start_tiles<Type, 2, 2>(p, rows, queue);
    else if (rows <= 32) start_tiles<Type, 4, 2>(p, rows, queue);
    else start_tiles<Type, 8, 2>(p, rows, queue);
  };
  p.w.quants.codes == Codes::integers ? by_integers(p.w.quants, start) : by_small_floats(p.w.quants, start);
}

void gemm_quantized(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::gemv) gemv_quantized(p, queue);
  else if (algo == GemmAlgo::prefill) gemm_widened(p, rows, queue);
  else if (algo != GemmAlgo::stream_k) gemm_quantized_mma(p, rows, queue);
  else if (p.w.quants.codes == Codes::integers) gemm_quantized_stream_k(p, rows, queue);
  else gemm_small_floats_stream_k(p, rows, queue);
}

}  // namespace as::cuda
