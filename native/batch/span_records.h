// The spans of a host cache as they lie in memory or in a mapped file: first the key and checksum of each, then their
// content. All devices share this format. A process may be killed at any time: a span without its key is empty.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "batch/batch.h"

namespace as {

class SpanRecords {
 public:
  // pieces: bytes of each layer's part of a span. memory: bytes_for() zeroed bytes, or whatever these have written.
  SpanRecords(std::vector<size_t> pieces, int spans, char* memory);
  // Maps bytes_for() bytes of a file from `offset` on. The caller keeps ownership of the descriptor.
  SpanRecords(std::vector<size_t> pieces, int spans, int file, size_t offset);
  ~SpanRecords();
  SpanRecords(const SpanRecords&) = delete;
  SpanRecords& operator=(const SpanRecords&) = delete;

  static size_t bytes_for(const std::vector<size_t>& pieces, int spans);

  int spans() const { return spans_; }
  // Calls f(piece, its address, its bytes) for a span's content.
  template <typename F>
  void each_piece(int span, F&& f) const {
    char* at = data_ + (size_t)span * stride_;
    for (size_t piece = 0; piece < pieces_.size(); at += pieces_[piece++]) f((int)piece, at, pieces_[piece]);
  }
  // write() fills the span's content; then the span has this key.
  template <typename Write>
  void save(int span, const SpanKey& key, const Write& write) const {
    forget(span);
    write();
    seal(span, key, checksum(span));
  }
  // The same for adjacent pieces, which are copied from here.
  void save_copy(int span, const SpanKey& key, const char* from) const;
  // Throws std::runtime_error unless the span's key and content are what was saved.
  void check(int span, const SpanKey& key) const;
  // Copies the span's pieces, one after the other. Throws std::runtime_error, after having written there, unless the
  // key and what was copied are what was saved.
  void read(int span, const SpanKey& key, char* to) const;
  // Forgets the span if its content differs from what was saved. Returns whether it did.
  bool forget_damaged(int span) const;
  // The spans that have a key.
  std::vector<SpanCopy> held() const;

 private:
  struct Entry {
    SpanKey key;                // zeros: empty
    uint64_t checksum, unused;  // checksum: row_hash of the content, with row 0
  };
  void place(char* begin);
  void forget(int span) const;
  void seal(int span, const SpanKey& key, uint64_t checksum) const;
  uint64_t checksum(int span) const;

  const std::vector<size_t> pieces_;
  const int spans_;
  const size_t bytes_;   // of a span's content; its pieces are adjacent
  const size_t stride_;  // bytes from a span to the next
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  Entry* entries_ = nullptr;
  char* data_ = nullptr;
};

// verify(): what a file that another process wrote holds, and how many of its spans were dropped because their content
// differs from what was saved. share(count, work) calls work(begin, end) for parts of [0, count) on several threads.
template <typename Share>
std::pair<std::vector<SpanCopy>, int> verify(const SpanRecords& records, const Share& share) {
  std::vector<char> damaged(records.spans());
  share(records.spans(), [&](int begin, int end) {
    for (int i = begin; i < end; i++) damaged[i] = records.forget_damaged(i);
  });
  int dropped = 0;
  for (const char each : damaged) dropped += each;
  return {records.held(), dropped};
}

}  // namespace as
