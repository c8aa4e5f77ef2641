#include "cuda/step/device_sampler.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace as::cuda {
namespace {

constexpr double kMaskSeconds = 30;                         // longer than any mask takes
constexpr size_t kEditsOfARow = 4096, kMaxEdits = 1 << 20;  // per row on average; per step

size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

DeviceSampler::DeviceSampler(const Device& device, float* logits, Argmax* argmax, int vocab_size, int max_outputs,
                             Masks* masks)
    : device_(device), masks_(masks), list_(vocab_size, std::min(kEditsOfARow * max_outputs, kMaxEdits)) {
  const size_t rows = max_outputs;
  const auto both = [](Memory& host, Memory& on_device, size_t bytes, const char* purpose) {
    host = Memory(bytes, purpose, Memory::Where::host), on_device = Memory(bytes, purpose);
  };
  both(host_samples_, samples_, rows * sizeof(RowSample), "samples");
  both(host_edits_, edits_, list_.max_edits() * sizeof(Edit), "penalties of samples");
  both(host_outputs_, outputs_, rows * sizeof(SampleOutput), "sampled tokens");
  if (masks) both(host_masks_, bits_, rows * masks->words() * sizeof(uint32_t), "masks of samples");
  task_.logits = logits, task_.width = vocab_size, task_.argmax = argmax;
  task_.chunk = chunk_of(vocab_size), task_.chunks = (vocab_size + task_.chunk - 1) / task_.chunk;
  task_.masks = bits_.as<uint32_t>(), task_.mask_words = masks ? masks->words() : 0;
  task_.samples = samples_.as<RowSample>(), task_.edits = edits_.as<Edit>(),
  task_.outputs = outputs_.as<SampleOutput>();
  const size_t chunks = rows * task_.chunks, groups = chunks * groups_of(task_.chunk);
  const size_t each =
      rounded(chunks * sizeof(double)) + rounded(chunks * sizeof(float)) + rounded(groups * sizeof(float));
  sums_ = Memory(2 * each, "sums of samples");
  char* next = sums_.as();
  const auto take = [&](size_t bytes) { return next += rounded(bytes), next - rounded(bytes); };
  for (ChunkSums* sums : {&task_.raw, &task_.processed}) {
    sums->sums = reinterpret_cast<double*>(take(chunks * sizeof(double)));
    sums->maxima = reinterpret_cast<float*>(take(chunks * sizeof(float)));
    sums->groups = reinterpret_cast<float*>(take(groups * sizeof(float)));
  }
}

void DeviceSampler::send(const Memory& host, const Memory& device, size_t bytes) const {
  if (bytes)
    check(cudaMemcpyAsync(device.as(), host.as(), bytes, cudaMemcpyHostToDevice, device_.stream()), "copying samples");
}

void DeviceSampler::queue_masks(const Batch& batch, const std::vector<SampledBy>& by) {
  mask_of_.assign(batch.outputs.size(), -1);
  int count = 0;
  for (size_t i = 0; i < batch.outputs.size(); i++) {
    const int mask = batch.outputs[i].mask;
    if (!mask || by[i] != SampledBy::device) continue;
    if (!masks_) throw std::logic_error("a sample needs a mask, and there are no masks");
    std::copy_n(masks_->wait(mask - 1, kMaskSeconds), masks_->words(),
                host_masks_.as<uint32_t>() + (size_t)count * masks_->words());
    mask_of_[i] = count++;
  }
  if (count) send(host_masks_, bits_, (size_t)count * masks_->words() * sizeof(uint32_t));
}

void DeviceSampler::queue(const Batch& batch, std::vector<SampledBy>& by) {
  list_.clear();
  queue_masks(batch, by);
  for (size_t i = 0; i < batch.outputs.size(); i++)
    if (by[i] == SampledBy::device && !list_.add(batch, (int)i, mask_of_[i])) by[i] = SampledBy::host;
  const size_t count = list_.samples().size();
  if (!count) return;
  std::copy(list_.samples().begin(), list_.samples().end(), host_samples_.as<RowSample>());
  std::copy(list_.edits().begin(), list_.edits().end(), host_edits_.as<Edit>());
  send(host_samples_, samples_, count * sizeof(RowSample));
  send(host_edits_, edits_, list_.edits().size() * sizeof(Edit));
  sample_rows(task_, (int)count, list_.edited(), list_.both_sums(), device_.queue());
  check(cudaMemcpyAsync(host_outputs_.as(), outputs_.as(), count * sizeof(SampleOutput), cudaMemcpyDeviceToHost,
                        device_.stream()),
        "copying sampled tokens");
}

void DeviceSampler::take(std::vector<SampleOutput>& samples) const {
  for (size_t i = 0; i < list_.samples().size(); i++)
    samples[list_.samples()[i].row] = host_outputs_.as<SampleOutput>()[i];
}

}  // namespace as::cuda
