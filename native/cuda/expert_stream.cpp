#include "cuda/expert_stream.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

namespace as::cuda {
namespace {

constexpr int kSlots = 4;
constexpr size_t kSmallestSlot = 1 << 16, kLargestSlot = 64 << 20;
constexpr size_t kPinned = (size_t)1 << 30;  // bytes that are pinned at a time
constexpr double kPinSeconds = 120;          // for all of them
constexpr float kKept = 0.7f;                // of an expert's uses, at each look

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

ExactGate gate_of(ExpertGate gate) {
  switch (gate) {
    case ExpertGate::silu:
      return ExactGate::silu;
    case ExpertGate::gelu_tanh:
      return ExactGate::gelu_tanh;
    case ExpertGate::gelu:
      return ExactGate::gelu;
    default:
      return ExactGate::clamped_silu;
  }
}

}  // namespace

void group_choices(const Routing& chosen, int begin, int end, int rows, Routing& own, const Queue& queue) {
  own.shares = chosen.shares, own.begin = begin, own.end = end;
  check(cudaMemcpyAsync(own.entry_of, chosen.entry_of, rows * chosen.top * sizeof(int), cudaMemcpyDeviceToDevice,
                        queue.stream),
        "copying choices of experts");
  group_entries(own, rows, kExactTile, queue);
}

ExpertStream::ExpertStream(const Device& device, std::shared_ptr<const ExpertPanels> panels,
                           std::shared_ptr<const ExpertExchange> exchange, const StreamLimits& limits)
    : device_(device), panels_(std::move(panels)), exchange_(std::move(exchange)), limits_(limits) {
  if (!panels_ || !exchange_ || limits.rows < 1 || limits.top < 1 || limits.top > kMaxTop)
    throw std::invalid_argument("experts on the GPU: sizes must be positive");
  if (panels_->ranks() != exchange_->expert_ranks())
    throw std::invalid_argument("experts on the GPU: of " + std::to_string(panels_->ranks()) + " ranks, not " +
                                std::to_string(exchange_->expert_ranks()));
  device_.use();
  try {
    place(limits);
    check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "making a stream");
    slots_.resize(kSlots);
    for (Slot& slot : slots_)
      for (cudaEvent_t* event : {&slot.copied, &slot.used})
        check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
    if (!split_.empty()) {
      const size_t bytes = (size_t)layers() * experts_ * sizeof(uint32_t);
      uses_ = Memory(bytes, "uses of experts"), seen_ = Memory(bytes, "uses of experts", Memory::Where::host);
      check(cudaMemset(uses_.as(), 0, bytes), "clearing uses of experts");
      check(cudaEventCreateWithFlags(&counted_, cudaEventDisableTiming), "making an event");
      before_.resize((size_t)layers() * experts_), scores_.resize(before_.size());
    }
    sets_.resize(layers());
    pin();
    measure();
  } catch (...) {  // no destructor runs
    release();
    throw;
  }
  rates_ = measured_rates();
  shared_.timed.resize(panels_->ranks()), shared_.until.resize(panels_->ranks());
  // Larger steps than are shared must be worth copying for alone.
  const bool shares = !split_.empty() && rates_.first_rows(false) <= limits.split_rows;
  first_rows_ = limits.first_rows > 0 ? limits.first_rows : limits.first_rows < 0 ? rates_.first_rows(shares) : INT_MAX;
}

ExpertStream::~ExpertStream() { release(); }

void ExpertStream::release() {
  cudaSetDevice(device_.index());
  cudaStreamSynchronize(device_.stream());
  if (copies_) cudaStreamSynchronize(copies_), cudaStreamDestroy(copies_);
  for (const Slot& slot : slots_)
    for (cudaEvent_t event : {slot.copied, slot.used})
      if (event) cudaEventDestroy(event);
  if (counted_) cudaEventDestroy(counted_);
  for (char* pinned : pinned_) cudaHostUnregister(pinned);
  cudaGetLastError();  // nothing more can be done about it
}

void ExpertStream::pin() {
  const auto began = Clock::now();
  for (int rank = 0; rank < panels_->ranks(); rank++)
    for (size_t at = 0, all = panels_->matrices_bytes(rank); at < all; at += kPinned) {
      if (seconds_since(began) > kPinSeconds)
        throw std::runtime_error("pinning the memory of experts' weights takes more than " +
                                 std::to_string((int)kPinSeconds) + " s");
      char* const data = panels_->matrices(rank) + at;
      check(cudaHostRegister(data, std::min(kPinned, all - at), cudaHostRegisterPortable),
            "pinning the memory of experts' weights");
      pinned_.push_back(data);
    }
  pinning_seconds_ = seconds_since(began);
}

// Divides the GPU's memory: biases and orders of columns, which stay there; the entries of a layer; the ring.
void ExpertStream::place(const StreamLimits& limits) {
  struct Upload {
    const void* from;
    size_t bytes, at;
    std::function<void(const char*)> place;  // takes its address on the GPU
  };
  std::vector<Upload> uploads;
  size_t used = 0, scratch = 0, largest = 0, stack = 0, width = 0;
  const auto take = [&](size_t bytes) {
    const size_t at = used;
    used += round_up_256(bytes);
    return at;
  };
  layers_.assign(panels_->ranks(), std::vector<Layer>(panels_->layers()));
  for (int rank = 0; rank < panels_->ranks(); rank++)
    for (int i = 0; i < panels_->layers(); i++) {
      const ExpertLayer& of = panels_->layer(rank, i);
      Layer& layer = layers_[rank][i];
      layer.begin = of.begin, layer.end = of.end, layer.gate = gate_of(of.gate);
      layer.alpha = of.alpha, layer.limit = of.limit;
      const auto add = [&](const ExpertStack& s, ExactMatrix& matrix, const float*& bias, uint64_t& at) {
        matrix = exact_matrix(s.layout), at = s.panels;
        largest = std::max(largest, matrix.bytes), stack = std::max(stack, matrix.bytes * of.experts());
        const auto upload = [&](const auto* from, size_t count, const auto*& to) {
          const size_t bytes = count * sizeof *from;
          if (from)
            uploads.push_back(
                {from, bytes, take(bytes), [&to](const char* there) { to = reinterpret_cast<decltype(from)>(there); }});
        };
        upload(panels_->order(rank, s), s.layout.k, matrix.order);
        upload(panels_->bias(rank, s), (size_t)of.experts() * s.layout.n, bias);
      };
      add(of.gate_up, layer.gate_up, layer.gate_up_bias, layer.gate_up_at);
      add(of.down, layer.down, layer.down_bias, layer.down_at);
      const Layer& first = layers_[0][i];
      if (layer.gate_up.n != 2 * layer.down.inputs || layer.gate_up.inputs != first.gate_up.inputs ||
          layer.down.n != first.down.n)
        throw std::invalid_argument("experts of layer " + std::to_string(i) + " do not fit each other");
      experts_ = std::max(experts_, layer.end), width = std::max(width, (size_t)layer.down.n);
      scratch = std::max(scratch, exact_layer_bytes(layer, limits.rows, limits.top));
    }
  const size_t fixed = used;
  used = 0, routing_.top = limits.top;
  const size_t scratch_at = take(scratch), routing_at = take(routing_bytes(limits.rows, limits.top, experts_));
  std::vector<std::pair<size_t, size_t>> split_at;  // routings, entries
  const int split_rows = limits.by_ranks ? std::min(limits.split_rows, limits.rows) : 0;
  for (int rank = 0; split_rows && rank < panels_->ranks(); rank++) {
    const bool last = rank == panels_->ranks() - 1;
    const size_t at = take(routing_bytes(split_rows, limits.top, experts_));
    split_at.emplace_back(at, last ? 0 : take((size_t)split_rows * limits.top * width * sizeof(float)));
  }
  const size_t ring_at = used, left = limits.bytes > fixed + used ? limits.bytes - fixed - used : 0;
  slot_bytes_ = std::min({left / kSlots, std::max(largest, kLargestSlot), std::max(stack, kSmallestSlot)}) / 256 * 256;
  if (slot_bytes_ < largest)
    throw std::invalid_argument("experts on the GPU take " +
                                std::to_string((fixed + used + kSlots * round_up_256(largest)) >> 10) +
                                " KiB of its memory, " + std::to_string(limits.bytes >> 10) + " KiB were announced");
  fixed_ = Memory(fixed, "biases of experts");
  memory_ = Memory(ring_at + kSlots * slot_bytes_, "experts that are copied", Memory::Where::lent);
  scratch_ = memory_.as() + scratch_at, ring_ = memory_.as() + ring_at;
  place_routing(memory_.as() + routing_at, limits.rows, experts_, routing_);
  for (const auto& [routing, entries] : split_at) {
    split_.push_back({routing_, entries ? reinterpret_cast<float*>(memory_.as() + entries) : nullptr});
    place_routing(memory_.as() + routing, split_rows, experts_, split_.back().routing);
  }
  for (const Upload& each : uploads) {
    each.place(fixed_.as() + each.at);
    check(cudaMemcpy(fixed_.as() + each.at, each.from, each.bytes, cudaMemcpyHostToDevice), "copying experts' biases");
  }
  check(cudaStreamSynchronize(nullptr), "copying experts' biases");  // cudaMemcpy may return earlier
}

// A copy stays within memory that was pinned at once.
void ExpertStream::copy(char* to, int rank, uint64_t at, size_t bytes, cudaStream_t stream) const {
  for (size_t done = 0, part; done < bytes; done += part) {
    part = std::min(bytes - done, kPinned - (size_t)((at + done) % kPinned));
    check(cudaMemcpyAsync(to + done, panels_->matrices(rank) + at + done, part, cudaMemcpyHostToDevice, stream),
          "copying experts");
  }
}

void ExpertStream::measure() {
  const size_t bytes = std::min(slot_bytes_, panels_->matrices_bytes(0));
  for (int i = 0; i < 4; i++) {  // the first one is slower
    const auto began = Clock::now();
    copy(ring_, 0, 0, bytes, copies_);
    check(cudaStreamSynchronize(copies_), "copying experts");
    if (i) bandwidth_ = std::max(bandwidth_, bytes / seconds_since(began));
  }
}

// Of the first layer; others are alike.
ExpertRates ExpertStream::measured_rates() const {
  ExpertRates rates;
  rates.bandwidth = bandwidth_, rates.experts = experts_, rates.top = limits_.top;
  rates.row_bytes = sizeof(float) * ((double)layers_[0][0].gate_up.inputs + layers_[0][0].down.n);
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    const ExpertLayer& of = panels_->layer(rank, 0);
    ExpertRates::Rank& own = rates.ranks.emplace_back();
    own.begin = of.begin, own.end = of.end, own.bytes = (double)(of.gate_up.bytes() + of.down.bytes());
    for (int i = 0; i < kTimings; i++) own.seconds[i] = panels_->seconds(rank, i);
  }
  return rates;
}

void ExpertStream::count(int layer, const Routing& chosen, int rows) {
  if (split_.empty() || idle_) return;
  const Queue queue = device_.queue();
  count_uses(chosen.entry_of, rows * chosen.top, uses_.as<uint32_t>() + (size_t)layer * experts_, queue);
  if (layer < copied_layers_ - 1) return;
  check(cudaMemcpyAsync(seen_.as(), uses_.as(), seen_.size(), cudaMemcpyDeviceToHost, queue.stream),
        "copying uses of experts");
  check(cudaEventRecord(counted_, queue.stream), "recording an event");
  counting_ = true;
}

void ExpertStream::read_uses() {
  if (!counting_) return;
  const cudaError_t result = cudaEventQuery(counted_);
  if (result == cudaErrorNotReady) return;
  check(result, "copying uses of experts");
  const uint32_t* const seen = seen_.as<uint32_t>();
  for (size_t i = 0; i < scores_.size(); i++)
    scores_[i] = kKept * scores_[i] + (float)(seen[i] - before_[i]), before_[i] = seen[i];
  counting_ = false;
}

// From the times of the latest shared step, once ranks have answered all of its messages.
void ExpertStream::learn() {
  if (!shared_.messages) return;
  std::vector<ExpertExchange::Computed> computed;
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    computed.push_back(exchange_->computed(rank));
    if (computed.back().entries < learned_messages_ + shared_.messages) return;
  }
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    const int64_t now = computed[rank].nanoseconds_of_entries;
    rates_.ranks[rank].learn(shared_.rows, 1e-9 * (double)(now - shared_.until[rank]), shared_.timed[rank]);
    shared_.until[rank] = now, shared_.timed[rank] = 0;
  }
  learned_messages_ += shared_.messages, shared_.messages = 0;
}

// A step is split in all layers or in none, because ranks of experts compute whole steps; but in the last one only if
// its experts are copied.
void ExpertStream::begin_step(int rows, int last_rows) {
  is_split_ = false;
  copied_layers_ = layers() - !takes(last_rows);
  if (split_.empty() || rows > limits_.split_rows || idle_) return;
  read_uses();
  learn();
  if (limits_.by_ranks < 0 && std::none_of(scores_.begin(), scores_.end(), [](float score) { return score > 0; }))
    return;
  for (int layer = 0; layer < copied_layers_; layer++) {
    std::vector<char> present(experts_);
    for (int e = 0; e < experts_ && present_; e++) present[e] = present_->has(layer, e);
    const float* const scores = scores_.data() + (size_t)layer * experts_;
    std::vector<int> found;
    if (limits_.by_ranks < 0) {
      ExpertRates::Share share = rates_.least_used(layer < layers() - 1 ? rows : last_rows, scores, present.data());
      for (size_t rank = 0; rank < share.seconds.size(); rank++) shared_.timed[rank] += share.seconds[rank];
      found = std::move(share.experts);
    } else {
      for (int e = 0; e < experts_; e++)
        if (!present[e]) found.push_back(e);
      std::stable_sort(found.begin(), found.end(), [&](int a, int b) { return scores[a] < scores[b]; });
      found.resize(std::min(found.size(), (size_t)limits_.by_ranks));
    }
    sets_[layer] = {};
    for (const int e : found) sets_[layer].add(e);
    is_split_ = is_split_ || !found.empty(), split_experts_ += (int64_t)found.size();
  }
  if (is_split_) shared_.messages += copied_layers_, shared_.rows = rows;
}

void ExpertStream::check_layer(int layer, int width, int sum_width, int top) const {
  if (layer >= layers() || layers_[0][layer].gate_up.inputs != width || layers_[0][layer].down.n != sum_width ||
      routing_.top != top)
    throw std::invalid_argument("op dispatch_rows: the ranks of experts describe other layers");
}

// Copies the experts of a matrix in as many parts as the ring's slots need, and multiplies each part. Experts that the
// GPU has, and those that ranks compute, leave gaps; what is multiplied with the latter is not read.
void ExpertStream::multiply_copied(int layer, int rank, bool down, ExactGemm& p, int entries) {
  Queue queue = device_.queue();
  queue.no_pdl = true;  // nothing may be read before the copy has ended
  const Layer& of = layers_[rank][layer];
  const uint64_t at = down ? of.down_at : of.gate_up_at;
  const int all = of.end - of.begin, together = (int)std::min<size_t>(slot_bytes_ / p.w.bytes, all);
  if (present_) p.experts = present_->panels(layer, rank, down);
  const auto copied = [&](int expert) {
    return !(present_ && present_->has(layer, of.begin + expert)) &&
           !(is_split_ && sets_[layer].has(of.begin + expert));
  };
  if (idle_) {
    p.adjacent = ring_, p.first = 0, p.end = together;
    return gemm_exact(p, entries, queue);
  }
  for (int first = 0; first < all; first += together, next_++) {
    const Slot& slot = slots_[next_ % kSlots];
    char* const to = ring_ + next_ % kSlots * slot_bytes_;
    p.adjacent = to, p.first = first, p.end = std::min(first + together, all);
    check(cudaStreamWaitEvent(copies_, slot.used), "waiting for experts");
    for (int e = first, next; e < p.end; e = next) {
      for (next = e + 1; next < p.end && copied(next) == copied(e);) next++;
      if (copied(e))
        copy(to + (e - first) * p.w.bytes, rank, at + e * (uint64_t)p.w.bytes, (next - e) * p.w.bytes, copies_);
    }
    check(cudaEventRecord(slot.copied, copies_), "recording an event");
    check(cudaStreamWaitEvent(queue.stream, slot.copied), "waiting for experts");
    gemm_exact(p, entries, queue);
    check(cudaEventRecord(slot.used, queue.stream), "recording an event");
  }
}

MultiplyExperts ExpertStream::products(int layer, int rank, int entries) {
  return [=, this](ExactGemm& p, bool down) { multiply_copied(layer, rank, down, p, entries); };
}

void ExpertStream::run(int layer, const float* x, const Routing& chosen, int rows, float* y) {
  const Queue queue = device_.queue();
  Routing routing = routing_;
  routing.begin = routing.end = 0;
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    const Layer& of = layers_[rank][layer];
    if (routing.begin != of.begin || routing.end != of.end)
      group_choices(chosen, of.begin, of.end, rows, routing, queue);
    run_exact_layer(of, products(layer, rank, rows * chosen.top), x, rows, routing, scratch_, {y, rank > 0}, queue);
  }
  if (!idle_) computed_rows_ += rows;
}

void ExpertStream::multiply(int layer, const float* x, const Routing& chosen, int rows) {
  const Queue queue = device_.queue();
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    const Layer& of = layers_[rank][layer];
    Routing& routing = split_[rank].routing;
    group_choices(chosen, of.begin, of.end, rows, routing, queue);
    multiply_exact_layer(of, products(layer, rank, rows * chosen.top), x, rows, routing, scratch_,
                         entries_of(layer, rank, rows), queue);
  }
  computed_rows_ += rows, split_rows_ += rows;
}

float* ExpertStream::entries_of(int layer, int rank, int rows) const {
  const Entries& own = split_[rank];
  return own.values ? own.values : exact_layer_entries(layers_[rank][layer], rows, routing_.top, scratch_);
}

MetEntries ExpertStream::met(int layer, const Routing& chosen, int rows) const {
  MetEntries met;
  met.top = chosen.top, met.chosen = chosen.entry_of, met.shares = chosen.shares, met.by_ranks = sets_[layer];
  if (present_) met.hot = present_->flags(layer);
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    const Layer& of = layers_[rank][layer];
    met.ranks[rank] = {of.begin, of.end, split_[rank].routing.entry_of, entries_of(layer, rank, rows)};
  }
  return met;
}

}  // namespace as::cuda
