#include "cuda/memory/host_spans.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>

#include "cuda/memory/host_threads.h"

namespace as::cuda {
namespace {

size_t span_bytes(const std::vector<SpanRange>& ranges) {
  const std::vector<size_t> pieces = span_pieces(ranges);
  return std::accumulate(pieces.begin(), pieces.end(), (size_t)0);
}

void check_spans(int spans) {
  if (spans < 1) throw std::invalid_argument("a host cache of " + std::to_string(spans) + " spans");
}

// Copies of a step: each span of the caches and of the host cache is filled at most once.
size_t most_copies(int cache_spans, int spans) { return (size_t)spans + cache_spans; }

// Spans of one of the four parts of a file's buffer: enough for all threads of fill_and_send(), and to keep the link
// busy; at most 64 MiB.
int spans_of_chunk(const std::vector<SpanRange>& ranges, int spans) {
  constexpr size_t kBytes = 64 << 20, kMost = 128;
  return (int)std::clamp<size_t>(kBytes / std::max<size_t>(1, span_bytes(ranges)), 1, std::min<size_t>(spans, kMost));
}

[[noreturn]] void fail_other(int span) {
  throw std::runtime_error("span " + std::to_string(span) + " of the host cache is not what was written there");
}

// Adds the time until it ends to `seconds`.
class Watch {
 public:
  explicit Watch(double& seconds) : seconds_(seconds) {}
  ~Watch() { seconds_ += std::chrono::duration<double>(Clock::now() - began_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  const Clock::time_point began_ = Clock::now();
};

}  // namespace

std::vector<size_t> span_pieces(const std::vector<SpanRange>& ranges) {
  std::vector<size_t> pieces;
  for (const SpanRange& range : ranges) pieces.push_back(range.bytes);
  return pieces;
}

SpanQueue::SpanQueue(const Device& device, const std::vector<SpanRange>& ranges, int spans, size_t most, int marks)
    : device_(device), ranges_((int)ranges.size()), span_bytes_(cuda::span_bytes(ranges)) {
  device.use();
  memory_ = Memory(spans * span_bytes_, "the host cache", Memory::Where::host);
  std::vector<SpanPart> parts;
  size_t at = 0;
  for (const SpanRange& range : ranges) {
    parts.push_back({range.data, memory_.as() + at, range.bytes, span_bytes_});
    at += range.bytes, largest_ = std::max(largest_, range.bytes);
  }
  parts_ = Memory(parts.size() * sizeof(SpanPart), "the parts of a span");
  check(cudaMemcpy(parts_.as(), parts.data(), parts_.size(), cudaMemcpyHostToDevice), "copying the parts of a span");
  for (Turn& turn : turns_) {
    turn.pairs = Memory(most * sizeof(SpanPair), "copies of spans", Memory::Where::host);
    check(cudaEventCreate(&turn.began), "making an event"), check(cudaEventCreate(&turn.ended), "making an event");
  }
  copies_ = Memory(most * sizeof(SpanPair), "copies of spans");
  marks_.resize(marks);
  for (cudaEvent_t& mark : marks_) check(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming), "making an event");
}

SpanQueue::~SpanQueue() {
  cudaStreamSynchronize(device_.stream());
  for (Turn& turn : turns_) cudaEventDestroy(turn.began), cudaEventDestroy(turn.ended);
  for (const cudaEvent_t mark : marks_) cudaEventDestroy(mark);
}

bool SpanQueue::done(int mark) const {
  const cudaError_t result = cudaEventQuery(marks_[mark]);
  if (result == cudaErrorNotReady) return false;
  check(result, "copying spans");
  return true;
}

double SpanQueue::finish() {
  const Turn& turn = turns_[under_way_-- > 1 ? 1 - turn_ : turn_];
  check(cudaEventSynchronize(turn.ended), "copying spans");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, turn.began, turn.ended), "copying spans");
  return 1e-3 * milliseconds;
}

void SpanQueue::begin() {
  device_.use();
  queued_ = 0;
  check(cudaEventRecord(turns_[1 - turn_].began, device_.stream()), "copying spans");
}

void SpanQueue::end() {
  turn_ = 1 - turn_;
  check(cudaEventRecord(turns_[turn_].ended, device_.stream()), "copying spans");
  under_way_++;
}

void SpanQueue::add(const std::vector<SpanPair>& pairs, bool saves, int mark) {
  if (pairs.empty()) return;
  SpanPair* from = turns_[1 - turn_].pairs.as<SpanPair>() + queued_;
  std::copy(pairs.begin(), pairs.end(), from);
  SpanPair* to = copies_.as<SpanPair>() + queued_;
  check(cudaMemcpyAsync(to, from, pairs.size() * sizeof(SpanPair), cudaMemcpyHostToDevice, device_.stream()),
        "copying spans");
  copy_spans(parts_.as<SpanPart>(), ranges_, largest_, to, (int)pairs.size(), saves, device_.queue());
  queued_ += pairs.size();
  if (mark >= 0) check(cudaEventRecord(marks_[mark], device_.stream()), "copying spans");
}

HostSpans::HostSpans(const Device& device, const std::vector<SpanRange>& ranges, int cache_spans, int spans)
    : keys_((check_spans(spans), spans)), queue_(device, ranges, spans, most_copies(cache_spans, spans)) {}

void HostSpans::copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) {
  for (const SpanCopy& copy : saved) keys_[copy.host] = copy.key;
  for (const SpanCopy& copy : restored)
    if (keys_[copy.host] != copy.key) fail_other(copy.host);
  const auto pairs = [](const std::vector<SpanCopy>& copies) {
    std::vector<SpanPair> pairs;
    for (const SpanCopy& copy : copies) pairs.push_back({copy.span, copy.host});
    return pairs;
  };
  queue_.begin();
  queue_.add(pairs(saved), true);
  queue_.add(pairs(restored), false);
  queue_.end();
}

FileSpans::FileSpans(const Device& device, const std::vector<SpanRange>& ranges, int cache_spans, int spans, int file,
                     size_t offset)
    : records_(span_pieces(ranges), (check_spans(spans), spans), file, offset),
      span_bytes_(cuda::span_bytes(ranges)),
      chunk_(spans_of_chunk(ranges, spans)),
      queue_(device, ranges, 4 * chunk_, most_copies(cache_spans, spans), 2 * kRooms) {}

template <typename Work>
void FileSpans::share(int count, const Work& work) const {
  share_work(count, count * span_bytes_, [&](int64_t begin, int64_t end) { work((int)begin, (int)end); });
}

std::pair<std::vector<SpanCopy>, int> FileSpans::verify() const {
  return as::verify(records_, [&](int count, const auto& work) { share(count, work); });
}

int FileSpans::find_unwritten(const SpanCopy& copy) const {
  for (const int turn : {turn_, 1 - turn_}) {  // the latest first
    const std::vector<SpanCopy>& saved = turns_[turn].saved;
    for (size_t i = 0; i < saved.size(); i++) {
      if (saved[i].host != copy.host) continue;
      if (saved[i].key != copy.key) fail_other(copy.host);
      return buffered(turn, saves, i);
    }
  }
  return -1;
}

// The turn's copies are done.
void FileSpans::write(int turn) {
  std::vector<SpanCopy>& saved = turns_[turn].saved;
  share((int)saved.size(), [&](int begin, int end) {
    for (int i = begin; i < end; i++)
      records_.save_copy(saved[i].host, saved[i].key, queue_.span(buffered(turn, saves, i)));
  });
  saved.clear();
}

void FileSpans::write_all() {
  queue_.wait();
  write(1 - turn_), write(turn_);  // the earlier first: both may fill the same span
}

void FileSpans::copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) {
  turn_ = 1 - turn_;
  turns_[turn_].seconds = 0;
  try {
    queue(saved, restored);
  } catch (...) {
    write_all();  // nobody will finish() this step
    turn_ = 1 - turn_;
    throw;
  }
  under_way_++;
}

void FileSpans::queue(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) {
  const Watch watch(turns_[turn_].seconds);
  queue_.begin();
  for (size_t begin = 0; begin < saved.size(); begin += chunk_) {
    if (begin) write_all();  // makes room
    const std::vector<SpanCopy> chunk(saved.begin() + begin, saved.begin() + std::min(saved.size(), begin + chunk_));
    std::vector<SpanPair> pairs;
    for (size_t i = 0; i < chunk.size(); i++) pairs.push_back({chunk[i].span, buffered(turn_, saves, i)});
    turns_[turn_].saved = chunk;
    queue_.add(pairs, true);
  }
  restore(restored);
  queue_.end();
}

// Threads read and check spans in groups, while those that were read before are copied to the GPU.
void FileSpans::restore(const std::vector<SpanCopy>& restored) {
  if (restored.empty()) return;
  const int group = std::max(1, chunk_ / kRooms), rooms = chunk_ / group, count = (int)restored.size();
  std::vector<SpanPair> pairs;
  for (int i = 0; i < count; i++) {
    const int unwritten = find_unwritten(restored[i]);
    pairs.push_back({restored[i].span, unwritten >= 0 ? unwritten : buffered(turn_, restores, i % (group * rooms))});
  }
  fill_and_send(
      count, group, rooms, host_threads(count, count * span_bytes_),
      [&](int i) {
        const int place = buffered(turn_, restores, i % (group * rooms));
        if (pairs[i].host == place) records_.read(restored[i].host, restored[i].key, queue_.span(place));
      },
      [&](int g) {
        const auto begin = pairs.begin() + g * group, end = pairs.begin() + std::min(count, (g + 1) * group);
        queue_.add({begin, end}, false, g % rooms);
      },
      [&](int g) { return queue_.done(g % rooms); });
}

double FileSpans::finish() {
  const int turn = under_way_-- > 1 ? 1 - turn_ : turn_;
  const double copied = queue_.finish();
  {
    const Watch watch(turns_[turn].seconds);
    write(turn);
  }
  return copied + turns_[turn].seconds;
}

}  // namespace as::cuda
