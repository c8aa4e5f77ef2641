// What layers with a state keep of each slot's sequence: a page of memory for each slot (docs/decisions/recurrent.md).
#pragma once
#include "batch/state_positions.h"
#include "cpu/memory.h"

namespace as {

// Bytes of a page. state: what a checkpoint copies. recent: what the rows since the last multiple of kStateStep need.
struct PageBytes {
  size_t state = 0, recent = 0;
};

// Of a state that advances at multiples of kStateStep (ops/deferred_state.h): `group` heads with the same keys. decays:
// of a row and head.
PageBytes deferred_state_bytes(int group, int key_dim, int value_dim, int decays);
// Of an ssd op.
PageBytes ssd_bytes(int heads, int groups, int state_dim, int head_dim);
PageBytes causal_conv_bytes(int channels, int taps);

class SlotPages : public StatePositions {
 public:
  SlotPages(int slots, PageBytes bytes, const char* purpose)
      : StatePositions(slots),
        state_(rounded(bytes.state)),
        stride_(state_ + rounded(bytes.recent)),
        memory_(stride_ * slots, purpose) {}

  static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }
  size_t state_bytes() const { return state_; }
  char* state(int slot) const { return memory_.as() + stride_ * slot; }
  char* recent(int slot) const { return state(slot) + state_; }

 private:
  const size_t state_, stride_;
  Buffer memory_;
};

}  // namespace as
