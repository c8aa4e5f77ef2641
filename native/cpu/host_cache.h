// The prefix cache's second tier: spans evicted from the cache, kept in host memory or in a file and copied back later.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "batch/span_records.h"
#include "cpu/cache.h"
#include "cpu/pool.h"

namespace as {

class HostCache : public SpanStore {
 public:
  // caches: of one rank, with the same span numbers (a model's and its draft model's). They and the pool must outlive
  // the object. file: -1 for memory, otherwise the descriptor of a file with at least `offset` + bytes_for(spans)
  // bytes, which is mapped from `offset` on. The caller keeps ownership of it.
  HostCache(const std::vector<const SpanCache*>& caches, Pool& pool, int spans, int file, size_t offset);

  static size_t bytes_for(const std::vector<const SpanCache*>& caches, int spans);

  int spans() const override { return records_->spans(); }
  void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) override;
  // Returns the spans it holds and how many it dropped because their content differs from what was saved. For a file
  // that another process wrote.
  std::pair<std::vector<SpanCopy>, int> verify();

 private:
  void save(const SpanCopy& copy) const;
  void restore(const SpanCopy& copy) const;

  const std::vector<const SpanCache*> caches_;
  Pool& pool_;
  Buffer memory_;  // unless it is a file
  std::unique_ptr<SpanRecords> records_;
};

}  // namespace as
