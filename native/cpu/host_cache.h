// The prefix cache's second tier: spans that have left the cache, in memory of the host or in a file, to come back by
// copies.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "batch/batch.h"
#include "cpu/cache.h"
#include "cpu/pool.h"

namespace as {

class HostCache : public SpanStore {
 public:
  // Whose spans it keeps: caches of one rank whose spans have the same numbers (a model's and its draft model's). They
  // and the pool must outlive it. file: -1 for memory, otherwise a descriptor of a file that holds at least
  // `offset` + bytes_for(spans) bytes, which is mapped from there on; it stays the caller's.
  HostCache(std::vector<const SpanCache*> caches, Pool& pool, int spans, int file, size_t offset);
  ~HostCache() override;
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;

  static size_t bytes_for(const std::vector<const SpanCache*>& caches, int spans);

  int spans() const override { return spans_; }
  void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) override;
  // What it holds, and how many spans it has dropped, as they are not what was written there. For a file, which another
  // process has written.
  std::pair<std::vector<SpanCopy>, int> verify();

 private:
  // What a span of it is. A key of zeros: nothing.
  struct Entry {
    SpanKey key;
    uint64_t checksum, unused;
  };
  static size_t span_bytes(const std::vector<const SpanCache*>& caches);
  char* data(int index) const { return data_ + (size_t)index * stride_; }
  void save(const SpanCopy& copy) const;
  void restore(const SpanCopy& copy) const;
  uint64_t checksum(int index) const;
  template <typename F>
  void each_piece(int index, F&& f) const;  // f(layer, where its part of the span is here, bytes)

  const std::vector<const SpanCache*> caches_;
  Pool& pool_;
  const int spans_;
  const size_t stride_;  // bytes from a span to the next
  Buffer memory_;        // unless it is a file
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  Entry* entries_ = nullptr;
  char* data_ = nullptr;
};

}  // namespace as
