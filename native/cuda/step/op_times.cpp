#include "cuda/step/op_times.h"

#include <algorithm>

namespace as::cuda {
namespace {

constexpr int64_t kSkipped = 2, kFirst = 3,
                  kEvery = 64;  // steps: skips the first ones, which load kernels; then times three; then one of 64

}  // namespace

OpTimes::~OpTimes() {
  for (Turn& turn : turns_)
    for (cudaEvent_t event : turn.events) cudaEventDestroy(event);
}

void OpTimes::clear() {
  for (std::vector<OpTime>& form : forms_)
    for (OpTime& launch : form) launch = {launch.op, launch.layer, launch.launches};
}

bool OpTimes::due() {
  const int64_t step = steps_++;
  return step >= kSkipped && (step < kSkipped + kFirst || step % kEvery == 0);
}

void OpTimes::mark(int turn, cudaStream_t stream) {
  Turn& t = turns_[turn];
  if (t.used == t.events.size()) {
    t.events.push_back(nullptr);
    check(cudaEventCreate(&t.events.back()), "making an event");
  }
  check(cudaEventRecord(t.events[t.used++], stream), "timing");
}

double OpTimes::seconds(const Turn& turn, size_t i) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, turn.events[i], turn.events[i + 1]), "timing");
  return 1e-3 * milliseconds;
}

void OpTimes::add(int turn, int form, size_t launches, bool sampled, const Batch& batch, StepSize size) {
  const Turn& t = turns_[turn];
  for (const Item& item : batch.items) {
    size.seen += (double)item.count * item.start + 0.5 * item.count * (item.count + 1.0);
    size.context += item.start + item.count;
  }
  for (size_t i = 0; i < launches; i++) {
    OpTime& launch = forms_[form][i];
    if (launch.op.parts.empty()) continue;
    const OpNode& op = program_.ops()[launch.op.parts[0]];
    const int tensor = op.inputs.empty() ? (op.outputs.empty() ? -1 : op.outputs[0]) : op.inputs[0];
    if (tensor >= 0 && !program_.rows_of(program_.tensors()[tensor].rows, size)) continue;  // the launch had no rows
    double time = 0;
    for (int n = 0; n < launch.launches; n++) time += seconds(t, i + n);
    if (sampled && i + launch.launches == launches) time += seconds(t, launches + 1);
    if (launch.layer) size.position_bytes = (double)launch.layer->head_bytes() / launch.layer->span_size;
    const Cost cost = cost_of(program_, launch.op, size);
    launch.least = launch.count ? std::min(launch.least, time) : time;
    launch.most = std::max(launch.most, time), launch.total += time, launch.count++;
    launch.bytes += cost.bytes, launch.operations += cost.operations;
  }
}

std::vector<OpTime> OpTimes::all() const {
  std::vector<OpTime> found;
  for (const std::vector<OpTime>& form : forms_)
    for (const OpTime& launch : form)
      if (!launch.op.parts.empty()) found.push_back(launch);
  return found;
}

}  // namespace as::cuda
