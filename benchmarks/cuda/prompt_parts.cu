// Kernels of prompts that Qwen3.6-35B-A3B's layers take besides products and attention: microseconds, and the
// part of the time that their bytes take; and their bits. Experts are compared with the kernels for few entries, lists
// of entries with what they must be, sums with those of two kernels. Values of the other kernels are shown as a number,
// which is to be the same before and after a change.
//   nvcc -std=c++17 -O3 -DAS_DTYPE16=bf16 -Inative -gencode=arch=compute_90a,code=sm_90a
//   benchmarks/cuda/prompt_parts.cu
//        native/cuda/kernel_choice.cpp
//        native/cuda/kernels/{moe/{combine_experts,experts,gemm_experts,gemm_experts_8bit,
//        gemm_experts_prefill},gemm/gemm_small_n,quantize/pack,recurrent/{causal_conv,gated_delta,
//        gated_delta_chunks,gated_delta_rows}}.cu
//        -o prompt_parts
//   prompt_parts [lists,sums,convolution,rule,logits,experts]
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/common/dtype16.h"
#include "cuda/kernels/moe/dispatch.h"
#include "cuda/kernels/norm/norm.h"
#include "cuda/weights/dtype16.h"
#include "timing.h"

using namespace as::cuda;
namespace typed = AS_DTYPE16;

static cudaStream_t stream;
static Queue queue;
static double bandwidth = 4.2e6;  // bytes in a microsecond

// A copy that other streams may read: cudaMemcpy() returns before it has ended.
template <typename T>
static T* copied(const std::vector<T>& values) {
  T* to = memory<T>(values.size() * sizeof(T));
  check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  check(cudaDeviceSynchronize());
  return to;
}
static float* floats(size_t count, uint64_t seed, float size = 1) {
  std::mt19937 random(seed);
  std::vector<float> values(std::min<size_t>(count, 1 << 22));
  for (float& v : values) v = size * ((float)(random() >> 8) / (1 << 23) - 1);
  float* to = memory<float>(count * 4);
  for (size_t at = 0; at < count; at += values.size())
    check(cudaMemcpy(to + at, values.data(), std::min(values.size(), count - at) * 4, cudaMemcpyHostToDevice));
  check(cudaDeviceSynchronize());
  return to;
}
template <typename T>
static std::vector<T> host(const T* data, size_t count) {
  std::vector<T> values(count);
  check(cudaStreamSynchronize(stream));
  check(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}
static uint64_t number_of(const void* data, size_t bytes) {
  uint64_t number = 1469598103934665603ull;
  for (uint64_t word : host(static_cast<const uint64_t*>(data), bytes / 8)) number = (number ^ word) * 1099511628211ull;
  return number;
}
static void time_it(const char* name, double bytes, const std::function<void()>& launch) {
  launch();
  const double us = 1e3 *
                    least_ms_of_graph(stream, 5,
                                      [&] {
                                        for (int i = 0; i < 8; i++) launch();
                                      }) /
                    8;
  std::printf("  %s %.1f us, %.2f of %.1f\n", name, us, bytes / bandwidth / us, bytes / bandwidth);
}

struct Entries {
  Routing routing;
  std::vector<int> chosen, entry_of;
};
// skew: how unequal experts are; part: of all experts, those that are this rank's.
static void choose(Entries& e, int rows, int top, int experts, float skew, uint64_t seed) {
  std::mt19937 random(seed);
  std::vector<float> liked(experts);
  for (float& v : liked) v = skew * ((float)(random() >> 8) / (1 << 24));
  e.chosen.clear();
  std::vector<std::pair<float, int>> order(experts);
  for (int row = 0; row < rows; row++) {
    for (int i = 0; i < experts; i++) order[i] = {-liked[i] - (float)(random() >> 8) / (1 << 24), i};
    std::partial_sort(order.begin(), order.begin() + top, order.end());
    std::vector<int> own;
    for (int i = 0; i < top; i++) own.push_back(order[i].second);
    std::sort(own.begin(), own.end());
    e.chosen.insert(e.chosen.end(), own.begin(), own.end());
  }
}
static void group(Entries& e, int rows, int tile_rows) {
  check(cudaMemcpy(e.routing.entry_of, e.chosen.data(), e.chosen.size() * 4, cudaMemcpyHostToDevice));
  check(cudaDeviceSynchronize());
  group_entries(e.routing, rows, tile_rows, queue);
  e.entry_of = host(e.routing.entry_of, e.chosen.size());
}
static Entries entries_of(int rows, int top, int begin, int end) {
  Entries e;
  e.routing.top = top, e.routing.begin = begin, e.routing.end = end;
  place_routing(memory<char>(routing_bytes(rows, top, end - begin)), rows, end - begin, e.routing);
  return e;
}

static bool lists_are_right(const Entries& e, int tile_rows) {
  const int count = host(e.routing.tile_count, 1)[0], experts = e.routing.end - e.routing.begin;
  std::vector<int> of(experts), seen(e.chosen.size());
  for (size_t i = 0; i < e.chosen.size(); i++)
    if (const int x = e.chosen[i] - e.routing.begin; x >= 0 && x < experts) of[x]++;
  std::vector<int> first(experts);
  int at = 0, tile = 0;
  const auto tiles = host(e.routing.tiles, count);
  for (int x = 0; x < experts; x++) {
    first[x] = at;
    for (int done = 0; done < of[x]; done += tile_rows, tile++)
      if (tile >= count || tiles[tile].expert != x || tiles[tile].first != at + done ||
          tiles[tile].count != std::min(tile_rows, of[x] - done))
        return false;
    at += of[x];
  }
  const auto row_of = host(e.routing.row_of, at);
  for (size_t i = 0; i < e.chosen.size(); i++) {
    const int x = e.chosen[i] - e.routing.begin, entry = e.entry_of[i];
    if (x < 0 || x >= experts) {
      if (entry != -1) return false;
    } else if (entry < first[x] || entry >= first[x] + of[x] || seen[entry]++ ||
               row_of[entry] != (int)i / e.routing.top) {
      return false;
    }
  }
  return tile == count;
}

static Matrix in_tiles(int n, int k, int experts, uint64_t seed) {
  const size_t bytes = tiles_bytes(n, k) * experts;
  uint16_t* tiles = memory<uint16_t>(bytes);
  typed::fill_noise(tiles, bytes, kDType16, 0.035f, seed, queue);
  Matrix m{n, k, Kind::dtype16, kDType16, nullptr, tiles, {}, 1, experts};
  return m;
}

// Both products of experts; how many of the last values differ from those of the kernels for few entries, in float32
// and rounded to bfloat16.
static void experts_of(int rows, int hidden, int inner, int experts, int top, float skew, bool timed) {
  const Matrix up = in_tiles(2 * inner, hidden, experts, 3), down = in_tiles(hidden, inner, experts, 4);
  const size_t count = (size_t)rows * top;
  const Rows x{nullptr, memory<uint16_t>(tiles_bytes(rows, hidden)), hidden},
      gated{nullptr, memory<uint16_t>(tiles_bytes((int)count, inner)), inner},
      made{memory<float>(count * hidden * 4), nullptr, hidden},
      made16{nullptr, memory<uint16_t>(tiles_bytes((int)count, hidden)), hidden};
  typed::fill_noise(x.tiles, tiles_bytes(rows, hidden), kDType16, 1, 7, queue);
  Entries e = entries_of(rows, top, 0, experts);
  choose(e, rows, top, experts, skew, 5);
  ExpertGemmArgs first, second;
  first.gemm.w = up, first.gemm.x = x, first.gemm.y = gated, first.gemm.gated = true, first.gathers = true;
  second.gemm.w = down, second.gemm.x = gated, second.gemm.y = made, second.follows = true;
  first.routing = second.routing = e.routing;
  const auto compute = [&](const ExpertChoice& c) {
    group(e, rows, c.tile_rows);
    check(cudaMemset(gated.tiles, 0, tiles_bytes((int)count, inner)));
    check(cudaDeviceSynchronize());
    typed::gemm_experts(first, (int)count, c.tile_rows, queue, c.algo);
    for (const Rows& to : {made, made16})
      second.gemm.y = to, typed::gemm_experts(second, (int)count, c.tile_rows, queue, c.algo);
    return host(made.values, count * hidden);
  };
  const ExpertChoice choice = choose_expert_gemm(chip_of(queue), Kind::dtype16, (int)count, experts);
  const std::vector<float> right = compute({GemmAlgo::mma, 64});
  const std::vector<int> before = e.entry_of;
  for (int tile_rows : {choice.tile_rows, 128}) {
    const std::vector<float> found = compute({tile_rows < 64 ? choice.algo : GemmAlgo::prefill, tile_rows});
    const std::vector<uint16_t> found16 = host(made16.tiles, tiles_bytes((int)count, hidden) / 2);
    size_t other = 0, other16 = 0;
    for (size_t i = 0; i < count; i++)
      for (int j = 0; j < hidden; j++) {
        const float value = right[before[i] * (size_t)hidden + j];
        other += std::memcmp(&value, &found[e.entry_of[i] * (size_t)hidden + j], 4) != 0;
        other16 += rounded(value, kDType16) != found16[tile_offset(e.entry_of[i], j, blocks_of(hidden))];
      }
    std::printf("experts: %d rows, %d x %d, %d of %d, tiles of %d: %d tiles; %zu and %zu other bits, lists %s\n", rows,
                hidden, inner, top, experts, tile_rows, host(e.routing.tile_count, 1)[0], other, other16,
                lists_are_right(e, tile_rows) ? "right" : "WRONG");
  }
  if (timed) {
    compute(choice);
    const double weights = (double)experts * tiles_bytes(hidden, inner);
    time_it("gate and up", 2 * weights + 2.0 * rows * hidden + 2.0 * count * inner,
            [&] { typed::gemm_experts(first, (int)count, choice.tile_rows, queue, choice.algo); });
    second.gemm.y = made;
    time_it("down", weights + 2.0 * count * inner + 4.0 * count * hidden,
            [&] { typed::gemm_experts(second, (int)count, choice.tile_rows, queue, choice.algo); });
    second.gemm.y = made16;
    time_it("down, 16-bit entries", weights + 2.0 * count * inner + 2.0 * count * hidden,
            [&] { typed::gemm_experts(second, (int)count, choice.tile_rows, queue, choice.algo); });
  }
  for (void* data : {(void*)up.tiles, (void*)down.tiles, (void*)x.tiles, (void*)gated.tiles, (void*)made.values,
                     (void*)made16.tiles})
    check(cudaFree(data));
}

static void lists(int rows, int top, int begin, int end, int all, bool timed) {
  Entries e = entries_of(rows, top, begin, end);
  choose(e, rows, top, all, 0.5f, rows);
  if (rows > 3)
    for (int i = 0; i < top; i++) e.chosen[2 * top + i] = -1;  // a row of padding
  group(e, rows, 64);
  std::printf("lists of %d rows, experts %d to %d: %s\n", rows, begin, end, lists_are_right(e, 64) ? "right" : "WRONG");
  if (!timed) return;
  // Lists become choices again, so that each launch has some.
  const int* chosen = copied(e.chosen);
  const auto restore = [&] {
    check(cudaMemcpyAsync(e.routing.entry_of, chosen, e.chosen.size() * 4, cudaMemcpyDeviceToDevice, stream));
  };
  time_it("copied choices", 8.0 * e.chosen.size(), restore);
  time_it("with lists", 24.0 * e.chosen.size(), [&] { restore(), group_entries(e.routing, rows, 128, queue); });
}

// halves: entries have 16 bits.
static void sums(int rows, int width, int top, bool halves, bool timed) {
  const int experts = 64;
  Entries e = entries_of(rows, top, 0, experts);
  choose(e, rows, top, experts + 3, 0, rows);  // other ranks have the last three
  group(e, rows, 64);
  const size_t count = (size_t)rows * width;
  float *values = floats(count * top, 1), *shared = floats(count, 2), *start = floats(count, 3), *x = floats(count, 4),
        *gate = floats(width, 5, 0.05f), *norm = floats(width, 6), *routed = memory<float>(count * 4),
        *y = memory<float>(count * 4), *shares = floats((size_t)rows * top, 8);
  check(cudaMemcpy(e.routing.shares, shares, (size_t)rows * top * 4, cudaMemcpyDeviceToDevice));
  check(cudaDeviceSynchronize());
  uint16_t* tiles = memory<uint16_t>(tiles_bytes(rows, width));
  Combination c;
  uint16_t* const entries16 = memory<uint16_t>(tiles_bytes(rows * top, width));
  typed::fill_noise(entries16, tiles_bytes(rows * top, width), kDType16, 1, 9, queue);
  c.y = {routed, nullptr, width},
  c.entries = {halves ? nullptr : values, halves ? entries16 : nullptr, width, kDType16};
  c.routing = e.routing;
  SharedSum plain;
  plain.adds = true, plain.y = {y, nullptr, width}, plain.norm = {norm, 1e-6f, true},
  plain.normed = {nullptr, tiles, width};
  plain.gate.w = {1, width, Kind::f32, kDType16, gate}, plain.gate.x = {x, nullptr, width};
  plain.shared = shared, plain.routed = routed;
  SharedSum one = plain;
  one.entries = c.entries, one.routing = e.routing;
  const auto reset = [&] { check(cudaMemcpyAsync(y, start, count * 4, cudaMemcpyDeviceToDevice, stream)); };
  const auto numbers = [&] { return number_of(y, count * 4) ^ 3 * number_of(tiles, tiles_bytes(rows, width)); };
  const auto two_kernels = [&] {
    typed::combine_experts(c, rows, queue), typed::add_shared_expert(plain, rows, queue);
  };
  reset(), two_kernels();
  const uint64_t two = numbers();
  check(cudaMemset(tiles, 0, tiles_bytes(rows, width))), check(cudaDeviceSynchronize());
  reset(), typed::add_shared_expert(one, rows, queue);
  std::printf("sums of %d x %d, %d %s entries: %016llx, one kernel %s\n", rows, width, top,
              halves ? "16-bit" : "float32", (unsigned long long)two, numbers() == two ? "the same" : "OTHER");
  if (timed) {
    const double of_entries = (halves ? 2.0 : 4.0) * count * top, bytes = of_entries + 18.0 * count;
    time_it("two kernels", bytes + 8.0 * count, two_kernels);
    time_it("entries alone", of_entries + 4.0 * count, [&] { typed::combine_experts(c, rows, queue); });
    time_it("one kernel", bytes, [&] { typed::add_shared_expert(one, rows, queue); });
  }
  for (float* data : {values, shared, start, x, gate, norm, routed, y, shares}) check(cudaFree(data));
  check(cudaFree(entries16));
}

static void convolution(const std::vector<int>& counts, int start, int channels, bool timed) {
  CausalConv p;
  p.channels = channels, p.taps = 4, p.activated = true;
  int rows = 0;
  std::vector<StateItem> items;
  std::vector<StateChunk> chunks;
  for (int n : counts) {
    const int item = (int)items.size();
    items.push_back({item, rows, start, n, 0, start / kChunkRows * kChunkRows});
    for (int at = start / kChunkRows * kChunkRows; at < start + n; at += kChunkRows) chunks.push_back({item, at});
    rows += n;
  }
  const StateItem* item_list = copied(items);
  const StateChunk* chunk_list = copied(chunks);
  p.pages.bytes = causal_conv_bytes(channels, 4);
  const size_t page = p.pages.bytes.state + p.pages.bytes.recent;
  p.pages.data = reinterpret_cast<char*>(floats(page * items.size() / 4, 11));
  p.x = floats((size_t)rows * channels, 12), p.weight = floats(4 * channels, 13),
  p.y = memory<float>((size_t)rows * channels * 4);
  const bool is_long = counts[0] > kShortRows;
  const StateRows all{item_list, chunk_list, is_long ? 0 : (int)items.size(), is_long ? (int)items.size() : 0,
                      is_long ? (int)chunks.size() : 0};
  causal_conv(p, all, queue);
  std::printf("convolution of %d rows at %d, %d channels: %016llx %016llx\n", rows, start, channels,
              (unsigned long long)number_of(p.y, (size_t)rows * channels * 4),
              (unsigned long long)number_of(p.pages.data, page * items.size()));
  if (timed) time_it("all", 8.0 * rows * channels, [&] { causal_conv(p, all, queue); });
}

static void rule(const std::vector<int>& counts, int start, const DeltaShape& shape, bool timed) {
  GatedDelta p;
  p.shape = shape;
  int rows = 0;
  std::vector<StateItem> items;
  std::vector<StateChunk> chunks;
  for (int n : counts) {
    const int item = (int)items.size();
    items.push_back({item, rows, start, n, n % 5, start / kChunkRows * kChunkRows});
    for (int at = start / kChunkRows * kChunkRows; at < start + n; at += kChunkRows) chunks.push_back({item, at});
    rows += n;
  }
  const StateItem* item_list = copied(items);
  const StateChunk* chunk_list = copied(chunks);
  p.pages.bytes = gated_delta_bytes(shape);
  const size_t page = p.pages.bytes.state + p.pages.bytes.recent,
               width = 2 * shape.key_heads * shape.key + shape.heads * shape.value;
  p.pages.data = memory<char>(page * items.size());
  p.x = floats(rows * width, 31), p.gates = floats(2 * rows * shape.heads, 32, 3);
  p.y = memory<float>((size_t)rows * shape.heads * shape.value * 4);
  p.a_log = floats(shape.heads, 33), p.dt_bias = floats(shape.heads, 34);
  p.scratch = memory<char>(gated_delta_scratch(shape, rows, rows)), p.max_rows = rows;
  // What came before the step: rows from 0 to start, so that the ring has deltas.
  if (start) {
    std::vector<StateItem> before = items;
    std::vector<StateChunk> of_before;
    for (size_t i = 0; i < items.size(); i++) {
      before[i].row = 0, before[i].start = before[i].position = before[i].drafts = 0, before[i].count = start;
      for (int at = 0; at < start; at += kChunkRows) of_before.push_back({(int)i, at});
    }
    GatedDelta first = p;
    first.x = floats(start * width, 35), first.gates = floats(2 * start * shape.heads, 36, 3);
    first.y = memory<float>((size_t)start * shape.heads * shape.value * 4);
    first.scratch = memory<char>(gated_delta_scratch(shape, start, start)), first.max_rows = start;
    for (size_t i = 0; i < items.size(); i++) {  // one after the other: they share the scratch memory
      const StateItem* one = copied(std::vector<StateItem>{before[i]});
      const StateChunk* list =
          copied(std::vector<StateChunk>(of_before.begin(), of_before.begin() + of_before.size() / items.size()));
      first.x = floats(start * width, 35 + i);
      gated_delta(first,
                  {one, list, start <= kShortRows, start > kShortRows,
                   start > kShortRows ? (int)(of_before.size() / items.size()) : 0},
                  queue);
      check(cudaStreamSynchronize(stream));
    }
  }
  const StateRows all{item_list, chunk_list, 0, (int)items.size(), (int)chunks.size()};
  gated_delta(p, all, queue);
  std::printf("rule of %zu x %d rows at %d, %d heads of %d x %d: %016llx %016llx\n", counts.size(), counts[0], start,
              shape.heads, shape.key, shape.value,
              (unsigned long long)number_of(p.y, (size_t)rows * shape.heads * shape.value * 4),
              (unsigned long long)number_of(p.pages.data, page * items.size()));
  if (timed) time_it("all", 4.0 * rows * (width + shape.heads * shape.value), [&] { gated_delta(p, all, queue); });
}

static void logits(int rows, int k, int n, bool timed) {
  GemmArgs p;
  p.w = {n, k, Kind::f32, kDType16, floats((size_t)n * k, 21)}, p.x = {floats((size_t)rows * k, 22), nullptr, k};
  p.y = {memory<float>((size_t)rows * n * 4 + 8), nullptr, n};
  gemm_small_n(p, rows, queue);
  std::printf("logits of %d x %d, %d columns: %016llx\n", rows, k, n,
              (unsigned long long)number_of(p.y.values, (size_t)rows * n * 4));
  if (!timed) return;
  time_it("logits", 4.0 * rows * (k + n), [&] { gemm_small_n(p, rows, queue); });
  Entries e = entries_of(rows, 8, 0, n);
  Router router;
  router.experts = n, router.normalized = true;
  time_it("choice", 4.0 * rows * n, [&] { choose_experts(p.y.values, router, e.routing, nullptr, rows, queue); });
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IONBF, 0);
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  queue = Queue{stream, 90, {}};
  const auto wanted = [&](const char* part) { return argc < 2 || std::strstr(argv[1], part); };
  if (wanted("lists")) {
    for (int rows : {1, 7, 512, 513, 769, 4096, 8191}) lists(rows, 8, 0, 256, 256, rows == 4096);
    lists(2049, 8, 64, 191, 256, false), lists(1033, 6, 0, 600, 601, false), lists(4099, 4, 3, 8, 9, false);
  }
  if (wanted("sums")) {
    for (bool halves : {false, true}) {
      for (int rows : {1, 13, 1023, 1031, 4096}) sums(rows, 2048, 8, halves, rows == 4096);
      sums(1025, 1096, 5, halves, false), sums(31, 4104, 11, halves, false), sums(2003, 132, 3, halves, false);
    }
  }
  if (wanted("convolution")) {
    convolution({1024, 1024, 1024, 1024}, 0, 8192, true), convolution({4096}, 0, 8192, true);
    convolution({13, 64, 129, 65}, 0, 260, false), convolution({131}, 67, 8192, false);
    convolution({5, 1}, 66, 132, false);
  }
  if (wanted("rule")) {
    const DeltaShape large{128, 128, 16, 32};
    rule({1024, 1024, 1024, 1024}, 0, large, true), rule({4096}, 0, large, true), rule({4096, 4096}, 0, large, true);
    for (int start : {0, 1, 16, 37, 63, 64, 67, 127})
      for (int rows : {9, 64, 131}) rule({rows, rows + 17}, start, large, false);
    rule({77, 200, 13}, 5, {96, 72, 2, 6}, false), rule({300, 64}, 70, {64, 128, 3, 3}, false);
    rule({201, 64}, 30, {20, 36, 1, 2}, false), rule({640, 640, 640}, 20, {128, 64, 16, 32}, false);
  }
  if (wanted("logits")) {
    for (int rows : {257, 4096, 8192, 1031}) logits(rows, 2048, 256, rows >= 4096);
    logits(300, 132, 31, false), logits(1409, 2880, 128, true), logits(2000, 324, 70, false);
    logits(2048, 2880, 32, true), logits(4096, 2880, 32, true), logits(700, 128, 513, false);
  }
  if (wanted("experts")) {
    experts_of(701, 192, 96, 5, 2, 0.5f, false), experts_of(257, 64, 320, 3, 1, 0, false);
    experts_of(1531, 130, 70, 7, 3, 1, false), experts_of(641, 1088, 40, 4, 1, 0, false);
    experts_of(4096, 2048, 512, 256, 8, 0, true), experts_of(4096, 2048, 512, 256, 8, 0.5f, true);
    for (int rows : {2048, 8192}) experts_of(rows, 2048, 512, 256, 8, 0, true);
  }
}
