// Ops of layers that keep a state (docs/decisions/recurrent.md): gated delta rule, causal convolution, their gates, and
// copies of states between slots' pages and spans.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Rows of an item up to which an item is "short": computed row by row, as decode steps do.
constexpr int kShortRows = 8;
// Positions at whose multiples states advance.
constexpr int kChunkRows = 64;

// A sequence's rows in a step. slot -1: padding. position: that of the state before the step. chunks: of a long item,
// how many whole chunks from their states' positions on the long items before it have.
struct StateItem {
  int slot, row, start, count, drafts, position, chunks;
};
// The part of a long item that lies in the chunk beginning at position `at`.
struct StateChunk {
  int item, at;
};
// The items of a step: short ones, then long ones, with the chunks of the long ones.
struct StateRows {
  const StateItem* items = nullptr;
  const StateChunk* chunks = nullptr;
  int short_items = 0, long_items = 0, chunk_count = 0;
};

// An op's memory of each slot: `state` bytes that checkpoints copy, then `recent` bytes. Both are multiples of 256.
struct PageBytes {
  size_t state = 0, recent = 0;
};
struct StatePages {
  char* data = nullptr;
  PageBytes bytes;

#ifdef __CUDACC__
  template <typename T>
  __device__ T* state(int slot) const {
    return reinterpret_cast<T*>(data + slot * (bytes.state + bytes.recent));
  }
  template <typename T>
  __device__ T* recent(int slot) const {
    return reinterpret_cast<T*>(data + slot * (bytes.state + bytes.recent) + bytes.state);
  }
#endif
};

// A slot's page: state [heads, key, value]; of the rows of two chunks by position: totals [heads, 128] (float64), keys
// [key heads, 128, key], deltas [heads, 128, value]. channels: there is a decay for each channel of a head's key; then
// decays and their exponentials, [heads, 2, 128, key], take the place of the totals.
struct DeltaShape {
  int key = 0, value = 0, key_heads = 0, heads = 0;
  bool channels = false;
};
constexpr int kMostKeyDim = 128;
PageBytes gated_delta_bytes(const DeltaShape& shape);
// Bytes of shared memory that a CTA needs at least if there is a decay for each channel.
size_t channel_delta_shared(const DeltaShape& shape);
// Bytes that the rows of long items take between the kernels of one op. slots: the most items of a step.
size_t gated_delta_scratch(const DeltaShape& shape, int rows, int slots);

// The gated delta rule; or, if `skip` is set, a selective state space, whose keys are B and queries C. columns of x: of
// the rule, queries, keys and values, which kernels normalize in place for long items; of a state space, x, B and C.
struct GatedDelta {
  DeltaShape shape;
  StatePages pages;
  float* x = nullptr;            // [rows, width]
  const float* gates = nullptr;  // [rows, decays + heads]: of decays, and of rates; of a state space [rows, heads]
  float* y = nullptr;            // [rows, heads * value]
  const float* skip = nullptr;   // [heads]: D
  double least_step = 0, most_step = 0;
  float lower_bound = 0;                             // of decays of channels; 0: none
  const float *a_log = nullptr, *dt_bias = nullptr;  // [heads], [decays]
  char* scratch = nullptr;
  int max_rows = 0;  // that the scratch memory is for
};
void gated_delta(const GatedDelta& p, const StateRows& rows, const Queue& queue);

// A slot's page: state [taps - 1, channels], the rows before its position; recent [taps - 1 + 64, channels], the rows
// since, by position.
PageBytes causal_conv_bytes(int channels, int taps);
struct CausalConv {
  int channels = 0, taps = 0;
  bool activated = false;
  StatePages pages;
  const float *x = nullptr, *weight = nullptr, *bias = nullptr;  // weight [channels, taps]
  float* y = nullptr;
};
void causal_conv(const CausalConv& p, const StateRows& rows, const Queue& queue);

// out = norm(x) * silu(gate), or * sigmoid(gate), with the norm of each head; x is overwritten. gate_first: norm(x *
// silu(gate)), with a weight for each value of all heads. All of these write values or tiles; out may have x's values.
struct GatedNorm {
  const float* weight = nullptr;
  int head_dim = 0;
  float eps = 0;
  bool sigmoid = false, gate_first = false;
};
void gated_rms_norm(float* x, const float* gate, const GatedNorm& norm, const Rows& out, int rows, const Queue& queue);
// out = max(x, 0)^2
void relu_square(const float* x, const Rows& out, int rows, const Queue& queue);
// out = x * sigmoid(gate), one for each value
void sigmoid_gate(const float* x, const float* gate, const Rows& out, int rows, const Queue& queue);

// Copies of a slot's state to spans and back. The states of all ops, one after the other, fill spans; a span's bytes
// are its layers' parts, one after the other.
struct StatePart {
  char* pages;  // of slot 0
  size_t stride, bytes, offset;
};
struct SpanLayer {
  char* data;  // of span 0
  size_t bytes, offset;
};
void copy_state(const StatePart* parts, int part_count, size_t largest, const SpanLayer* layers, int layer_count,
                size_t span_bytes, int slot, const int32_t* spans, int count, bool to_spans, const Queue& queue);

}  // namespace as::cuda
