// The prefix cache's second tier: spans evicted from the cache, kept in host memory or in a file and copied back later.
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
  // caches: of one rank, with the same span numbers (a model's and its draft model's). They and the pool must outlive
  // the object. file: -1 for memory, otherwise the descriptor of a file with at least `offset` + bytes_for(spans)
  // bytes, which is mapped from `offset` on. The caller keeps ownership of it.
  HostCache(std::vector<const SpanCache*> caches, Pool& pool, int spans, int file, size_t offset);
  ~HostCache() override;
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;

  static size_t bytes_for(const std::vector<const SpanCache*>& caches, int spans);

  int spans() const override { return spans_; }
  void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) override;
  // Returns the spans it holds and how many it dropped because their content differs from what was saved. For a file
  // that another process wrote.
  std::pair<std::vector<SpanCopy>, int> verify();

 private:
  // Identifies a span's content. A key of zeros: empty.
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
  void each_piece(int index, F&& f) const;  // f(layer, address of its part of the span, bytes)

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
