// A step's rows in the form that kernels read: a Batch, copied to the GPU in one or two copies.
#pragma once
#include <vector>

#include "batch/state_positions.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/norm/vision.h"
#include "cuda/kernels/recurrent/recurrent.h"
#include "cuda/memory/device.h"

namespace as::cuda {

// The number of rows that a decode step of `rows` rows is padded to, so that few CUDA graphs serve all steps. most: of
// any step.
int padded_rows(int rows, int most);

// What decides the attention tiles of a step. group: query heads per KV head. narrow: 0, or the smaller number of other
// layers, which share decode tiles and have prefill tiles of their own. kv_heads: of this rank. sms: of the GPU.
// max_splits: KV splits of all decode tiles of a step.
struct TileLimits {
  int group = 1, narrow = 0, kv_heads = 1, sms = 1, max_splits = 0;
  ShortChunks short_chunks = ShortChunks::fastest;
};

// What a program's rows need besides tokens and positions, of which some programs have some. states: ops have a state
// of each sequence. keeps, takes: hidden states are kept, and taken (batch/draft_head.h). whole: a sequence's rows see
// all of it. segments, images: they see those of their segment, or their image. places: rows have places (time, height,
// width). given: the width of rows that the plan gives; 0: none. separator: the id that ends a sequence's first segment
// of two; -1: there are none. selected: how many positions an indexer selects for a row that sees more; 0: rows see
// all. indexed: ops need the span tables of each row. lists: what rows see in attention over compressed positions, if
// that is the program's attention.
struct RowNeeds {
  bool states = false, keeps = false, takes = false, whole = false, segments = false, images = false, places = false,
       indexed = false, sends = false;
  int given = 0, separator = -1, selected = 0;
  std::vector<ListShape> lists;
};

class StepData {
 public:
  // max_spans: per sequence. windows: of each cache group; 0: full attention. no_span: replaces the spans that a
  // sliding window has left. Other sequences may own those by now.
  StepData(int max_rows, int max_outputs, int max_slots, int max_spans, int span_size, const TileLimits& tiles,
           std::vector<int> windows, int no_span, const RowNeeds& needs);

  // A step's counts, which set the sizes of launches. In a padded step kernels skip the padding rows.
  struct Size {
    int rows = 0, outputs = 0, decode_tiles = 0, prefill_tiles = 0;
    int kv_splits = 1;                                // of decode tiles: 1, or 2 if some have several
    bool stores = true;                               // whether decode kernels may store the rows
    bool adapted = false;                             // whether any row has an adapter
    bool given = false;                               // whether the plan gives any row; such steps have no graph
    int short_items = 0, long_items = 0, chunks = 0;  // of ops with a state
    int narrow_tiles = 0;                             // prefill tiles of layers of the smaller group
    int selected_tiles = 0;                           // of rows of prompts for which an indexer selects positions

    // Whether rows are in tiles that are not shared out over the GPU; such steps have no graph.
    bool prefills() const { return prefill_tiles || selected_tiles; }
    bool operator<(const Size& other) const;
  };
  // Queues the copy of a batch. padded: 0, or the number of rows and outputs to pad the batch to; then no item has more
  // than kOwnRows rows, or kShortRows if ops have a state. Such a batch has other tiles than decode tiles only if these
  // cannot hold it, or would take longer. states: null, or the positions of the slots' states, which have begun this
  // step.
  Size copy(const Batch& batch, int padded, const StatePositions* states, const Device& device);
  // Queues the copy of a step of `wanted`'s size whose rows are stored nowhere and serve no request. Decode tiles are
  // empty. If there are prefill tiles, all rows have some, which attend to the span that replaces others; the returned
  // size has their number. Items with a state have no slot.
  Size copy_idle(const Size& wanted, const Device& device);

  const int* step() const { return at(step_); }  // number of earlier steps
  const int* tokens() const { return at(tokens_); }
  const int* positions() const { return at(positions_); }
  const int* prompts() const { return at(prompts_); }  // length of the sequence's prompt
  // Where each row is stored in a cache group: span * span size + position in the span; -1: nowhere.
  const int* where(int group) const { return at(where_) + (size_t)group * pitch_; }
  const int* adapters() const { return at(adapters_); }  // of each row; -1: none
  const int* chosen() const { return at(chosen_); }      // row of each output
  // Of programs that send rows to ranks of experts: rows and outputs without padding; 0 for each output, -1 for
  // padding.
  const int* counts() const { return at(counts_); }
  const int* padding() const { return at(padding_); }
  const int* keeps() const { return at(keeps_); }  // place where each row's hidden state is kept; -1: nowhere
  const int* takes() const { return at(takes_); }  // place of the hidden state that each row takes
  // The last position of each row's sequence; the first and the last one of its segment or image, its own in neither.
  const int* ends() const { return at(ends_); }
  const int* part_begins() const { return at(part_begins_); }
  const int* part_ends() const { return at(part_ends_); }
  // 1 for rows behind their sequence's first separator, otherwise 0.
  const int* segments() const { return at(segments_); }
  Places places() const { return {at(places_), at(places_) + pitch_, at(places_) + 2 * pitch_}; }
  // Height and width of each row's image.
  const int* image_heights() const { return at(sizes_); }
  const int* image_widths() const { return at(sizes_) + pitch_; }
  GivenRows given() const { return {given_rows_.as<float>(), at(given_), needs_.given}; }
  const int* tables(int group) const { return at(tables_) + group * table_; }  // span tables of a cache group
  const AttentionTile* decode_tiles() const { return reinterpret_cast<const AttentionTile*>(at(decode_tiles_)); }
  // narrow: of layers of the smaller group.
  const AttentionTile* prefill_tiles(bool narrow = false) const {
    return reinterpret_cast<const AttentionTile*>(at(narrow ? narrow_tiles_ : prefill_tiles_));
  }
  // Tiles of one row each, which sees the positions that an indexer selects.
  const AttentionTile* selected_tiles() const { return reinterpret_cast<const AttentionTile*>(at(selected_tiles_)); }
  // Tiles of one row each, of a list shape: as many as decode_tiles and selected_tiles of the step's size.
  const AttentionTile* decode_lists(int list) const {
    return reinterpret_cast<const AttentionTile*>(at(lists_ + 2 * list * list_));
  }
  const AttentionTile* prefill_lists(int list) const {
    return reinterpret_cast<const AttentionTile*>(at(lists_ + (2 * list + 1) * list_));
  }
  // Of each row: where its sequence's span tables begin. Of programs with ops that need these.
  const int* row_tables() const { return at(row_tables_); }
  StateRows state_rows(const Size& size) const {
    return {reinterpret_cast<const StateItem*>(at(state_items_)), reinterpret_cast<const StateChunk*>(at(chunks_)),
            size.short_items, size.long_items, size.chunks};
  }

 private:
  int plain_rows(const Item& item) const;
  template <typename F>
  void cut(const Item& item, F add) const;
  int splits_of(const Item& item) const;
  void choose_tiles(const Batch& batch);
  bool sees_ahead(const Batch& batch, const Item& item) const;
  void add_sights(const Batch& batch, const Item& item) const;
  void add_given(const Batch& batch, const Device& device) const;
  bool cuts_chunks(const Batch& batch) const;
  void add_states(const Batch& batch, int padded, const StatePositions& states, Size& size) const;
  const int* at(size_t offset) const { return device_memory_.as<int>() + offset; }
  int* host(size_t offset) const { return turns_[turn_].as<int>() + offset; }
  size_t whole_pitches(size_t ints) const { return (ints + pitch_ - 1) / pitch_ * pitch_; }
  void add_prefill(AttentionTile tile, Size& size) const;
  void add_list_tiles(int row, int count, int start, int table, bool decodes, std::vector<int>& kv_splits,
                      Size& size) const;
  void add_empty_tiles(int from, int to) const;
  void idle_row(int r, int position);
  void add_places(const Batch& batch) const;
  void add_counts(const Size& size, int padded) const;
  void send(const Size& size, int used, const Device& device) const;

  const int span_size_, groups_, max_spans_, no_span_;
  const TileLimits limits_;
  const std::vector<int> windows_;
  const RowNeeds needs_;
  const size_t pitch_, table_,  // ints: arrays begin at multiples of pitch_; size of all sequences' span tables,
      list_;                    // and of the tiles of a list shape
  uint32_t steps_ = 0;          // may exceed 2^31
  size_t step_, tokens_, positions_, prompts_, where_, adapters_, chosen_, counts_, padding_, keeps_, takes_, ends_,
      part_begins_, part_ends_, segments_, places_, sizes_, given_, decode_tiles_, prefill_tiles_, narrow_tiles_,
      selected_tiles_, lists_, row_tables_, state_items_, chunks_, tables_,
      all_;                          // offsets, in ints
  Memory turns_[2], device_memory_;  // turns_: on the host; one may still be in a copy while the other is written
  Memory given_turns_[2], given_rows_;
  int turn_ = 0;
  std::vector<bool> decoded_;  // whether decode tiles compute an item of the batch
};

}  // namespace as::cuda
