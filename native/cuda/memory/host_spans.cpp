#include "cuda/memory/host_spans.h"

#include <algorithm>
#include <stdexcept>

namespace as::cuda {

size_t HostSpans::span_bytes(const std::vector<LayerCache>& layers) {
  size_t bytes = 0;
  for (const LayerCache& layer : layers) bytes += layer.span_bytes();
  return bytes;
}

HostSpans::HostSpans(const Device& device, const std::vector<LayerCache>& layers, int cache_spans, int spans)
    : device_(device), layers_((int)layers.size()) {
  if (spans < 1) throw std::invalid_argument("a host cache of " + std::to_string(spans) + " spans");
  device.use();
  keys_.resize(spans);
  memory_ = Memory(spans * span_bytes(layers), "the host cache", Memory::Where::host);
  std::vector<SpanPart> parts;
  size_t at = 0;
  for (const LayerCache& layer : layers) {
    parts.push_back({layer.data, memory_.as() + at, layer.span_bytes(), span_bytes(layers)});
    at += layer.span_bytes(), largest_ = std::max(largest_, layer.span_bytes());
  }
  parts_ = Memory(parts.size() * sizeof(SpanPart), "the parts of a span");
  check(cudaMemcpy(parts_.as(), parts.data(), parts_.size(), cudaMemcpyHostToDevice), "copying the parts of a span");
  const size_t most = (size_t)spans + cache_spans;  // per step: each span is filled at most once
  for (Turn& turn : turns_) {
    turn.pairs = Memory(most * sizeof(SpanPair), "copies of spans", Memory::Where::host);
    check(cudaEventCreate(&turn.began), "making an event"), check(cudaEventCreate(&turn.ended), "making an event");
  }
  copies_ = Memory(most * sizeof(SpanPair), "copies of spans");
}

HostSpans::~HostSpans() {
  cudaStreamSynchronize(device_.stream());
  for (Turn& turn : turns_) cudaEventDestroy(turn.began), cudaEventDestroy(turn.ended);
}

double HostSpans::finish() {
  const Turn& turn = turns_[under_way_-- > 1 ? 1 - turn_ : turn_];
  check(cudaEventSynchronize(turn.ended), "copying spans");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, turn.began, turn.ended), "copying spans");
  return 1e-3 * milliseconds;
}

void HostSpans::copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) {
  device_.use();
  turn_ = 1 - turn_;
  for (const SpanCopy& copy : saved) keys_[copy.host] = copy.key;
  for (const SpanCopy& copy : restored)
    if (keys_[copy.host] != copy.key)
      throw std::runtime_error("span " + std::to_string(copy.host) +
                               " of the host cache is not what was written there");
  check(cudaEventRecord(turns_[turn_].began, device_.stream()), "copying spans");
  queue(saved, true, 0);
  queue(restored, false, saved.size());
  check(cudaEventRecord(turns_[turn_].ended, device_.stream()), "copying spans");
  under_way_++;
}

void HostSpans::queue(const std::vector<SpanCopy>& copies, bool saves, size_t first) {
  if (copies.empty()) return;
  SpanPair* pairs = turns_[turn_].pairs.as<SpanPair>() + first;
  for (size_t i = 0; i < copies.size(); i++) pairs[i] = {copies[i].span, copies[i].host};
  SpanPair* to = copies_.as<SpanPair>() + first;
  check(cudaMemcpyAsync(to, pairs, copies.size() * sizeof(SpanPair), cudaMemcpyHostToDevice, device_.stream()),
        "copying spans");
  copy_spans(parts_.as<SpanPart>(), layers_, largest_, to, (int)copies.size(), saves, device_.queue());
}

}  // namespace as::cuda
