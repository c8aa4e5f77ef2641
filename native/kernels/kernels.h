// The kernels that exist once per instruction set, as a table of functions: chosen at import (isa.cpp).
//
// Invariance (DESIGN: "same request, same bytes"): every value a kernel writes is a fixed recipe of its inputs that
// does not depend on how many rows, threads or tiles there are.
#pragma once
#include <cstddef>
#include <cstdint>

#include "format.h"
#include "span_layout.h"

namespace as {

// Attention of a tile of rows (query heads that share one KV head) over one block of context.
struct AttentionTile {
  int rows;                // <= kTileRows
  const float* q[16];      // each [head_dim]
  int limit[16];           // row sees tokens [0, limit) of this block; <= 0: none
  float scale;
  int tokens;              // of the block, that any row sees
  const SpanLayout* layout;
  const void* const* spans;  // the block's, of this layer and KV head
  const void* const* next;   // where to prefetch: the following block's, or again the block's
  float* maximum;          // [rows]
  float* sum;              // [rows]
  float* out;              // [rows][padded_dim], not normalized
};
constexpr int kTileRows = 16;
constexpr int kBlockTokens = 128;  // context per partial result of attention, whatever the span size

enum class SourceType { f32, f16, bf16 };  // of a checkpoint's values

struct LogitKernels;

struct Kernels {
  const char* name;
  Rules rules;
  // y[m, n] for panels [p0, p1): y = x w^T (+ bias), y with row stride ldy. Where prepared() says so, activations are prepared.
  void (*matmul)(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1);
  // silu(gate) * up, where the first half of w's rows gives gate and the second up, each of whole panels: columns of the panels
  // [p0, p1) of a half. The same bits as matmul, silu_mul and (rounded) prepare.
  void (*matmul_gated)(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m, int p0, int p1);
  PreparedLayout (*prepared)(const Packed& w);
  void (*prepare)(const Packed& w, const float* x, char* out);
  // Quantizes rows [r0, r1) of w, whose row `row_offset` is at source, rows `stride` elements apart; threads must not share
  // a panel. Returns how many values are NaN or infinite (their groups become NaN).
  long (*quantize)(const Packed& w, const void* source, SourceType type, long stride, long row_offset, long r0, long r1);
  void (*read_row)(const Packed& w, long row, float* y);  // y [k]: one row, recovered
  void (*rms_norm)(const float* x, const float* w, float* y, int n, float eps);
  void (*silu_mul)(const float* gate, const float* up, float* y, int n);
  void (*add)(float* x, const float* y, size_t n);
  // Sums of `count` partials in order: out[i] = ((p0[i] + p1[i]) + p2[i]) + ...
  void (*sum_partials)(const float* const* partials, int count, float* out, size_t n);
  void (*attend)(const AttentionTile& tile);
  // Merges the next block's partial result into the running one (both [padded_dim]).
  void (*merge)(float* maximum, float* sum, float* out, float block_maximum, float block_sum, const float* block_out, int padded_dim);
  // Rotates pairs (x[i], x[i + half]) by the angles whose cosines and sines are given (each [half]).
  void (*rope)(float* x, const float* cosine, const float* sine, int half);
  const LogitKernels& (*logits)();  // passes over logits, for the sampler
  // Ceilings (ceilings.cpp).
  float (*read_memory)(const float* p, size_t n);
  double (*multiply_add)(long rounds, float* keep);
  double (*multiply_tiles)(long rounds, bool integers);  // null without tiles
};

#if defined(AS_HAVE_AMX)
namespace amx { const Kernels& kernels(); }
#endif
#if defined(AS_HAVE_AVX2)
namespace avx2 { const Kernels& kernels(); }
#endif
#if defined(AS_HAVE_AVX512)
namespace avx512 { const Kernels& kernels(); }
#endif
#if defined(AS_HAVE_AVX512_VNNI)
namespace avx512_vnni { const Kernels& kernels(); }
#endif
#if defined(AS_HAVE_AVX512_BF16)
namespace avx512_bf16 { const Kernels& kernels(); }
#endif
#if defined(AS_HAVE_NEON)
namespace neon { const Kernels& kernels(); }
#endif

// The kernels in use.
const Kernels& kernels();

}  // namespace as
