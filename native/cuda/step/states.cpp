#include "cuda/step/states.h"

#include <algorithm>
#include <stdexcept>

namespace as::cuda {
namespace {

template <typename T>
Memory on_device(const std::vector<T>& values, const char* purpose) {
  Memory memory(values.size() * sizeof(T), purpose);
  check(cudaMemcpy(memory.as(), values.data(), memory.size(), cudaMemcpyHostToDevice), "copying the parts of a state");
  return memory;
}

}  // namespace

States::States(const Device& device, const Workspace& workspace)
    : device_(device), positions_(workspace.limits.max_slots) {
  std::vector<StatePart> parts;
  for (const StatePages& pages : workspace.state_pages) {
    parts.push_back({pages.data, pages.bytes.state + pages.bytes.recent, pages.bytes.state, bytes_});
    bytes_ += pages.bytes.state, largest_ = std::max(largest_, pages.bytes.state);
  }
  std::vector<SpanLayer> layers;
  for (const SpanRange& range : workspace.spans) {
    layers.push_back({range.data, range.bytes, span_bytes_});
    span_bytes_ += range.bytes;
  }
  parts_ = (int)parts.size(), layers_ = (int)layers.size();
  part_list_ = on_device(parts, "the parts of a state"), layer_list_ = on_device(layers, "the parts of a span");
}

void States::copy(const Batch& batch) {
  for (const StateCopy& copy : batch.saved_states) positions_.check(copy.slot, copy.position);
  for (const StateCopy& copy : batch.saved_states) queue(copy, true);
  for (const StateCopy& copy : batch.loaded_states) {
    queue(copy, false);
    positions_.loaded(copy.slot, copy.position);
  }
}

void States::queue(const StateCopy& copy, bool to_spans) const {
  if (!span_bytes_) throw std::logic_error("a state is copied to or from spans, and no layer has spans");
  copy_state(part_list_.as<StatePart>(), parts_, largest_, layer_list_.as<SpanLayer>(), layers_, span_bytes_, copy.slot,
             copy.spans.data(), std::min((int)copy.spans.size(), spans()), to_spans, device_.queue());
}

}  // namespace as::cuda
