#include "cuda/hot_experts.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace as::cuda {
namespace {

constexpr unsigned kCountedSteps = 8;  // steps from one look at uses to the next
constexpr int kMostMoves = 32;         // experts that move at a time
constexpr float kKept = 0.9f;          // of a score, at each look
// An expert replaces another one if its score is so much higher: a move costs as much memory bandwidth as tens of uses.
constexpr float kBetter = 1.3f, kBetterBy = 4;

}  // namespace

HotExperts::HotExperts(const Device& device, ExpertStream& source, const StreamLimits& limits, size_t bytes)
    : device_(device), source_(source), experts_(source.experts()) {
  device_.use();
  const int ranks = source.ranks(), layers = source.layers(),
            rows = std::clamp(source.first_rows() - 1, 1, limits.rows);  // of steps that are not streamed
  size_t table_bytes = 0, row_bytes = 0;
  const auto take = [](size_t& used, size_t size) {
    const size_t at = used;
    used += round_up_256(size);
    return at;
  };
  std::vector<size_t> routings_at, entries_at;
  for (int i = 0; i < layers; i++) {
    Tables tables;
    tables.hot = take(table_bytes, experts_ * sizeof(int));
    std::vector<size_t> slots(experts_);  // of each expert's slices
    for (int rank = 0; rank < ranks; rank++) {
      const ExpertStream::Layer& of = source.layer(rank, i);
      for (auto* at : {&tables.gate_up, &tables.down})
        at->push_back(take(table_bytes, (of.end - of.begin) * sizeof(char*)));
      for (int e = of.begin; e < of.end; e++) slots[e] += round_up_256(of.gate_up.bytes) + round_up_256(of.down.bytes);
    }
    layers_.push_back(tables);
    slot_bytes_ = std::max(slot_bytes_, *std::max_element(slots.begin(), slots.end()));
  }
  for (int rank = 0; rank < ranks; rank++) {
    int width = 0;
    for (int i = 0; i < layers; i++) width = std::max(width, source.layer(rank, i).down.n);
    routings_at.push_back(take(row_bytes, routing_bytes(rows, limits.top, experts_)));
    entries_at.push_back(take(row_bytes, (size_t)rows * limits.top * width * sizeof(float)));
  }
  const size_t all = (size_t)layers * experts_, use_bytes = round_up_256(all * sizeof(uint32_t)) + 256,
               fixed = table_bytes + row_bytes + use_bytes;
  const size_t count = bytes > fixed ? std::min((bytes - fixed) / slot_bytes_, all) : 0;
  if (!count)
    throw std::invalid_argument("no expert fits: " + std::to_string(fixed) + " bytes are for entries of " +
                                std::to_string(rows) + " rows, " + std::to_string(slot_bytes_) + " for each expert");
  tables_ = Memory(table_bytes, "addresses of experts"), rows_ = Memory(row_bytes, "entries of hot experts");
  host_tables_ = Memory(table_bytes, "addresses of experts", Memory::Where::host);
  uses_ = Memory(use_bytes, "uses of experts"), seen_ = Memory(use_bytes, "uses of experts", Memory::Where::host);
  slots_ = Memory(count * slot_bytes_, "hot experts", Memory::Where::lent);
  for (int rank = 0; rank < ranks; rank++) {
    Routing routing;
    routing.top = limits.top;
    place_routing(rows_.as() + routings_at[rank], rows, experts_, routing);
    routings_.push_back(routing);
    entries_of_.push_back(reinterpret_cast<float*>(rows_.as() + entries_at[rank]));
  }
  before_.resize(all), scores_.resize(all), slot_of_.assign(all, -1), expert_in_.assign(count, -1);
  check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "making a stream");
  for (cudaEvent_t* event : {&counted_, &published_, &moved_})
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
}

HotExperts::~HotExperts() {
  cudaSetDevice(device_.index());
  cudaStreamSynchronize(device_.stream());
  if (copies_) cudaStreamSynchronize(copies_), cudaStreamDestroy(copies_);
  for (cudaEvent_t event : {counted_, published_, moved_})
    if (event) cudaEventDestroy(event);
  cudaGetLastError();  // nothing more can be done about it
}

HotExpertsOfLayer HotExperts::of_layer(int layer) {
  const size_t hits_at = round_up_256(before_.size() * sizeof(uint32_t));
  return {flags(layer), uses_.as<uint32_t>() + (size_t)layer * experts_,
          reinterpret_cast<unsigned long long*>(uses_.as() + hits_at)};
}

void HotExperts::multiply(int layer, const float* x, const Routing& chosen, int rows) {
  const Queue queue = device_.queue();
  const int entries = rows * chosen.top;
  for (int rank = 0; rank < source_.ranks(); rank++) {
    const ExpertStream::Layer& of = source_.layer(rank, layer);
    Routing& routing = routings_[rank];
    group_choices(chosen, of.begin, of.end, rows, routing, queue);
    const auto products = [&](ExactGemm& p, bool down) {
      p.experts = panels(layer, rank, down);
      gemm_exact(p, entries, queue);
    };
    multiply_exact_layer(of, products, x, rows, routing, source_.scratch(), entries_of_[rank], queue);
  }
}

MetEntries HotExperts::met(int layer, const Routing& chosen) const {
  MetEntries met;
  met.top = chosen.top, met.chosen = chosen.entry_of, met.shares = chosen.shares;
  met.hot = flags(layer);
  for (int e = 0; e < experts_; e++) met.by_ranks.add(e);
  for (int rank = 0; rank < source_.ranks(); rank++) {
    const ExpertStream::Layer& of = source_.layer(rank, layer);
    met.ranks[rank] = {of.begin, of.end, routings_[rank].entry_of, entries_of_[rank]};
  }
  return met;
}

void HotExperts::between_steps() {
  const auto done = [](cudaEvent_t event) {
    const cudaError_t result = cudaEventQuery(event);
    if (result != cudaErrorNotReady) check(result, "moving experts");
    return result == cudaSuccess;
  };
  if (state_ == State::idle && ++steps_ % kCountedSteps == 0) {
    check(cudaMemcpyAsync(seen_.as(), uses_.as(), seen_.size(), cudaMemcpyDeviceToHost, device_.stream()),
          "copying uses of experts");
    check(cudaEventRecord(counted_, device_.stream()), "recording an event");
    state_ = State::counting;
  } else if (state_ == State::counting && done(counted_)) {
    weigh();
    choose();
    if (!moves_.empty()) begin_moves();
    state_ = moves_.empty() ? State::idle : State::moving;
  } else if (state_ == State::moving && done(moved_)) {
    for (const Move& move : moves_) set_hot(move.expert, move.slot);
    publish();
    state_ = State::idle;
  }
}

void HotExperts::give_back() {
  device_.wait();
  check(cudaStreamSynchronize(copies_), "moving experts");
  for (int& present : expert_in_) {
    if (present >= 0) set_hot(present, -1);
    present = -1;
  }
  publish();
  device_.wait();
  moves_.clear(), state_ = State::idle;
  slots_.give_back();
}

void HotExperts::weigh() {
  const uint32_t* const seen = seen_.as<uint32_t>();
  int64_t entries = 0;
  for (size_t i = 0; i < scores_.size(); i++) {
    const uint32_t fresh = seen[i] - before_[i];
    scores_[i] = kKept * scores_[i] + (float)fresh;
    before_[i] = seen[i], entries += fresh;
  }
  unsigned long long hits;
  std::memcpy(&hits, seen_.as() + round_up_256(scores_.size() * sizeof(uint32_t)), sizeof hits);
  entries_.fetch_add(entries, std::memory_order_relaxed), hits_.store((int64_t)hits, std::memory_order_relaxed);
}

// The experts of the highest scores that have no slot get those that are free, or those of the lowest scores.
void HotExperts::choose() {
  moves_.clear();
  std::vector<int> wanted, slots(expert_in_.size());
  for (int i = 0; i < (int)scores_.size(); i++)
    if (slot_of_[i] < 0 && scores_[i] > 0) wanted.push_back(i);
  std::iota(slots.begin(), slots.end(), 0);
  const auto score = [&](int expert) { return expert < 0 ? -1.0f : scores_[expert]; };
  const size_t count = std::min({wanted.size(), slots.size(), (size_t)kMostMoves});
  std::partial_sort(wanted.begin(), wanted.begin() + count, wanted.end(),
                    [&](int a, int b) { return scores_[a] > scores_[b]; });
  std::partial_sort(slots.begin(), slots.begin() + count, slots.end(),
                    [&](int a, int b) { return score(expert_in_[a]) < score(expert_in_[b]); });
  for (size_t i = 0; i < count; i++) {
    const int present = expert_in_[slots[i]];
    if (present >= 0 && scores_[wanted[i]] < kBetter * scores_[present] + kBetterBy) break;
    moves_.push_back({wanted[i], slots[i]});
  }
}

// Steps that were queued before may use the experts that go: copies begin when these have ended.
void HotExperts::begin_moves() {
  bool any = false;
  for (const Move& move : moves_)
    if (const int present = expert_in_[move.slot]; present >= 0) set_hot(present, -1), any = true;
  if (any) publish();
  check(cudaEventRecord(published_, device_.stream()), "recording an event");
  check(cudaStreamWaitEvent(copies_, published_), "waiting for steps");
  for (const Move& move : moves_) {
    char* to = slots_.as() + move.slot * slot_bytes_;
    const int layer = move.expert / experts_, expert = move.expert % experts_;
    for (int rank = 0; rank < source_.ranks(); rank++) {
      const ExpertStream::Layer& of = source_.layer(rank, layer);
      if (expert < of.begin || expert >= of.end) continue;
      for (const auto& [matrix, at] : {std::pair(&of.gate_up, of.gate_up_at), std::pair(&of.down, of.down_at)}) {
        source_.copy(to, rank, at + (expert - of.begin) * (uint64_t)matrix->bytes, matrix->bytes, copies_);
        to += round_up_256(matrix->bytes);
      }
    }
    expert_in_[move.slot] = move.expert;
  }
  check(cudaEventRecord(moved_, copies_), "recording an event");
}

void HotExperts::set_hot(int expert, int slot) {
  char* const tables = host_tables_.as();
  const int layer = expert / experts_, number = expert % experts_;
  const char* at = slot < 0 ? nullptr : slots_.as() + slot * slot_bytes_;
  reinterpret_cast<int*>(tables + layers_[layer].hot)[number] = slot >= 0;
  slot_of_[expert] = slot;
  for (int rank = 0; rank < source_.ranks(); rank++) {
    const ExpertStream::Layer& of = source_.layer(rank, layer);
    if (number < of.begin || number >= of.end) continue;
    for (const auto& [matrix, table] :
         {std::pair(&of.gate_up, layers_[layer].gate_up[rank]), std::pair(&of.down, layers_[layer].down[rank])}) {
      reinterpret_cast<const char**>(tables + table)[number - of.begin] = at;
      if (at) at += round_up_256(matrix->bytes);
    }
  }
}

// The next change of host_tables_ follows an event that is recorded after this copy.
void HotExperts::publish() {
  check(cudaMemcpyAsync(tables_.as(), host_tables_.as(), tables_.size(), cudaMemcpyHostToDevice, device_.stream()),
        "copying addresses of experts");
}

}  // namespace as::cuda
