// Arguments that all kernels share: matrices, rows of activations, scratch memory and the launch queue. Pointers are
// device pointers. The values of a row depend on that row alone, not on the other rows of a launch.
#pragma once
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/source_type.h"
#include "cuda/kernels/common/quantized.h"
#include "cuda/kernels/common/tiles.h"

namespace as::cuda {

// Where the next part of an allocation may begin.
AS_BOTH constexpr size_t round_up_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

// 16-bit float types, bfloat16 and float16 (IEEE 754 binary16), as PTX names them. Values too large for float16 become
// its maximum, 65504. All 16-bit tensors of a program have one type, except the KV cache. Quantized weights and 8-bit
// activations are supported with bfloat16 only.
enum class DType16 : uint8_t { bf16, f16 };
constexpr float kTooLarge = 65520;  // values from here on would round to infinity in float16

// Rows of activations: float32 [rows, width], or 16-bit tiles (tiles.h) for GEMMs that read them, or both.
struct Rows {
  float* values = nullptr;
  uint16_t* tiles = nullptr;
  int width = 0;
  DType16 dtype = DType16::bf16;
  uint16_t* copy = nullptr;  // a copy of the tiles in another GPU's memory; 16-bit GEMMs with split-K only
};

// A matrix [n, k]: float32 in row-major order, 16-bit tiles, or quantized values.
// mxfp4: for experts only. integers, float8: with 8-bit activations.
enum class Kind { f32, dtype16, quantized, integers, float8, mxfp4 };
struct Matrix {
  int n = 0, k = 0;
  Kind kind = Kind::f32;
  DType16 dtype = DType16::bf16;
  const float* values = nullptr;
  const uint16_t* tiles = nullptr;
  Quants quants = {};
  int max_split_k = kMaxSplitK;  // limit of split-K parts
  int experts = 1;               // number of matrices in the stack, one after the other
  // If columns are permuted (act-order): the input feature of each column.
  const int* order = nullptr;

  // float8: each row has a scale for every 128 columns, not one for all.
  bool has_float_groups() const { return kind == Kind::float8 && quants.groups > 1; }
  bool takes_bytes() const { return kind == Kind::integers || kind == Kind::float8; }
  // takes_tiles(): activations must be in tiles. reads_tiles(): they may be, since they are rounded to 8 bits anyway.
  bool takes_tiles() const { return kind == Kind::dtype16 || kind == Kind::quantized || kind == Kind::mxfp4; }
  bool reads_tiles() const { return takes_tiles() || takes_bytes(); }
};

// Memory through which the CTAs of one launch exchange sums: kScratchFloats and kScratchFlags for each CTA, and
// split-K parts with arrival counters for all. Flags and counters are zero between launches.
constexpr int kScratchCtas = 144, kScratchFlags = 4;
constexpr size_t kScratchFloats = 192 * 256;
constexpr size_t kScratchParts = 12 << 20, kScratchCounts = kScratchParts / 1024;
struct Scratch {
  float* sums = nullptr;
  int* flags = nullptr;
  float* k_parts = nullptr;
  int* arrivals = nullptr;
  int* given_up = nullptr;  // in host memory: for waits that fail (errors.h)
};

struct ChipCosts;

// Where kernels are launched: a stream, and the compute capability of its GPU (90 is 9.0).
struct Queue {
  cudaStream_t stream = nullptr;
  int capability = 0;
  Scratch scratch;
  // No programmatic launch: the previous kernel writes weights that this one prefetches.
  bool no_pdl = false;
  const ChipCosts* costs = nullptr;  // of the GPU; null: the defaults
};

// gate * sigmoid(alpha * gate) * (up + shift), with gate <= limit and |up| <= limit. The defaults give
// silu(gate) * up.
struct Gating {
  float alpha = 1, limit = HUGE_VALF, shift = 0;
};

}  // namespace as::cuda
