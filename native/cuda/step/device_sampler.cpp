#include "cuda/step/device_sampler.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace as::cuda {
namespace {

constexpr double kMaskSeconds = 30;                         // longer than any mask takes
constexpr size_t kEditsOfARow = 4096, kMaxEdits = 1 << 20;  // per row on average; per step

}  // namespace

DeviceSampler::DeviceSampler(const Device& device, float* logits, Argmax* argmax, int width, int max_outputs,
                             Masks* masks, const RankSamples* ranks)
    : device_(device),
      masks_(masks),
      ranks_(ranks ? std::optional<RankSamples>(*ranks) : std::nullopt),
      logits_(logits),
      list_(ranks ? ranks->vocab : width, std::min(kEditsOfARow * max_outputs, kMaxEdits)) {
  const int vocab_size = ranks ? ranks->vocab : width;
  const size_t all = max_outputs, rows = ranks ? ranks->most() : all;  // of the step, and of this rank
  const auto both = [](Memory& host, Memory& on_device, size_t bytes, const char* purpose) {
    host = Memory(bytes, purpose, Memory::Where::host), on_device = Memory(bytes, purpose);
  };
  both(host_samples_, samples_, rows * sizeof(RowSample), "samples");
  both(host_edits_, edits_, list_.max_edits() * sizeof(Edit), "penalties of samples");
  host_outputs_ = Memory(all * sizeof(SampleOutput), "sampled tokens", Memory::Where::host);
  outputs_ = Memory(rows * sizeof(SampleOutput), "sampled tokens");
  if (ranks) both(host_dealt_, dealt_, all * sizeof(DealtSample), "samples of all ranks");
  if (reads_masks()) both(host_masks_, bits_, all * masks->words() * sizeof(uint32_t), "masks of samples");
  task_.logits = ranks ? ranks->own_logits() : logits, task_.width = vocab_size, task_.argmax = argmax;
  task_.chunk = chunk_of(vocab_size), task_.chunks = (vocab_size + task_.chunk - 1) / task_.chunk;
  task_.masks = ranks ? ranks->own_masks() : bits_.as<uint32_t>();
  task_.mask_words = ranks ? ranks->mask_words() : masks ? masks->words() : 0;
  task_.samples = samples_.as<RowSample>(), task_.edits = edits_.as<Edit>(),
  task_.outputs = outputs_.as<SampleOutput>();
  const size_t chunks = rows * task_.chunks, groups = chunks * groups_of(task_.chunk);
  const size_t each = round_up_256(chunks * sizeof(double)) + round_up_256(chunks * sizeof(float)) +
                      round_up_256(groups * sizeof(float));
  sums_ = Memory(2 * each + round_up_256(rows * sizeof(float)), "sums of samples");
  char* next = sums_.as();
  const auto take = [&](size_t bytes) { return next += round_up_256(bytes), next - round_up_256(bytes); };
  for (ChunkSums* sums : {&task_.raw, &task_.processed}) {
    sums->sums = reinterpret_cast<double*>(take(chunks * sizeof(double)));
    sums->maxima = reinterpret_cast<float*>(take(chunks * sizeof(float)));
    sums->groups = reinterpret_cast<float*>(take(groups * sizeof(float)));
  }
  task_.wide = reinterpret_cast<float*>(take(rows * sizeof(float)));
  check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "making a stream");
  check(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming), "making an event");
}

DeviceSampler::~DeviceSampler() {
  if (copied_) cudaEventDestroy(copied_);
  if (copies_) cudaStreamDestroy(copies_);
}

void DeviceSampler::send(const Memory& host, const Memory& device, size_t bytes) const {
  if (bytes) check(cudaMemcpyAsync(device.as(), host.as(), bytes, cudaMemcpyHostToDevice, copies_), "copying samples");
}

void DeviceSampler::await_copies() const {
  check(cudaEventRecord(copied_, copies_), "recording an event");
  check(cudaStreamWaitEvent(device_.stream(), copied_), "waiting for samples");
}

void DeviceSampler::queue_masks(const Batch& batch, const std::vector<SampledBy>& by) {
  mask_of_.assign(batch.outputs.size(), -1);
  int count = 0;
  for (size_t i = 0; i < batch.outputs.size(); i++) {
    const int mask = batch.outputs[i].mask;
    if (!mask || by[i] != SampledBy::device) continue;
    if (!masks_) throw std::logic_error("a sample needs a mask, and there are no masks");
    if (reads_masks())
      std::copy_n(masks_->wait(mask - 1, kMaskSeconds), masks_->words(),
                  host_masks_.as<uint32_t>() + (size_t)count * masks_->words());
    mask_of_[i] = count++;
  }
  if (count && reads_masks()) send(host_masks_, bits_, (size_t)count * masks_->words() * sizeof(uint32_t));
}

void DeviceSampler::queue(const Batch& batch, std::vector<SampledBy>& by) {
  list_.clear();
  queue_masks(batch, by);
  for (size_t i = 0; i < batch.outputs.size(); i++)
    if (by[i] == SampledBy::device && !list_.add(batch, (int)i, mask_of_[i])) by[i] = SampledBy::host;
  const size_t count = list_.samples().size();
  if (!count) return;
  std::copy(list_.edits().begin(), list_.edits().end(), host_edits_.as<Edit>());
  send(host_edits_, edits_, list_.edits().size() * sizeof(Edit));
  const SampleOutput* sampled = outputs_.as<SampleOutput>();
  if (ranks_) {
    queue_dealt((int)count);
    sampled = ranks_->samples(ranks_->peers.rank);
  } else {
    std::copy(list_.samples().begin(), list_.samples().end(), host_samples_.as<RowSample>());
    send(host_samples_, samples_, count * sizeof(RowSample));
    await_copies();
    sample_rows(task_, (int)count, list_.parts(), device_.queue());
  }
  check(cudaMemcpyAsync(host_outputs_.as(), sampled, count * sizeof(SampleOutput), cudaMemcpyDefault, device_.stream()),
        "copying sampled tokens");
}

// Samples the rows that belong to this rank, and exchanges logits and samples with the other ranks.
void DeviceSampler::queue_dealt(int count) {
  const RankSamples& ranks = *ranks_;
  const Queue queue = device_.queue();
  int own = 0;
  bool masked = false;
  for (int j = 0; j < count; j++) {
    RowSample sample = list_.samples()[j];
    host_dealt_.as<DealtSample>()[j] = {sample.row, sample.mask, sample.target < 0};
    if (ranks.owner(j) != ranks.peers.rank) continue;
    sample.row = own;
    if (sample.mask >= 0) sample.mask = own, masked = true;
    host_samples_.as<RowSample>()[own++] = sample;
  }
  send(host_dealt_, dealt_, count * sizeof(DealtSample));
  send(host_samples_, samples_, own * sizeof(RowSample));
  await_copies();
  const DealtSample* dealt = dealt_.as<DealtSample>();
  const uint32_t round = ++rounds_;
  push_logits(ranks, logits_, bits_.as<uint32_t>(), dealt, count, round, queue);
  await_logits(ranks, dealt, count, task_.argmax, round, queue);
  if (ranks.staged && own) fetch_logits(own, masked);
  if (own) sample_rows(task_, own, list_.parts(), queue);
  exchange_samples(ranks, outputs_.as<SampleOutput>(), dealt, count, task_.argmax, round, queue);
}

// Copies what has arrived in host memory: the kernels read it several times.
void DeviceSampler::fetch_logits(int own, bool masked) const {
  const auto fetch = [&](void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, device_.stream()), "copying logits");
  };
  const RankSamples& ranks = *ranks_;
  const int rank = ranks.peers.rank;
  fetch(ranks.own_logits(), ranks.logits(rank), (size_t)own * ranks.vocab * sizeof(float));
  if (masked) fetch(ranks.own_masks(), ranks.masks(rank), (size_t)own * ranks.mask_words() * sizeof(uint32_t));
}

void DeviceSampler::warm_up() {
  RowSample sample{};
  sample.target = sample.top_logprobs = sample.deepest = sample.mask = sample.end = -1;
  sample.scale = sample.top_p = 1;
  *host_samples_.as<RowSample>() = sample;
  send(host_samples_, samples_, sizeof sample);
  await_copies();
  sample_rows(task_, 1, {true, true, true}, device_.queue());
  device_.wait();
}

void DeviceSampler::take(std::vector<SampleOutput>& samples) const {
  for (size_t i = 0; i < list_.samples().size(); i++)
    samples[list_.samples()[i].row] = host_outputs_.as<SampleOutput>()[i];
}

}  // namespace as::cuda
