// What launches of all kernels share: matrices and rows of activations, scratch memory, and the queue they go to.
// Pointers are of the device's memory. Values of a row depend on that row alone, whatever else is in a launch.
#pragma once
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/source_type.h"
#include "cuda/kernels/common/quantized.h"
#include "cuda/kernels/common/tiles.h"

namespace as::cuda {

// Floats of 16 bits: bfloat16 and IEEE 754's binary16 (float16), as PTX names them. Values too large for float16 become
// its largest, 65504. What is of 16 bits in a program is all of one type, but for the cache. Kernels of other formats
// (codes, activations of 8 bits) go with bfloat16 alone.
enum class DType16 : uint8_t { bf16, f16 };
constexpr float kTooLarge = 65520;  // from there on a value does not fit float16: to nearest it would be infinite

// Rows of values: float32 [rows, width], or of 16 bits in tiles (tiles.h) for the products that read them, or both.
struct Rows {
  float* values = nullptr;
  uint16_t* tiles = nullptr;
  int width = 0;
  DType16 dtype = DType16::bf16;
  uint16_t* copy = nullptr;  // of the tiles, in another GPU's memory: of products of 16 bits in pieces alone
};

// A matrix [n, k]: float32 row by row, or of 16 bits in tiles, or codes.
enum class Kind { f32, dtype16, quantized, integers, float8 };  // the last two: codes for activations of 8 bits
struct Matrix {
  int n = 0, k = 0;
  Kind kind = Kind::f32;
  DType16 dtype = DType16::bf16;
  const float* values = nullptr;
  const uint16_t* tiles = nullptr;
  Quants quants = {};
  int max_split_k = kMaxSplitK;  // of a sum along K
  int experts = 1;               // a stack of so many such matrices, one after the other

  bool takes_bytes() const { return kind == Kind::integers || kind == Kind::float8; }
  // Of its products' rows of activations: they must be in tiles; or they may, as they are rounded to 8 bits anyway.
  bool takes_tiles() const { return kind == Kind::dtype16 || kind == Kind::quantized; }
  bool reads_tiles() const { return takes_tiles() || takes_bytes(); }
};

// Where CTAs of one launch leave sums for each other: kScratchFloats and kScratchFlags each; and all of
// them pieces of sums, with how many have come. Flags and counts are zero between launches.
constexpr int kScratchCtas = 144, kScratchFlags = 4;
constexpr size_t kScratchFloats = 192 * 256;
constexpr size_t kScratchParts = 12 << 20, kScratchCounts = kScratchParts / 1024;
struct Scratch {
  float* sums = nullptr;
  int* flags = nullptr;
  float* k_parts = nullptr;
  int* arrivals = nullptr;
};

// Where launches go: a stream of a chip of this capability (90 is 9.0).
struct Queue {
  cudaStream_t stream = nullptr;
  int capability = 0;
  Scratch scratch;
  // No programmatic launch: the previous kernel writes weights that this one prefetches.
  bool no_pdl = false;
};

// gate * sigmoid(alpha * gate) * (up + shift), the gate at most limit, up within +-limit: as it stands, silu(gate) *
// up.
struct Gating {
  float alpha = 1, limit = HUGE_VALF, shift = 0;
};

}  // namespace as::cuda
