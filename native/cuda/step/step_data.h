// A step's rows as kernels read them: what a Batch says, copied to the GPU at once.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/memory/device.h"

namespace as {
namespace cuda {

class StepData {
 public:
  // group: query heads of a KV head. max_spans: of a sequence. windows: of each cache group, 0: all is seen. no_span:
  // what stands in tables for spans that windows have left behind, which others may have by now.
  StepData(int max_rows, int max_outputs, int max_slots, int max_spans, int span_size, int group,
           std::vector<int> windows, int no_span);

  // How many of everything a step has. Kernels are started for so many; those of a padded step do nothing for the rows
  // that the batch does not have.
  struct Size {
    int rows = 0, outputs = 0, decode_tiles = 0, prefill_tiles = 0;
    int kv_splits = 1;     // of the context of decode tiles: 1, or 2 for more
    bool adapted = false;  // some row has an adapter
    bool operator<(const Size& other) const;
  };
  // Queues the copy of a batch. padded: of a batch of single rows that each draw, up to how many rows.
  Size copy(const Batch& batch, int padded, const Device& device);

  const int* step() const { return at(step_); }  // how many came before
  const int* tokens() const { return at(tokens_); }
  const int* positions() const { return at(positions_); }
  const int* prompts() const { return at(prompts_); }  // the length of its sequence's prompt
  // Of a cache group, each row's place: span * span size + place in it; -1: nowhere.
  const int* where(int group) const { return at(where_) + (size_t)group * pitch_; }
  const int* adapters() const { return at(adapters_); }                        // of each row, -1: none
  const int* chosen() const { return at(chosen_); }                            // the row of each output
  const int* tables(int group) const { return at(tables_) + group * table_; }  // of spans, of a cache group
  const AttentionTile* decode_tiles() const { return reinterpret_cast<const AttentionTile*>(at(decode_tiles_)); }
  const AttentionTile* prefill_tiles() const { return reinterpret_cast<const AttentionTile*>(at(prefill_tiles_)); }

 private:
  const int* at(size_t offset) const { return device_memory_.as<int>() + offset; }
  int* host(size_t offset) const { return turns_[turn_].as<int>() + offset; }
  size_t whole_pitches(size_t ints) const { return (ints + pitch_ - 1) / pitch_ * pitch_; }
  void send(const Size& size, int used, const Device& device) const;

  const int span_size_, group_, groups_, no_span_;
  const std::vector<int> windows_;
  const size_t pitch_, table_;  // ints: every array begins at a multiple of a pitch; of spans of all sequences
  uint32_t steps_ = 0;          // they may come to be more than 2^31
  size_t step_, tokens_, positions_, prompts_, where_, adapters_, chosen_, decode_tiles_, prefill_tiles_, tables_,
      all_;                          // offsets, in ints
  Memory turns_[2], device_memory_;  // of the host: one may still be copied when the next is written
  int turn_ = 0;
};

}  // namespace cuda
}  // namespace as
