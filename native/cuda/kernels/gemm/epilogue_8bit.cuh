// Epilogue of tiles of 8-bit GEMMs: loads scales and biases, and turns sums into results, for floats (gemm_float8.h)
// and for integers with one group (gemm_integer.h).
//
// S describes a tile's shape and shared memory. kColumns: columns of the tile. kFloats: e4m3 rather than integers.
// kScaled: sums have been scaled already, group by group. kEndWords: words of a warpgroup's tile for scales and biases
// (unless gated) of its columns, scales of its rows, and for integers the rows' sums for each split-K part. kTotals:
// sums of split-K parts of a thread, kKept of them in registers. kWorkers: threads that multiply.
#pragma once
#include <type_traits>
#include <utility>

#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/gemm/epilogue_rows.cuh"
#include "cuda/kernels/gemm/gemm_integer.h"

namespace as::cuda {
namespace AS_DTYPE16 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Synchronizes a warpgroup by its own named barrier.
__device__ inline void warps_meet(int group) { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); }

// Starts to copy what a warpgroup's epilogue reads (kEndWords) to shared memory. k: the split-K parts, of which this
// warpgroup computes those from block first_block of K on.
template <typename S>
__device__ void ask_for_end(const GemmArgs& p, int rows, int first_row, int first_column, const SplitK& k,
                            int first_block, uint32_t to) {
  for (int word = threadIdx.x % 128 * 4; word < S::kEndWords; word += 4 * 128) {
    const int of_bias = word - S::kColumns, of_row = of_bias - S::kColumns;
    const void* from = p.w.quants.scales + scale_of(first_column, 0, 1) + word;
    bool there = first_column + word < blocks_of(p.w.n) * kBlock;
    if (of_row >= 0) {
      const int row = first_row + of_row % kBlock, last = min(first_block + of_row / kBlock * k.length, k.blocks) - 1;
      there = true;
      if (of_row < kBlock) from = p.bytes.scales + row;
      else from = p.bytes.sums + (size_t)last * (blocks_of(rows) * kBlock) + row;
    } else if (of_bias >= 0) {
      there = p.bias && !p.gated && first_column + of_bias < p.w.n;
      from = there ? p.bias + first_column + of_bias : nullptr;
    }
    copy_16(to + word * 4, from, there);
  }
}
__device__ inline void await_end(int group) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  warps_meet(group);
}

// The scales of a thread's four of 16 columns from `column` of a tile on, in the order of its sums of a row: columns 2
// q, 2 q + 1, 8 + 2 q, 9 + 2 q (q: lane % 4). end: address of the data that ask_for_end() copies.
__device__ inline void read_scales(uint32_t end, int column, uint32_t (&scales)[4]) {
  const uint4 four = load_16(end + (column + threadIdx.x % 4 * 4) * 4);
  scales[0] = four.x, scales[1] = four.z, scales[2] = four.y, scales[3] = four.w;
}
// Reads the values of a thread's two rows from row array number `place`; the row arrays follow the arrays of columns.
template <typename S>
__device__ void read_of_rows(uint32_t end, int place, float (&of_rows)[2]) {
  const int thread = afresh(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4;
  const uint32_t at = end + (2 * S::kColumns + place * kBlock + row) * 4;
#pragma unroll
  for (int h = 0; h < 2; h++) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(of_rows[h]) : "r"(at + h * 32));
}

// Converts a thread's integer sums d of 16 columns to floats. of_rows: sums of its rows of activations.
__device__ inline void sums_of_integers(uint32_t end, int column, const int* d, const float (&of_rows)[2],
                                        float (&sums)[8]) {
  uint32_t scales[4];
  read_scales(end, column, scales);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float of_row = of_rows[j % 4 / 2];
    float total = 0;
    add_segment(total, scales[j / 4 * 2 + j % 2], d[j] - 128 * (int)of_row, of_row);
    sums[j] = total;
  }
}

// A thread's sums over the split-K parts so far: the first kKept in registers, the others in shared memory.
template <typename S>
class Totals {
 public:
  static constexpr int kCount = S::kTotals;

  __device__ explicit Totals(uint32_t shared) : shared_(shared) {}
  __device__ void set(int i, float x) {
    if (i < S::kKept) kept_[i] = x;
    else asm volatile("st.shared.f32 [%0], %1;" ::"r"(place(i)), "f"(x) : "memory");
  }
  __device__ float get(int i) const {
    float x = 0;
    if (i < S::kKept) x = kept_[i];
    else asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(place(i)) : "memory");
    return x;
  }
  __device__ float operator[](int i) const { return get(i); }
  __device__ void add(int i, float x) { set(i, __fadd_rn(get(i), x)); }

 private:
  __device__ uint32_t place(int i) const { return shared_ + (i - S::kKept) * (S::kWorkers * 4); }
  float kept_[S::kKept > 0 ? S::kKept : 1];
  uint32_t shared_;
};

// A thread's results of a tile, in the form that epilogue_rows() and write_gated() read: for 16 columns and the
// thread's first or second row, columns 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q.
template <typename S, typename Sums>
class Results {
 public:
  __device__ Results(const Sums& sums, uint32_t end) : sums_(sums), end_(end) {
    read_of_rows<S>(end, 0, scales_);
    if constexpr (kConverts) read_of_rows<S>(end, 1, of_rows_);
  }
  __device__ void operator()(int sixteen, int h, float (&v)[4]) const {
    uint32_t scales[4];
    if constexpr ((S::kFloats && !S::kScaled) || kConverts) read_scales(end_, sixteen * 16, scales);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Sum sum = sums_[sixteen * 8 + h * 2 + i / 2 * 4 + i % 2];
      if constexpr (kConverts) {
        v[i] = 0;
        add_segment(v[i], scales[i], sum - 128 * (int)of_rows_[h], of_rows_[h]);
      } else {
        v[i] = S::kFloats && !S::kScaled ? __fmul_rn(sum, __uint_as_float(scales[i])) : sum;
      }
      if constexpr (!S::kScaled) v[i] = __fmul_rn(v[i], scales_[h]);
    }
  }

 private:
  using Sum = std::decay_t<decltype(std::declval<Sums>()[0])>;
  static constexpr bool kConverts = std::is_same_v<Sum, int>;
  const Sums& sums_;
  uint32_t end_;
  float scales_[2], of_rows_[2];
};

// The sums of all split-K parts, or of the only one.
template <bool kChained, typename Totals, typename Sums>
__device__ const auto& of_parts(const Totals& total, const Sums& d) {
  if constexpr (kChained) return total;
  else return d;
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
