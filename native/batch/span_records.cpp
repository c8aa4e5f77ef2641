#include "batch/span_records.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/row_hash.h"

namespace as {
namespace {

constexpr size_t kPage = 4096;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t content_bytes(const std::vector<size_t>& pieces) {
  size_t bytes = 0;
  for (const size_t piece : pieces) bytes += piece;
  return bytes;
}

size_t span_bytes(const std::vector<size_t>& pieces) { return rounded(content_bytes(pieces), 64); }

[[noreturn]] void fail_other(int span) {
  throw std::runtime_error("span " + std::to_string(span) +
                           " of the prefix cache's second tier differs from what was saved");
}

}  // namespace

size_t SpanRecords::bytes_for(const std::vector<size_t>& pieces, int spans) {
  return rounded(spans * sizeof(Entry), kPage) + spans * span_bytes(pieces);
}

SpanRecords::SpanRecords(std::vector<size_t> pieces, int spans, char* memory)
    : pieces_(std::move(pieces)), spans_(spans), bytes_(content_bytes(pieces_)), stride_(span_bytes(pieces_)) {
  place(memory);
}

SpanRecords::SpanRecords(std::vector<size_t> pieces, int spans, int file, size_t offset)
    : pieces_(std::move(pieces)), spans_(spans), bytes_(content_bytes(pieces_)), stride_(span_bytes(pieces_)) {
  const size_t bytes = offset + bytes_for(pieces_, spans);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED)
    throw std::runtime_error(std::string("the file of the prefix cache's second tier cannot be mapped: ") +
                             std::strerror(errno));
  mapped_ = mapped, mapped_bytes_ = bytes;
  place(static_cast<char*>(mapped_) + offset);
}

void SpanRecords::place(char* begin) {
  entries_ = reinterpret_cast<Entry*>(begin);
  data_ = begin + rounded(spans_ * sizeof(Entry), kPage);
}

SpanRecords::~SpanRecords() {
  if (mapped_) munmap(mapped_, mapped_bytes_);
}

uint64_t SpanRecords::checksum(int span) const { return row_hash(data_ + (size_t)span * stride_, bytes_, 0); }

void SpanRecords::forget(int span) const {
  entries_[span].key = {};
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void SpanRecords::seal(int span, const SpanKey& key, uint64_t checksum) const {
  entries_[span].checksum = checksum;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  entries_[span].key = key;
}

void SpanRecords::save_copy(int span, const SpanKey& key, const char* from) const {
  forget(span);
  seal(span, key, copy_row_hash(data_ + (size_t)span * stride_, from, bytes_, 0));
}

void SpanRecords::check(int span, const SpanKey& key) const {
  if (entries_[span].key != key || entries_[span].checksum != checksum(span)) fail_other(span);
}

void SpanRecords::read(int span, const SpanKey& key, char* to) const {
  const uint64_t copied = copy_row_hash(to, data_ + (size_t)span * stride_, bytes_, 0);
  if (entries_[span].key != key || entries_[span].checksum != copied) fail_other(span);
}

bool SpanRecords::forget_damaged(int span) const {
  if (entries_[span].key == SpanKey{} || entries_[span].checksum == checksum(span)) return false;
  forget(span);
  return true;
}

std::vector<SpanCopy> SpanRecords::held() const {
  std::vector<SpanCopy> held;
  for (int i = 0; i < spans_; i++)
    if (entries_[i].key != SpanKey{}) held.push_back({-1, i, entries_[i].key});
  return held;
}

}  // namespace as
