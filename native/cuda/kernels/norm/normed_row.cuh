// A row of activations that each CTA of a GEMM normalizes itself while it loads its first weights, so that no norm
// kernel has to run before it. The bits are those of the norm kernels.
#pragma once
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/norm/norm.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// A thread's kCount adjacent columns of a row, with zeros after the row's end.
template <int kCount>
struct RowPart {
  static constexpr int kColumns = kCount;
  float values[kCount];

  __device__ void read(const float* row, int column, int width) {
    if (width % 4 == 0 && column + kCount <= width) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + column + i);
        values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i++) values[i] = column + i < width ? row[column + i] : 0.0f;
    }
  }
  __device__ float operator[](int i) const { return values[i]; }
  // Adds in a fixed order.
  __device__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; i++) sum = fmaf(values[i], values[i], sum);
    return sum;
  }
  __device__ void norm(float factor, const RowPart& weights, float one) {
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = values[i] * factor * (weights[i] + one);
  }
};
// squares: the sum over the row.
__device__ inline float norm_factor(float squares, int width, const Norm& norm) {
  return 1.0f / sqrtf(squares / width + norm.eps);
}

// meet() synchronizes the first kThreads threads. row_is_there() also makes their row visible to wgmma.
template <int kThreads>
__device__ inline void meet() {
  asm volatile("bar.sync 5, %0;" ::"n"(kThreads) : "memory");
}
template <int kThreads>
__device__ inline void row_is_there() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  meet<kThreads>();
}
// A product has at least eight rows. With a single row in shared memory, each further row begins 16 bytes after the one
// before it, and its sums are ignored. kBehindRow bytes after the row must therefore be readable.
__device__ inline uint64_t row_descriptor(uint32_t address) {
  return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | 1ull << 32;
}

// kKept: parts of a thread, kThreads parts apart.
template <class Part, int kThreads, int kKept_>
class NormedRow {
 public:
  static constexpr int kWarps = kThreads / 32, kKept = kKept_;
  struct Shared {
    float squares[kWarps * kKept];
  };

  // No kernel writes the norm's weights: they are loaded before the previous kernel has ended.
  __device__ NormedRow(const Norm& norm, int width) : norm_(norm), width_(width) {
#pragma unroll
    for (int i = 0; i < kKept; i++) weights_[i].read(norm.weight, place(i) * Part::kColumns, width);
  }
  __device__ void make(const float* row, Shared& shared) {
#pragma unroll
    for (int i = 0; i < kKept; i++) parts_[i].read(row, place(i) * Part::kColumns, width_);
#pragma unroll
    for (int i = 0; i < kKept; i++) {
      const float sum = warp_sum(parts_[i].squares());
      if (threadIdx.x % 32 == 0) shared.squares[place(i) / 32] = sum;
    }
    meet<kThreads>();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps * kKept; i++) sum += shared.squares[i];
    const float factor = norm_factor(sum, width_, norm_), one = norm_.unit_offset ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kKept; i++) parts_[i].norm(factor, weights_[i], one);
  }
  // The number in the row of the thread's part i.
  static __device__ int place(int i) { return i * kThreads + threadIdx.x; }
  __device__ const Part& operator[](int i) const { return parts_[i]; }

 private:
  const Norm& norm_;
  const int width_;
  Part parts_[kKept], weights_[kKept];
};

// A NormedRow of at most kNormedColumns columns, rounded to 16 bits as rms_norm() does.
template <int kThreads>
class RoundedRow : public NormedRow<RowPart<8>, kThreads, kNormedColumns / 8 / kThreads> {
 public:
  using NormedRow<RowPart<8>, kThreads, kNormedColumns / 8 / kThreads>::NormedRow;
  // Writes parts [begin, begin + count) of the row to shared memory.
  __device__ void put(char* to, int begin, int count) const {
#pragma unroll
    for (int i = 0; i < this->kKept; i++) {
      const RowPart<8>& x = (*this)[i];
      if (const int at = this->place(i) - begin; at >= 0 && at < count)
        *reinterpret_cast<uint4*>(to + at * 16) = make_uint4(to_dtype16x2(x[0], x[1]), to_dtype16x2(x[2], x[3]),
                                                             to_dtype16x2(x[4], x[5]), to_dtype16x2(x[6], x[7]));
    }
  }
};

}  // namespace AS_DTYPE16
}  // namespace as::cuda
