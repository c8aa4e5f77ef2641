// The second tier of the prefix cache, in pinned host memory or in a file. Kernels copy spans to and from pinned memory
// in stream order with the steps.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "batch/span_records.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/memory/device.h"

namespace as::cuda {

// Queues copies between the caches and spans of pinned memory. One step may still be copied when the next is queued.
class SpanQueue {
 public:
  // ranges: of the caches. spans: of the pinned memory. most: copies of a step. marks: see add(). The device and the
  // caches must outlive this.
  SpanQueue(const Device& device, const std::vector<SpanRange>& ranges, int spans, size_t most, int marks = 0);
  ~SpanQueue();

  char* span(int index) const { return memory_.as() + index * span_bytes_; }
  // A step: begin(), any number of add(), end(). Pairs name spans of the pinned memory. mark: the number of a mark, for
  // done(); -1: none.
  void begin();
  void add(const std::vector<SpanPair>& pairs, bool saves, int mark = -1);
  void end();
  // Whether what was added last with this mark, and all that was added before, is copied.
  bool done(int mark) const;
  void wait() const { device_.wait(); }
  // Waits for the oldest step that is not finished, and returns the seconds that its copies took.
  double finish();

 private:
  struct Turn {
    Memory pairs;
    cudaEvent_t began, ended;
  };
  const Device& device_;
  const int ranges_;
  const size_t span_bytes_;
  size_t largest_ = 0;  // bytes of the largest range's part of a span
  Memory memory_, parts_, copies_;
  Turn turns_[2];
  std::vector<cudaEvent_t> marks_;
  int turn_ = 0, under_way_ = 0;  // the latest step's; steps that are not finished
  size_t queued_ = 0;             // copies of the step that is being queued
};

// In pinned memory.
class HostSpans : public SpanStore {
 public:
  // cache_spans: of each range.
  HostSpans(const Device& device, const std::vector<SpanRange>& ranges, int cache_spans, int spans);

  int spans() const override { return (int)keys_.size(); }
  // Queues the copies.
  void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) override;
  double finish() override { return queue_.finish(); }

 private:
  std::vector<SpanKey> keys_;
  SpanQueue queue_;
};

// In a file that outlives the process. Many file systems refuse to have a file's pages pinned, so the copies go through
// a bounded buffer: a saved span is written to the file when its step is finished, a restored one is read and checked
// when its step is queued. Until a saved span is in the file, it is restored from the buffer.
class FileSpans : public SpanStore {
 public:
  // file: see SpanRecords.
  FileSpans(const Device& device, const std::vector<SpanRange>& ranges, int cache_spans, int spans, int file,
            size_t offset);

  int spans() const override { return records_.spans(); }
  void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) override;
  double finish() override;
  std::pair<std::vector<SpanCopy>, int> verify() const;

 private:
  // Of one step: the saved spans that are in the buffer and not in the file yet, and the host's seconds.
  struct Turn {
    std::vector<SpanCopy> saved;
    double seconds = 0;
  };
  enum Use { saves, restores };
  static constexpr int kRooms = 4;  // groups of spans in a part of the buffer, for fill_and_send()
  // Each step in turn has a part of the buffer for its saves and one for its restores.
  int buffered(int turn, Use use, size_t index) const { return (2 * turn + use) * chunk_ + (int)index; }
  int find_unwritten(const SpanCopy& copy) const;  // a span of the buffer, or -1
  void queue(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored);
  void restore(const std::vector<SpanCopy>& restored);
  void write(int turn);
  void write_all();
  template <typename Work>
  void share(int count, const Work& work) const;  // see share_work()

  const SpanRecords records_;
  const size_t span_bytes_;
  const int chunk_;  // spans of a part of the buffer
  SpanQueue queue_;
  Turn turns_[2];
  int turn_ = 0, under_way_ = 0;
};

// Bytes of each layer's part of a span.
std::vector<size_t> span_pieces(const std::vector<SpanRange>& ranges);

}  // namespace as::cuda
