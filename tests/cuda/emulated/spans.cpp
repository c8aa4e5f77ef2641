// The host cache of a GPU in a file (FileSpans), with random copies. The stream is a list of functions that run when
// somebody waits for them, so what is read too early or overwritten too early is found.
// Arguments: number of steps, seed.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/memory/host_spans.h"

namespace {

struct Queued {
  std::function<void()> run;
  cudaEvent_t event;  // null: none
};
std::deque<Queued> stream;

// Runs what is queued, up to an event or all of it.
void run_until(cudaEvent_t event) {
  while (!stream.empty()) {
    const Queued next = stream.front();
    stream.pop_front();
    if (next.run) next.run();
    if (event && next.event == event) return;
  }
}

}  // namespace

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  static char events[64];
  static int used = 0;
  *event = &events[used++ % 64];
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { return stream.push_back({{}, event}), cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  for (const Queued& each : stream)
    if (each.event == event) return run_until(event), cudaSuccess;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0, cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return run_until(nullptr), cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return stream.push_back({[=] { std::memcpy(to, from, bytes); }, nullptr}), cudaSuccess;
}

namespace as::cuda {

void check(cudaError_t, const char*) {}
Memory::Memory(size_t bytes, const char*, Where where) : data_(std::calloc(bytes, 1)), bytes_(bytes), where_(where) {}
Memory::~Memory() { std::free(data_); }
Device::Device(int index, const ChipCosts& costs) : index_(index), costs_(costs) {}
Device::~Device() = default;

void copy_spans(const SpanPart* parts, int ranges, size_t, const SpanPair* pairs, int count, bool saves, const Queue&) {
  stream.push_back({[=] {
                      for (int i = 0; i < count * ranges; i++) {
                        const SpanPart& part = parts[i % ranges];
                        const SpanPair& pair = pairs[i / ranges];
                        char *cache = part.cache + part.bytes * pair.span,
                             *host = part.host + part.host_stride * pair.host;
                        std::memcpy(saves ? host : cache, saves ? cache : host, part.bytes);
                      }
                    },
                    nullptr});
}

namespace {

constexpr int kCache = 90, kHost = 70, kOffset = 4096;

class Rig {
 public:
  explicit Rig(unsigned seed) : random_(seed), device_(0), ranges_(3), memory_(3), cached_(kCache), stored_(kHost) {
    for (int l = 0; l < 3; l++) {
      LayerCache layer;
      layer.kv_heads = 1 + l, layer.padded_dim = 16, layer.span_size = 16;
      layer.type = l == 1 ? CacheType::int8 : CacheType::f32;
      memory_[l].resize(layer.span_bytes() * kCache), ranges_[l] = {memory_[l].data(), layer.span_bytes()};
    }
    char name[] = "/tmp/spansXXXXXX";
    file_ = mkstemp(name);
    unlink(name);
    if (ftruncate(file_, kOffset + SpanRecords::bytes_for(span_pieces(ranges_), kHost)))
      throw std::runtime_error("the file cannot be made");
    open();
  }

  void step() {
    if (under_way_ == 2) store_->finish(), under_way_--;
    for (int i = 0; i < 5; i++) compute(below(kCache));
    std::vector<SpanCopy> saved, restored;
    std::vector<char> host_used(kHost), cache_used(kCache);
    for (int i = below(10) ? below(6) : 60; i > 0; i--) {  // 60: more than the buffer holds
      const int host = below(kHost), span = below(kCache);
      if (host_used[host]++ || !cached_[span]) continue;
      saved.push_back({span, host, key(stored_[host] = cached_[span])});
    }
    for (int i = below(10) ? below(6) : 60; i > 0; i--) {
      const int host = below(kHost), span = below(kCache);
      if (stored_[host] && !cache_used[span]++) restored.push_back({span, host, key(stored_[host])});
    }
    const bool refused = !below(50);
    if (refused) restored.push_back({0, below(kHost), key(~0u)});
    if (saved.empty() && restored.empty()) return;
    try {
      store_->copy(saved, restored);
      under_way_++;
      if (refused) throw std::logic_error("a span was restored under another key");
    } catch (const std::runtime_error&) {
      if (!refused) throw;
    }
    for (const SpanCopy& copy : restored) cached_[copy.span] = refused ? 0 : stored_[copy.host];
    if (!below(20)) compare();
    if (!below(200)) reopen();
  }

 private:
  int below(int limit) { return (int)(random_() % limit); }
  static SpanKey key(uint32_t content) {
    const uint32_t words[4] = {content, 7, 1, 2};
    SpanKey key;
    static_assert(sizeof key == sizeof words);
    std::memcpy(&key, words, sizeof key);
    return key;
  }
  void open() { store_ = std::make_unique<FileSpans>(device_, ranges_, kCache, kHost, file_, kOffset); }

  template <typename F>
  void each_word(int span, uint32_t content, F f) {
    for (const SpanRange& range : ranges_) {
      std::minstd_rand words(content);
      for (size_t at = 0; at < range.bytes; at += 4) f(range.data + range.bytes * span + at, (uint32_t)words());
    }
  }
  void compute(int span) {
    const uint32_t content = ++contents_;
    cached_[span] = content;
    stream.push_back(
        {[=] { each_word(span, content, [](char* at, uint32_t word) { std::memcpy(at, &word, 4); }); }, nullptr});
  }
  void finish() {
    for (; under_way_; under_way_--) store_->finish();
    run_until(nullptr);
  }
  void compare() {
    finish();
    for (int span = 0; span < kCache; span++)
      if (cached_[span])
        each_word(span, cached_[span], [](const char* at, uint32_t word) {
          if (std::memcmp(at, &word, 4)) throw std::logic_error("a span has other content");
        });
  }
  void reopen() {
    finish();
    store_.reset();
    open();
    const auto [held, dropped] = store_->verify();
    size_t expected = 0;
    for (const uint32_t content : stored_) expected += content != 0;
    if (dropped || held.size() != expected) throw std::logic_error("the file holds other spans");
    for (const SpanCopy& copy : held)
      if (copy.key != key(stored_[copy.host])) throw std::logic_error("the file holds a span under another key");
  }

  std::mt19937 random_;
  Device device_;
  std::vector<SpanRange> ranges_;
  std::vector<std::vector<char>> memory_;
  std::vector<uint32_t> cached_, stored_;  // the content of each span; 0: none
  uint32_t contents_ = 0;
  int file_ = -1, under_way_ = 0;
  std::unique_ptr<FileSpans> store_;
};

}  // namespace
}  // namespace as::cuda

int main(int, char** arguments) {
  try {
    as::cuda::Rig rig((unsigned)std::atoi(arguments[2]));
    for (int i = std::atoi(arguments[1]); i > 0; i--) rig.step();
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
