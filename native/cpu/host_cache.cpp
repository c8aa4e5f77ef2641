#include "cpu/host_cache.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "cpu/row_hash.h"

namespace as {
namespace {

constexpr size_t kPage = 4096;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

bool is_none(const SpanKey& key) { return key == SpanKey{}; }

}  // namespace

size_t HostCache::span_bytes(const std::vector<const SpanCache*>& caches) {
  size_t bytes = 0;
  for (const SpanCache* cache : caches)
    for (int l = 0; l < cache->layers(); l++) bytes += cache->layer(l).layout.bytes * cache->layer(l).kv_heads;
  return rounded(bytes, 64);
}

size_t HostCache::bytes_for(const std::vector<const SpanCache*>& caches, int spans) {
  return rounded(spans * sizeof(Entry), kPage) + spans * span_bytes(caches);
}

HostCache::HostCache(std::vector<const SpanCache*> caches, Pool& pool, int spans, int file, size_t offset)
    : caches_(std::move(caches)), pool_(pool), spans_(spans), stride_(span_bytes(caches_)) {
  if (spans < 1) throw std::invalid_argument("a second tier of " + std::to_string(spans) + " spans");
  const size_t bytes = bytes_for(caches_, spans);
  char* begin;
  if (file < 0) {
    memory_ = Buffer(bytes, "the prefix cache's second tier");
    begin = memory_.as();
  } else {
    mapped_ = mmap(nullptr, offset + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped_ == MAP_FAILED) {
      mapped_ = nullptr;
      throw std::runtime_error(std::string("the file of the prefix cache's second tier cannot be mapped: ") +
                               std::strerror(errno));
    }
    mapped_bytes_ = offset + bytes;
    begin = static_cast<char*>(mapped_) + offset;
  }
  entries_ = reinterpret_cast<Entry*>(begin);
  data_ = begin + rounded(spans * sizeof(Entry), kPage);
}

HostCache::~HostCache() {
  if (mapped_) munmap(mapped_, mapped_bytes_);
}

// A span's KV heads of a layer are adjacent.
template <typename F>
void HostCache::each_piece(int index, F&& f) const {
  char* at = data(index);
  for (const SpanCache* cache : caches_)
    for (int l = 0; l < cache->layers(); l++) {
      const LayerCache& layer = cache->layer(l);
      const size_t bytes = layer.layout.bytes * layer.kv_heads;
      f(layer, at, bytes);
      at += bytes;
    }
}

uint64_t HostCache::checksum(int index) const {
  uint64_t sum = 0, piece = 0;
  each_piece(index, [&](const LayerCache&, const char* at, size_t bytes) { sum += row_hash(at, bytes, piece++); });
  return sum;
}

void HostCache::save(const SpanCopy& copy) const {
  Entry& entry = entries_[copy.host];
  entry.key = {};  // until everything is written: the process may be killed at any time
  std::atomic_signal_fence(std::memory_order_seq_cst);
  each_piece(copy.host, [&](const LayerCache& layer, char* at, size_t bytes) {
    std::memcpy(at, layer.span(copy.span, 0), bytes);
  });
  entry.checksum = checksum(copy.host);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  entry.key = copy.key;
}

void HostCache::restore(const SpanCopy& copy) const {
  const Entry& entry = entries_[copy.host];
  if (entry.key != copy.key || entry.checksum != checksum(copy.host))
    throw std::runtime_error("span " + std::to_string(copy.host) +
                             " of the prefix cache's second tier differs from what was saved");
  each_piece(copy.host, [&](const LayerCache& layer, const char* at, size_t bytes) {
    std::memcpy(layer.span(copy.span, 0), at, bytes);
  });
}

void HostCache::copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) {
  pool_.run([&](int thread) {
    const auto mine = [&](const std::vector<SpanCopy>& all, auto&& one) {
      pool_.guard([&] {
        const auto [begin, end] = part((int)all.size(), thread, pool_.size());
        for (int i = begin; i < end; i++) one(all[i]);
      });
    };
    mine(saved, [&](const SpanCopy& copy) { save(copy); });
    if (!pool_.barrier()) return;  // a restored span may overwrite one that is being saved
    mine(restored, [&](const SpanCopy& copy) { restore(copy); });
  });
}

std::pair<std::vector<SpanCopy>, int> HostCache::verify() {
  std::vector<char> damaged(spans_);
  pool_.run([&](int thread) {
    pool_.guard([&] {
      const auto [begin, end] = part(spans_, thread, pool_.size());
      for (int i = begin; i < end; i++) {
        if (is_none(entries_[i].key) || entries_[i].checksum == checksum(i)) continue;
        entries_[i].key = {};
        damaged[i] = 1;
      }
    });
  });
  std::vector<SpanCopy> held;
  int dropped = 0;
  for (int i = 0; i < spans_; i++) {
    dropped += damaged[i];
    if (!is_none(entries_[i].key)) held.push_back({-1, i, entries_[i].key});
  }
  return {std::move(held), dropped};
}

}  // namespace as
