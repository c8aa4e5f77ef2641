#include "cuda/expert_stream.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <stdexcept>
#include <string>

namespace as::cuda {
namespace {

constexpr int kSlots = 4;
constexpr size_t kSmallestSlot = 1 << 16, kLargestSlot = 64 << 20;
constexpr size_t kPinned = (size_t)1 << 30;  // bytes that are pinned at a time
constexpr double kPinSeconds = 120;          // for all of them

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

ExpertStream::ExpertStream(const Device& device, std::shared_ptr<const ExpertPanels> panels, const StreamLimits& limits)
    : device_(device), panels_(std::move(panels)) {
  if (!panels_ || limits.rows < 1 || limits.top < 1 || limits.top > kMaxTop)
    throw std::invalid_argument("experts on the GPU: sizes must be positive");
  device_.use();
  try {
    place(limits);
    check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "making a stream");
    slots_.resize(kSlots);
    for (Slot& slot : slots_)
      for (cudaEvent_t* event : {&slot.copied, &slot.used})
        check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
    pin();
    measure();
  } catch (...) {  // no destructor runs
    release();
    throw;
  }
  first_rows_ = limits.first_rows > 0   ? limits.first_rows
                : limits.first_rows < 0 ? std::max(chosen_rows(limits), 1)
                                        : INT_MAX;
}

ExpertStream::~ExpertStream() { release(); }

void ExpertStream::release() {
  cudaSetDevice(device_.index());
  cudaStreamSynchronize(device_.stream());
  if (copies_) cudaStreamSynchronize(copies_), cudaStreamDestroy(copies_);
  for (const Slot& slot : slots_)
    for (cudaEvent_t event : {slot.copied, slot.used})
      if (event) cudaEventDestroy(event);
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
  size_t used = 0, scratch = 0, largest = 0, stack = 0;
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
      experts_ = std::max(experts_, layer.end);
      scratch = std::max(scratch, exact_layer_bytes(layer, limits.rows, limits.top));
    }
  const size_t fixed = used;
  used = 0, routing_.top = limits.top;
  const size_t scratch_at = take(scratch), routing_at = take(routing_bytes(limits.rows, limits.top, experts_)),
               ring_at = used, left = limits.bytes > fixed + used ? limits.bytes - fixed - used : 0;
  slot_bytes_ = std::min({left / kSlots, std::max(largest, kLargestSlot), std::max(stack, kSmallestSlot)}) / 256 * 256;
  if (slot_bytes_ < largest)
    throw std::invalid_argument("experts on the GPU take " +
                                std::to_string((fixed + used + kSlots * round_up_256(largest)) >> 10) +
                                " KiB of its memory, " + std::to_string(limits.bytes >> 10) + " KiB were announced");
  fixed_ = Memory(fixed, "biases of experts");
  memory_ = Memory(ring_at + kSlots * slot_bytes_, "experts that are copied", Memory::Where::lent);
  scratch_ = memory_.as() + scratch_at, ring_ = memory_.as() + ring_at;
  place_routing(memory_.as() + routing_at, limits.rows, experts_, routing_);
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

// The rows of a step from which on copying a layer's experts takes no longer than the ranks' computing them.
int ExpertStream::chosen_rows(const StreamLimits& limits) const {
  size_t bytes = 0;
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    const ExpertLayer& of = panels_->layer(rank, 0);
    bytes += of.experts() * (of.gate_up.bytes() + of.down.bytes());
  }
  const double copied = bytes / bandwidth_, rows_of_entry = (double)experts_ / limits.top;
  double before = 0, entries = 0;
  for (int i = 0; i < kTimings; i++) {
    double computed = 0;
    for (int rank = 0; rank < panels_->ranks(); rank++)
      computed = std::max(computed, panels_->layer(rank, 0).experts() * panels_->seconds(rank, i));
    entries = kTimedRows[i];
    if (computed >= copied) {
      if (i && computed > before)
        entries -= (computed - copied) / (computed - before) * (kTimedRows[i] - kTimedRows[i - 1]);
      break;
    }
    before = computed;
    if (i == kTimings - 1) entries *= computed > 0 ? copied / computed : INFINITY;
  }
  return (int)std::min(std::ceil(entries * rows_of_entry), 1e9);
}

void ExpertStream::check_layer(int layer, int width, int sum_width, int top) const {
  if (layer >= layers() || layers_[0][layer].gate_up.inputs != width || layers_[0][layer].down.n != sum_width ||
      routing_.top != top)
    throw std::invalid_argument("op dispatch_rows: the ranks of experts describe other layers");
}

// Copies the experts of a matrix in as many parts as the ring's slots need, and multiplies each part.
void ExpertStream::multiply(int rank, ExactGemm& p, uint64_t at, int entries) {
  Queue queue = device_.queue();
  queue.no_pdl = true;  // nothing may be read before the copy has ended
  const int all = p.routing.end - p.routing.begin, together = (int)std::min<size_t>(slot_bytes_ / p.w.bytes, all);
  if (idle_) {
    p.adjacent = ring_, p.first = 0, p.end = together;
    return gemm_exact(p, entries, queue);
  }
  for (int first = 0; first < all; first += together, next_++) {
    const Slot& slot = slots_[next_ % kSlots];
    char* const to = ring_ + next_ % kSlots * slot_bytes_;
    p.adjacent = to, p.first = first, p.end = std::min(first + together, all);
    check(cudaStreamWaitEvent(copies_, slot.used), "waiting for experts");
    copy(to, rank, at + first * (uint64_t)p.w.bytes, (p.end - first) * p.w.bytes, copies_);
    check(cudaEventRecord(slot.copied, copies_), "recording an event");
    check(cudaStreamWaitEvent(queue.stream, slot.copied), "waiting for experts");
    gemm_exact(p, entries, queue);
    check(cudaEventRecord(slot.used, queue.stream), "recording an event");
  }
}

void ExpertStream::run(int layer, const float* x, const Routing& chosen, int rows, float* y) {
  const Queue queue = device_.queue();
  const int entries = rows * chosen.top;
  Routing routing = routing_;
  routing.begin = routing.end = 0;
  for (int rank = 0; rank < panels_->ranks(); rank++) {
    const Layer& of = layers_[rank][layer];
    if (routing.begin != of.begin || routing.end != of.end)
      group_choices(chosen, of.begin, of.end, rows, routing, queue);
    const auto products = [&](ExactGemm& p, bool down) {
      multiply(rank, p, down ? of.down_at : of.gate_up_at, entries);
    };
    run_exact_layer(of, products, x, rows, routing, scratch_, {y, rank > 0}, queue);
  }
  if (!idle_) computed_rows_ += rows;
}

}  // namespace as::cuda
