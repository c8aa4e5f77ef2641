#include "cpu/host_sampler.h"

#include <stdexcept>

namespace as {

// Threads sleep between calls: the device works meanwhile, and others may need the cores.
HostSampler::HostSampler(int threads, std::vector<int> cpus, std::shared_ptr<Communicator> shared_memory)
    : shared_memory_(shared_memory && shared_memory->size() > 1 ? std::move(shared_memory) : nullptr),
      pool_(threads, std::move(cpus), false),
      core_{shared_memory_ ? shared_memory_->rank() : 0, shared_memory_ ? shared_memory_->size() : 1,
            shared_memory_.get(), pool_, kernels()},
      no_weights_(pool_, kernels()) {}

void HostSampler::attach(const OpNode& op, float* logits, int width, int max_outputs, Masks* masks) {
  Tensor rows;
  rows.data = logits, rows.width = width, rows.of_outputs = true;
  limits_.max_outputs = max_outputs;
  const SpanCache cache;
  Scratch scratch;
  std::vector<std::shared_ptr<RotaryTable>> tables;
  std::vector<std::shared_ptr<AttentionWork>> works;
  const std::vector<std::shared_ptr<Routing>> routings;
  op_ = cpu_op({Op::sample})(Binding{
      core_, {Part{op, no_weights_, {rows}, {}}}, limits_, cache, scratch, tables, works, routings, output_, masks});
}

void HostSampler::sample(const Batch& batch, std::vector<SampleOutput>& samples) {
  if (!op_) throw std::logic_error("attach() before sample()");
  output_.samples.swap(samples);
  op_->begin(batch);
  pool_.run([&](int thread) { pool_.guard([&] { op_->run(batch, thread); }); });
  output_.samples.swap(samples);
}

}  // namespace as
