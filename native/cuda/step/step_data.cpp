#include "cuda/step/step_data.h"

#include <algorithm>
#include <tuple>

#include "cuda/memory/host_threads.h"

namespace as::cuda {
namespace {

constexpr size_t kTileInts = sizeof(AttentionTile) / sizeof(int), kItemInts = sizeof(StateItem) / sizeof(int),
                 kChunkInts = sizeof(StateChunk) / sizeof(int);
static_assert(kChunkRows == kStateStep && kMostDrafts <= kChunkRows);

constexpr int kMostCutRows = 64;  // of an item that several decode tiles compute
static_assert(kDecodePairs <= kMostCutRows);
// Estimated times, in those that a tile of either kind takes for a block of 64 positions (0.9 us on an H100).
constexpr int kBlockTokens = 64;
constexpr double kDecodeSplit = 2,  // of a decode tile, for a KV split
    kPrefillExtra = 8;              // a layer's, of a step with prefill tiles, which no graph has

int kv_splits_of(int positions) { return (positions + kKvSplitTokens - 1) / kKvSplitTokens; }

}  // namespace

int padded_rows(int rows, int most) {
  int step = rows <= 4 ? 1 : 2;
  while (step > 1 && rows > 8 * step) step *= 2;
  return std::min((rows + step - 1) / step * step, most);
}

bool StepData::Size::operator<(const Size& other) const {
  const auto all = [](const Size& s) {
    return std::tie(s.rows, s.outputs, s.decode_tiles, s.prefill_tiles, s.kv_splits, s.stores, s.adapted, s.short_items,
                    s.long_items, s.chunks, s.selected_tiles);
  };
  return all(*this) < all(other);
}

StepData::StepData(int max_rows, int max_outputs, int max_slots, int max_spans, int span_size, const TileLimits& tiles,
                   std::vector<int> windows, int no_span, const RowNeeds& needs)
    : span_size_(span_size),
      groups_((int)windows.size()),
      max_spans_(max_spans),
      no_span_(no_span),
      limits_(tiles),
      windows_(std::move(windows)),
      needs_(needs),
      pitch_(((size_t)max_rows + 3) / 4 * 4),
      table_(whole_pitches((size_t)max_slots * max_spans)),
      list_(whole_pitches(max_rows * kTileInts)) {
  const size_t rows = max_rows;
  const auto most_tiles = [&](int group) { return group ? rows * group / kPrefillPairs + max_slots : 0; };
  size_t next = 0;
  const auto take = [&](size_t& offset, size_t ints) { offset = next, next += whole_pitches(ints); };
  take(step_, 1), take(tokens_, rows), take(positions_, rows), take(prompts_, rows), take(where_, pitch_ * groups_),
      take(adapters_, rows), take(chosen_, max_outputs), take(counts_, needs.sends ? 2 : 0),
      take(padding_, needs.sends ? max_outputs : 0), take(keeps_, needs.keeps ? rows : 0),
      take(takes_, needs.takes ? rows : 0);
  const bool parts = needs.segments || needs.images;
  take(ends_, needs.whole ? rows : 0), take(part_begins_, parts ? rows : 0), take(part_ends_, parts ? rows : 0);
  take(segments_, needs.separator >= 0 ? rows : 0);
  take(places_, needs.places ? 3 * pitch_ : 0), take(sizes_, needs.places ? 2 * pitch_ : 0);
  take(given_, needs.given ? rows : 0);
  take(decode_tiles_, rows * kTileInts), take(prefill_tiles_, most_tiles(tiles.group) * kTileInts),
      take(narrow_tiles_, most_tiles(tiles.narrow) * kTileInts),
      take(selected_tiles_, needs.selected ? rows * kTileInts : 0), take(lists_, 2 * list_ * needs.lists.size()),
      take(row_tables_, needs.indexed ? rows : 0), take(state_items_, needs.states ? rows * kItemInts : 0),
      take(chunks_, needs.states ? rows * kChunkInts : 0);
  take(tables_, table_ * groups_);
  all_ = next;
  for (Memory& turn : turns_) turn = Memory(all_ * sizeof(int), "rows of a step", Memory::Where::host);
  device_memory_ = Memory(all_ * sizeof(int), "rows of a step");
  if (!needs.given) return;
  const size_t bytes = rows * needs.given * sizeof(float);
  for (Memory& turn : given_turns_) turn = Memory(bytes, "rows that plans give", Memory::Where::host);
  given_rows_ = Memory(bytes, "rows that plans give");
}

// Whether a row of the item sees a later position.
bool StepData::sees_ahead(const Batch& batch, const Item& item) const {
  if (!needs_.images) return needs_.whole;
  const std::vector<int32_t>& images = batch.slot(item.slot).images;  // [begin, end) of each, ascending
  for (size_t i = 0; i < images.size(); i += 2)
    if (images[i] < item.start + item.count && item.start < images[i + 1]) return true;
  return false;
}

// Which positions the rows of an item see besides those before them, and their places.
void StepData::add_sights(const Batch& batch, const Item& item) const {
  const Slot& slot = batch.slot(item.slot);
  const int end = item.start + item.count;
  if (needs_.whole) std::fill_n(host(ends_) + item.row, item.count, end - 1);
  if (needs_.segments || needs_.images) {
    const auto add = [&](int from, int to, int first, int last) {
      for (int p = std::max(from, item.start); p < std::min(to, end); p++)
        host(part_begins_)[item.row + p - item.start] = first, host(part_ends_)[item.row + p - item.start] = last;
    };
    for (int p = item.start; p < end; p++) add(p, p + 1, p, p);
    const auto add_part = [&](int from, int to) { add(from, to, from, to - 1); };
    if (needs_.images)
      for (size_t i = 0; i < slot.images.size(); i += 2) add_part(slot.images[i], slot.images[i + 1]);
    if (needs_.segments && slot.segments.empty()) add_part(0, end);
    for (size_t i = 0; needs_.segments && i < slot.segments.size(); i++)
      add_part(i ? slot.segments[i - 1] : 0, slot.segments[i]);
  }
  bool second = false;
  for (int r = item.row; needs_.separator >= 0 && r < item.row + item.count; r++) {
    host(segments_)[r] = second;
    second |= batch.rows[r].token == needs_.separator;
  }
  if (!needs_.places) return;
  int height = 1, width = 1;
  for (int r = item.row; r < item.row + item.count; r++) {
    int place[3];
    for (int part = 0; part < 3; part++)
      place[part] = host(places_)[part * pitch_ + r] = slot.rotary_position(batch.rows[r].position, part);
    height = std::max(height, place[1] + 1), width = std::max(width, place[2] + 1);
  }
  std::fill_n(host(sizes_) + item.row, item.count, height);
  std::fill_n(host(sizes_) + pitch_ + item.row, item.count, width);
}

// Queues the copy of the rows that the plan gives, one after the other. One of several threads passes its rows on while
// others still copy theirs to pinned memory.
void StepData::add_given(const Batch& batch, const Device& device) const {
  const size_t width = needs_.given, bytes = width * sizeof(float);
  std::vector<const float*> rows;
  for (size_t r = 0; r < batch.given.size(); r++)
    if (batch.given[r]) host(given_)[r] = (int)rows.size(), rows.push_back(batch.given[r]);
  float* const to = given_turns_[turn_].as<float>();
  share_work((int64_t)rows.size(), rows.size() * bytes, [&](int64_t begin, int64_t end) {
    device.use();
    for (int64_t i = begin; i < end; i++) std::copy_n(rows[i], width, to + i * width);
    check(cudaMemcpyAsync(given_rows_.as<float>() + begin * width, to + begin * width, (end - begin) * bytes,
                          cudaMemcpyHostToDevice, device.stream()),
          "copying rows that the plan gives");
  });
}

// How many of an item's rows see all positions up to their own. For later ones an indexer selects some.
int StepData::plain_rows(const Item& item) const {
  return needs_.selected ? std::clamp(needs_.selected - item.start, 0, item.count) : item.count;
}

// Calls add(row, count, positions that the last one sees) for the rows of each decode tile of an item.
template <typename F>
void StepData::cut(const Item& item, F add) const {
  const int plain = plain_rows(item), tile_rows = kDecodePairs / limits_.group;
  for (int row = 0; row < plain; row += tile_rows) {
    const int count = std::min(tile_rows, plain - row);
    add(row, count, item.start + row + count);
  }
  for (int row = plain; row < item.count; row++) add(row, 1, needs_.selected);
}

// KV splits of an item that decode tiles compute.
int StepData::splits_of(const Item& item) const {
  int splits = 0;
  if (!needs_.lists.empty()) {
    for (const ListShape& list : needs_.lists) {
      int of_list = 0;
      for (int i = 0; i < item.count; i++) of_list += kv_splits_of(list.length(item.start + i + 1));
      splits = std::max(splits, of_list);
    }
    return splits;
  }
  cut(item, [&](int, int, int seen) { splits += kv_splits_of(seen); });
  return splits;
}

void StepData::choose_tiles(const Batch& batch) {
  const int tile_rows = kDecodePairs / limits_.group;
  decoded_.assign(batch.items.size(), false);
  if (!tile_rows) return;
  const bool cuts = needs_.lists.empty() ? cuts_chunks(batch) : limits_.short_chunks != ShortChunks::prefill;
  int kv_splits = 0;
  for (size_t i = 0; i < batch.items.size(); i++) {
    const Item& item = batch.items[i];
    if (item.count > (cuts ? kMostCutRows : tile_rows) || sees_ahead(batch, item)) continue;
    const int splits = splits_of(item);
    decoded_[i] = kv_splits + splits <= limits_.max_splits;
    if (decoded_[i]) kv_splits += splits;
  }
}

// Whether decode tiles are expected to compute chunks of a few rows in less time. They share each context out over all
// SMs, but read it once for every few rows. A prefill tile walks through the context on one SM. If decode tiles cannot
// hold all such chunks, none is cut: a step with long contexts in both kinds of tiles would take the time of both.
bool StepData::cuts_chunks(const Batch& batch) const {
  if (limits_.short_chunks != ShortChunks::fastest) return limits_.short_chunks == ShortChunks::decode;
  const int tile_rows = kDecodePairs / limits_.group;
  const double each = (double)limits_.kv_heads / limits_.sms;  // time of all SMs that a tile and KV head takes
  double decode = 0, prefill = 0, longest = 0;
  int kv_splits = 0;
  for (const Item& item : batch.items) {
    if (item.count > kMostCutRows || sees_ahead(batch, item)) continue;
    kv_splits += splits_of(item);
    if (item.count <= tile_rows) continue;
    const int end = needs_.selected ? std::min(item.start + item.count, needs_.selected) : item.start + item.count;
    const int blocks = (end + kBlockTokens - 1) / kBlockTokens, plain = plain_rows(item);
    const int tiles = (plain + tile_rows - 1) / tile_rows + item.count - plain,
              wide = (plain * limits_.group + kPrefillPairs - 1) / kPrefillPairs + item.count - plain;
    decode += tiles * each * (blocks + kDecodeSplit * kv_splits_of(end));
    prefill += wide * each * blocks, longest = std::max(longest, (double)blocks);
  }
  return kv_splits <= limits_.max_splits && decode <= std::max(prefill, longest) + kPrefillExtra;
}

// The tiles of `count` rows from position `start` on, of which each has one for every list shape. kv_splits: of the
// decode tiles before, of each shape.
void StepData::add_list_tiles(int row, int count, int start, int table, bool decodes, std::vector<int>& kv_splits,
                              Size& size) const {
  int& tiles = decodes ? size.decode_tiles : size.selected_tiles;
  for (int i = 0; i < count; i++, tiles++)
    for (size_t list = 0; list < needs_.lists.size(); list++) {
      const int length = needs_.lists[list].length(start + i + 1), splits = kv_splits_of(length);
      reinterpret_cast<AttentionTile*>(host(lists_ + (2 * list + !decodes) * list_))[tiles] = {
          row + i, 1, length - 1, table, decodes ? kv_splits[list] : 0, kSelected};
      if (!decodes) continue;
      kv_splits[list] += splits;
      if (splits > 1) size.kv_splits = 2;
    }
}

// Tiles without rows, as a step has that is padded, or does nothing.
void StepData::add_empty_tiles(int from, int to) const {
  std::fill(reinterpret_cast<AttentionTile*>(host(decode_tiles_)) + from,
            reinterpret_cast<AttentionTile*>(host(decode_tiles_)) + to, AttentionTile{});
  for (size_t list = 0; list < needs_.lists.size(); list++) {
    AttentionTile* const tiles = reinterpret_cast<AttentionTile*>(host(lists_ + 2 * list * list_));
    std::fill(tiles + from, tiles + to, AttentionTile{});
  }
}

StepData::Size StepData::copy(const Batch& batch, int padded, const StatePositions* states, const Device& device) {
  turn_ = 1 - turn_;
  choose_tiles(batch);
  Size size{(int)batch.rows.size(), (int)batch.outputs.size(), 0, 0, 1};
  int used = 0, kv_splits = 0;  // entries used of each group's table; of decode tiles
  *host(step_) = (int)steps_++;
  std::vector<int> list_splits(needs_.lists.size());
  AttentionTile *const decode = reinterpret_cast<AttentionTile*>(host(decode_tiles_)),
                       *const selected = reinterpret_cast<AttentionTile*>(host(selected_tiles_));
  for (size_t i = 0; i < batch.items.size(); i++) {
    const Item& item = batch.items[i];
    const Slot& slot = batch.slot(item.slot);
    const int spans = (item.start + item.count + span_size_ - 1) / span_size_;
    for (int g = 0; g < groups_; g++) {
      int* table = host(tables_) + g * table_ + used;
      const int behind = windows_[g] ? std::max(0, item.start + 1 - windows_[g]) / span_size_ : 0;
      std::fill_n(table, behind, no_span_);
      std::copy(slot.spans[g].begin() + behind, slot.spans[g].begin() + spans, table + behind);
    }
    size.adapted |= item.adapter >= 0;
    if (!needs_.lists.empty()) {
      add_list_tiles(item.row, item.count, item.start, used, decoded_[i], list_splits, size);
    } else if (decoded_[i]) {
      const int plain = plain_rows(item);
      cut(item, [&](int row, int rows, int seen) {
        const int splits = kv_splits_of(seen);
        decode[size.decode_tiles++] = {item.row + row, rows,      row < plain ? item.start + row : seen - 1,
                                       used,           kv_splits, row < plain ? row : kSelected};
        kv_splits += splits;
        if (splits > 1) size.kv_splits = 2;
      });
      size.stores &= item.count <= kOwnRows;
    } else {
      const int plain = plain_rows(item);
      if (plain) add_prefill({item.row, plain, item.start, used, 0, 0}, size);
      for (int row = plain; row < item.count; row++)
        selected[size.selected_tiles++] = {item.row + row, 1, needs_.selected - 1, used, 0, kSelected};
    }
    if (needs_.indexed) std::fill_n(host(row_tables_) + item.row, item.count, used);
    for (int r = item.row; r < item.row + item.count; r++) {
      const Row& row = batch.rows[r];
      host(tokens_)[r] = row.token, host(positions_)[r] = row.position, host(adapters_)[r] = item.adapter;
      host(prompts_)[r] = slot.sampling.prompt_len;
      for (int g = 0; g < groups_; g++)
        host(where_)[g * pitch_ + r] =
            slot.spans[g][row.position / span_size_] * span_size_ + row.position % span_size_;
    }
    add_sights(batch, item);
    used += spans;
  }
  if (needs_.given) std::fill_n(host(given_), size.rows, -1);
  size.given = !batch.given.empty();
  if (size.given) add_given(batch, device);
  for (int i = 0; i < size.outputs; i++) host(chosen_)[i] = batch.outputs[i].row;
  add_places(batch);
  if (needs_.sends) add_counts(size, padded);
  if (padded) {
    for (int r = size.rows; r < padded; r++) idle_row(r, 0);
    std::fill(host(chosen_) + size.outputs, host(chosen_) + padded, 0);
    size.rows = size.outputs = padded;
  }
  if (padded && !size.prefills()) {
    add_empty_tiles(size.decode_tiles, padded);
    size.decode_tiles = padded;
  }
  if (states) add_states(batch, padded, *states, size);
  send(size, used, device);
  return size;
}

void StepData::add_counts(const Size& size, int padded) const {
  host(counts_)[0] = size.rows, host(counts_)[1] = size.outputs;
  std::fill_n(host(padding_), size.outputs, 0);
  if (padded > size.outputs) std::fill_n(host(padding_) + size.outputs, padded - size.outputs, -1);
}

void StepData::add_places(const Batch& batch) const {
  if (needs_.keeps && batch.keeps.empty()) std::fill_n(host(keeps_), batch.rows.size(), -1);
  else if (needs_.keeps) std::copy(batch.keeps.begin(), batch.keeps.end(), host(keeps_));
  if (needs_.takes) std::copy(batch.takes.begin(), batch.takes.end(), host(takes_));
}

// The prefill tiles of an item's rows.
void StepData::add_prefill(AttentionTile tile, Size& size) const {
  const auto add = [&](int group, size_t offset, int& count) {
    AttentionTile* const tiles = reinterpret_cast<AttentionTile*>(host(offset));
    for (tile.first = 0; tile.first < tile.count * group; tile.first += kPrefillPairs) tiles[count++] = tile;
  };
  add(limits_.group, prefill_tiles_, size.prefill_tiles);
  if (limits_.narrow) add(limits_.narrow, narrow_tiles_, size.narrow_tiles);
}

// A row that is stored nowhere.
void StepData::idle_row(int r, int position) {
  host(tokens_)[r] = 0, host(positions_)[r] = position, host(prompts_)[r] = 1, host(adapters_)[r] = -1;
  for (int g = 0; g < groups_; g++) host(where_)[g * pitch_ + r] = -1;
  if (needs_.keeps) host(keeps_)[r] = -1;
  if (needs_.takes) host(takes_)[r] = 0;
  if (needs_.whole) host(ends_)[r] = position;
  if (needs_.separator >= 0) host(segments_)[r] = 0;
  if (needs_.segments || needs_.images) host(part_begins_)[r] = host(part_ends_)[r] = position;
  for (int part = 0; needs_.places && part < 3; part++) host(places_)[part * pitch_ + r] = position;
  for (int side = 0; needs_.places && side < 2; side++) host(sizes_)[side * pitch_ + r] = position + 1;
  if (needs_.given) host(given_)[r] = -1;
  if (needs_.indexed) host(row_tables_)[r] = 0;
}

StepData::Size StepData::copy_idle(const Size& wanted, const Device& device) {
  turn_ = 1 - turn_;
  Size size = wanted;
  *host(step_) = (int)steps_++;
  const bool prefills = wanted.prefill_tiles > 0;
  const int longest = prefills ? max_spans_ * span_size_ : 1;  // rows of a sequence
  size.prefill_tiles = size.narrow_tiles = 0;
  for (int row = 0; row < size.rows; row += longest) {
    AttentionTile tile{row, std::min(longest, size.rows - row), 0, 0, 0, 0};
    for (int i = 0; i < tile.count; i++) idle_row(row + i, i);
    std::vector<int> kv_splits(needs_.lists.size());
    if (prefills && needs_.lists.empty()) add_prefill(tile, size);
    else if (prefills) add_list_tiles(tile.row, tile.count, 0, 0, false, kv_splits, size);
  }
  std::fill_n(host(chosen_), size.outputs, 0);
  if (needs_.sends) add_counts({}, size.outputs);
  add_empty_tiles(0, size.decode_tiles);
  for (int g = 0; g < groups_; g++) std::fill_n(host(tables_) + g * table_, max_spans_, no_span_);
  if (chunks_ > state_items_) {  // ops have a state
    size.short_items = prefills ? 1 : size.rows;
    std::fill_n(reinterpret_cast<StateItem*>(host(state_items_)), size.short_items, StateItem{-1, 0, 0, 0, 0, 0, 0});
  }
  send(size, max_spans_, device);
  return size;
}

// Short items first; long ones with their chunks.
void StepData::add_states(const Batch& batch, int padded, const StatePositions& states, Size& size) const {
  StateItem* items = reinterpret_cast<StateItem*>(host(state_items_));
  StateChunk* chunks = reinterpret_cast<StateChunk*>(host(chunks_));
  const auto described = [&](const Item& item) {
    return StateItem{item.slot, item.row, item.start, item.count, item.drafts, states.position(item.slot), 0};
  };
  for (const Item& item : batch.items)
    if (item.count <= kShortRows) items[size.short_items++] = described(item);
  while (size.short_items < padded) items[size.short_items++] = {-1, 0, 0, 0, 0, 0, 0};
  int from_states = 0;
  for (const Item& item : batch.items) {
    if (item.count <= kShortRows) continue;
    const int index = size.short_items + size.long_items++;
    items[index] = described(item), items[index].chunks = from_states;
    from_states += (item.start + item.count - items[index].position) / kChunkRows;
    for (int at = state_position(item.start); at < item.start + item.count; at += kChunkRows)
      chunks[size.chunks++] = {index, at};
  }
}

// Queues the copy of a step's arrays. A small step copies the beginning of each array in one two-dimensional copy; a
// larger one copies all arrays.
void StepData::send(const Size& size, int used, const Device& device) const {
  const auto copy = [&](size_t begin, size_t ints, size_t height) {
    check(cudaMemcpy2DAsync(device_memory_.as<int>() + begin, pitch_ * sizeof(int), host(begin), pitch_ * sizeof(int),
                            ints * sizeof(int), height, cudaMemcpyHostToDevice, device.stream()),
          "copying a step's rows");
  };
  const auto copy_all = [&](size_t begin, size_t ints) {
    check(cudaMemcpyAsync(device_memory_.as<int>() + begin, host(begin), ints * sizeof(int), cudaMemcpyHostToDevice,
                          device.stream()),
          "copying a step's rows");
  };
  const size_t most =
                   std::max({size.rows, size.outputs, size.decode_tiles * (int)kTileInts,
                             size.prefill_tiles * (int)kTileInts, size.selected_tiles * (int)kTileInts,
                             size.chunks * (int)kChunkInts, (size.short_items + size.long_items) * (int)kItemInts, 2}),
               small = pitch_ / 4, tables = used;
  if (most > small) copy_all(0, tables_);
  else if (tables > small) copy(0, most, tables_ / pitch_);
  else return copy(0, std::max(most, tables), (tables_ + (groups_ - 1) * table_) / pitch_ + 1);
  for (int g = 0; g < groups_ && used; g++) copy_all(tables_ + g * table_, tables);
}

}  // namespace as::cuda
