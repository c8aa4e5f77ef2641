#include "cpu/host_cache.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace as {
namespace {

std::vector<size_t> pieces_of(const std::vector<const SpanCache*>& caches) {
  std::vector<size_t> pieces;
  for (const SpanCache* cache : caches) pieces.push_back(cache->span_bytes());
  return pieces;
}

}  // namespace

size_t HostCache::bytes_for(const std::vector<const SpanCache*>& caches, int spans) {
  return SpanRecords::bytes_for(pieces_of(caches), spans);
}

HostCache::HostCache(const std::vector<const SpanCache*>& caches, Pool& pool, int spans, int file, size_t offset)
    : caches_(caches), pool_(pool) {
  if (spans < 1) throw std::invalid_argument("a second tier of " + std::to_string(spans) + " spans");
  if (file < 0) {
    memory_ = Buffer(bytes_for(caches, spans), "the prefix cache's second tier");
    records_ = std::make_unique<SpanRecords>(pieces_of(caches_), spans, memory_.as());
  } else {
    records_ = std::make_unique<SpanRecords>(pieces_of(caches_), spans, file, offset);
  }
}

void HostCache::save(const SpanCopy& copy) const {
  records_->save(copy.host, copy.key, [&] {
    records_->each_piece(
        copy.host, [&](int piece, char* at, size_t bytes) { std::memcpy(at, caches_[piece]->span(copy.span), bytes); });
  });
}

void HostCache::restore(const SpanCopy& copy) const {
  records_->check(copy.host, copy.key);
  records_->each_piece(copy.host, [&](int piece, const char* at, size_t bytes) {
    std::memcpy(caches_[piece]->span(copy.span), at, bytes);
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
  return as::verify(*records_, [&](int count, const auto& work) {
    pool_.run([&](int thread) {
      pool_.guard([&] {
        const auto [begin, end] = part(count, thread, pool_.size());
        work(begin, end);
      });
    });
  });
}

}  // namespace as
