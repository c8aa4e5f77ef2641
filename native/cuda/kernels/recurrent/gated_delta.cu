// The gated delta rule and Mamba2's selective state space: their memory, and which kernels compute a step's items.
#include <algorithm>

#include "cuda/kernels/recurrent/delta.cuh"

namespace as::cuda {
namespace {

template <bool kDelta>
void launch(const recurrent::DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  if (rows.short_items) recurrent::delta_rows<kDelta>(a, rows, queue);
  if (rows.long_items) recurrent::delta_chunks<kDelta>(a, rows, queue);
}

}  // namespace

PageBytes gated_delta_bytes(const DeltaShape& s) {
  const size_t keys = sizeof(float) * s.key_heads * s.key, values = sizeof(float) * s.heads * s.value;
  const size_t decays = (size_t)s.heads * (s.channels ? s.key : 1);
  return {round_up_256(values * s.key), round_up_256(recurrent::kRing * (sizeof(double) * decays + keys + values))};
}

size_t gated_delta_scratch(const DeltaShape& s, int rows, int slots) {
  if (s.channels) {
    const int items = std::min(slots, rows / (kShortRows + 1)), padded = (s.key + 7) / 8 * 8;
    const size_t row = 2 * kChunkRows + 1 + 2 * padded, chunk = (size_t)(kChunkRows + 1) * padded;
    // An item may have two whole chunks more than its rows: one begins before them, and one ends before them, which
    // drafts had reached.
    return sizeof(float) * (s.heads * (rows * row + (rows / kChunkRows + 2 * items) * chunk) + 4);
  }
  return rows * (round_up_256(12 * s.heads) + sizeof(float) * 2 * kChunkRows * s.key_heads);
}

void gated_delta(const GatedDelta& p, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = p.shape;
  recurrent::DeltaArgs a{p, s.heads / s.key_heads, 2 * s.key_heads * s.key + s.heads * s.value};
  a.padded = (s.key + 7) / 8 * 8, a.stride = a.padded + 4, a.aligned = s.key % 4 == 0 && s.value % 4 == 0;
  a.weights = reinterpret_cast<float*>(p.scratch);
  a.totals = reinterpret_cast<double*>(a.weights + (size_t)p.max_rows * 2 * kChunkRows * s.key_heads);
  a.betas = reinterpret_cast<float*>(a.totals + (size_t)p.max_rows * s.heads);
  if (s.channels) {
    const size_t each = (size_t)p.max_rows * s.heads;
    a.weighed = a.weights + each * 2 * kChunkRows, a.betas = a.weighed + each * 2 * a.padded;
    a.chunks = a.betas + (each + 3) / 4 * 4;
  }
  const int keys = s.key_heads * s.key;
  if (p.skip) a.k_at = s.heads * s.value, a.q_at = a.k_at + keys, launch<false>(a, rows, queue);
  else if (a.k_at = keys, a.v_at = 2 * keys; s.channels) recurrent::channel_delta(a, rows, queue);
  else launch<true>(a, rows, queue);
}

}  // namespace as::cuda
