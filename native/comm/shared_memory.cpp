#include "comm/shared_memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace as {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kSlice = 50'000'000;  // ns: the longest sleep of a waiter between checks for an abort
constexpr int64_t kHostSlice = 50'000;  // ns: the same between checks for messages of other hosts
constexpr size_t kLine = 64;
// Up to this size, one lane is faster, because it needs one wait instead of several.
constexpr size_t kOneLaneBytes = 32 << 10;
// Up to this size, every rank reads all partials. Larger sums are scattered and gathered, which waits twice. Measured
// in microseconds of processor time a rank (at once / scattered), on two cores that share a cache:
//                128 KB   256 KB   512 KB    4 MB   12 MB
//   2 ranks       14/15    25/26    50/47  560/420  1800/1370
//   4 ranks       21/36    41/48    80/66  970/800  3240/2340
// Where partials lie in remote memory, scattering would pay for smaller sums, too: with 4 ranks it reads half as much.
constexpr size_t kAtOnceBytes = 256 << 10;
// A larger sum is scattered and gathered in blocks of half the lanes' buffers, which stay in the caches.
constexpr size_t kBlockFloats = kLanes * kLaneBytes / sizeof(float) / 2;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

SharedMemory::SharedMemory(int rank, int size, const std::vector<uintptr_t>& addresses, bool spin, double timeout,
                           SumPartials sum, double heartbeat_seconds, std::shared_ptr<Hosts> hosts,
                           const std::vector<int>& sockets, int first)
    : Communicator(rank, size),
      hosts_(std::move(hosts)),
      spin_(spin),
      timeout_(timeout),
      sum_(sum),
      silence_(std::max(size, 0)),
      first_count_(first) {
  if (size < 1 || rank < 0 || rank >= size || (int)addresses.size() != size)
    throw std::invalid_argument("shared memory: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                " with " + std::to_string(addresses.size()) +
                                " segments; one segment a rank is needed");
  if (size > kMaxRanks)
    throw std::invalid_argument("shared memory: " + std::to_string(size) + " ranks; a group has at most " +
                                std::to_string(kMaxRanks));
  if (first < 0 || first > size)
    throw std::invalid_argument("shared memory: the first " + std::to_string(first) + " of " + std::to_string(size) +
                                " ranks");
  if (!(heartbeat_seconds > 0)) throw std::invalid_argument("shared memory: heartbeat_seconds must be positive");
  for (uintptr_t a : addresses) {
    if (a == 0 || a % 64 != 0) throw std::invalid_argument("shared memory: segments must be aligned to 64 bytes");
    segments_.push_back(reinterpret_cast<Segment*>(a));
  }
  std::vector<int> linked;  // hosts
  for (int h = 1; hosts_ && rank == 0 && h < hosts_->size(); h++) linked.push_back(h);
  if (hosts_ && rank != 0 && rank == first_here() && hosts_->own() > 0) linked = {0};
  if (linked.size() != sockets.size() || (hosts_ && hosts_->end(hosts_->size() - 1) != size))
    throw std::invalid_argument("shared memory: hosts with " + std::to_string(sockets.size()) + " sockets for " +
                                std::to_string(linked.size()) + " connections of rank " + std::to_string(rank));
  if (!linked.empty())
    link_ = std::make_unique<Link>(static_cast<LinkEnd&>(*this), sockets, linked, heartbeat_seconds, kCommandBytes);
  heartbeat_thread_ = std::thread([this, pause = std::chrono::duration<double>(heartbeat_seconds)] {
    std::unique_lock<std::mutex> lock(closing_);
    do segments_[rank_]->heartbeats.fetch_add(1, std::memory_order_relaxed);
    while (!closed_.wait_for(lock, pause, [this] { return is_closed_; }));
  });
}

void SharedMemory::close() {
  if (first_) first_->close();
  if (link_) link_->close();
  {
    std::lock_guard<std::mutex> lock(closing_);
    is_closed_ = true;
  }
  closed_.notify_all();
  if (heartbeat_thread_.joinable()) heartbeat_thread_.join();
}

std::shared_ptr<SharedMemory> SharedMemory::first_ranks(int count) {
  std::lock_guard<std::mutex> lock(making_first_);
  if (hosts_ || count < 1 || count != first_count_ || rank_ >= count)
    throw std::invalid_argument("shared memory: rank " + std::to_string(rank_) + " asks for the first " +
                                std::to_string(count) + " of " + std::to_string(size_) +
                                " ranks on one host; there is memory for the first " + std::to_string(first_count_));
  if (!first_) {
    std::vector<uintptr_t> addresses;
    for (int r = 0; r < count; r++) addresses.push_back(reinterpret_cast<uintptr_t>(segments_[r] + 1));
    first_ = std::make_shared<SharedMemory>(rank_, count, addresses, spin_, timeout_, sum_);
    first_->all_ = this;
  }
  return first_;
}

double SharedMemory::total(std::atomic<int64_t> SharedMemory::* counter) const {
  std::lock_guard<std::mutex> lock(making_first_);
  return (double)((this->*counter).load(std::memory_order_relaxed) +
                  (first_ ? ((*first_).*counter).load(std::memory_order_relaxed) : 0));
}

bool SharedMemory::aborted(std::string& message) const {
  if (all_ && all_->aborted(message)) return true;
  for (const Segment* s : segments_)
    if (s->aborted.load(std::memory_order_acquire) == 2) {
      message.assign(s->message, strnlen(s->message, sizeof s->message));
      return true;
    }
  return false;
}

void SharedMemory::check_abort() const {
  std::string message;
  if (aborted(message)) throw std::runtime_error(message);
}

void SharedMemory::abort(const std::string& message) {
  if (all_) all_->abort(message);
  Segment* own = segments_[rank_];
  uint32_t nobody = 0;
  if (!own->aborted.compare_exchange_strong(nobody, 1)) return;  // another thread of this rank was first
  size_t length = std::min(message.size(), sizeof own->message - 1);
  while (length < message.size() && length > 0 && (message[length] & 0xc0) == 0x80)
    length--;  // cut at a whole character
  std::memcpy(own->message, message.data(), length);
  own->message[length] = 0;
  own->aborted.store(2, std::memory_order_release);
  for (Segment* s : segments_) {  // wake every sleeper: waits check `aborted` when they wake
    for (Lane& lane : s->lanes) lane.signal.wake();
    s->command.wake();
    s->taken.wake();
  }
}

void SharedMemory::check_silence(int peer, const char* what) {
  if (!silence_[peer].check(segments_[rank_]->heartbeats, segments_[peer]->heartbeats)) return;
  const std::string message = "rank " + std::to_string(rank_) + " waited for rank " + std::to_string(peer) + " in " +
                              what +
                              ", but that rank is silent: "
                              "its process has ended or is stopped; the group is given up";
  abort(message);
  throw std::runtime_error(message);
}

SharedMemory::Timed::Timed(std::atomic<int64_t>& nanoseconds, bool counts)
    : nanoseconds_(nanoseconds), start_(counts ? Clock::now().time_since_epoch() / std::chrono::nanoseconds(1) : -1) {}

SharedMemory::Timed::~Timed() {
  if (start_ < 0) return;
  const int64_t now = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  nanoseconds_.store(nanoseconds_.load(std::memory_order_relaxed) + now - start_, std::memory_order_relaxed);
}

void SharedMemory::give_up(int peer, const char* what) {
  const std::string message = "rank " + std::to_string(rank_) + " waited " + std::to_string((int)timeout_) +
                              " s for rank " + std::to_string(peer) + " in " + what + "; the group is given up";
  abort(message);
  throw std::runtime_error(message);
}

template <class Ready, class Pause, class Sleep>
void SharedMemory::wait_for(int peer, const char* what, Ready ready, Pause pause, Sleep sleep) {
  for (int spins = spin_ ? kSpins * 4 : 0; spins > 0; spins--) {
    if (ready()) return;
    pause();
  }
  const auto start = Clock::now();
  while (!ready()) {
    check_abort();
    check_silence(peer, what);
    if (seconds_since(start) > timeout_) give_up(peer, what);
    sleep();
  }
}

void SharedMemory::wait(Signal& signal, uint32_t target, int peer, const char* what, int lane) {
  uint32_t seen = 0;
  const auto ready = [&] { return reached(seen = signal.value.load(std::memory_order_acquire), target); };
  if (ready()) return;
  const Timed timed(waited_, &signal == &segments_[peer]->lanes[0].signal);
  wait_for(
      peer, what, ready,
      [&] {
        if (all_heard(lane)) cpu_pause();
      },
      [&] { signal.sleep(seen, all_heard(lane) ? kSlice : kHostSlice); });
}

void SharedMemory::wait_until(int peer, const char* what, int64_t slice, const std::function<bool()>& ready,
                              const std::function<void(int64_t)>& sleep) {
  if (ready()) return;
  const Timed exchanged(exchanged_, true), waited(waited_, true);
  wait_for(peer, what, ready, cpu_pause, [&] { sleep(std::min(slice, kSlice)); });
}

void SharedMemory::await_all(int lane, uint32_t sequence, const char* what) {
  for (int r = 0; r < size_; r++)
    if (r != rank_) await(r, lane, sequence, what);
  finish(lane, what);
}

void SharedMemory::finish(int lane, const char* what) {
  if (all_heard(lane)) return;
  const auto start = Clock::now();
  for (int64_t tries = 0; !all_heard(lane); tries++) {
    if (spin_ && tries < kSpins * 4) continue;
    check_abort();
    if (seconds_since(start) > timeout_) give_up(first_here(), what);
    const timespec pause{0, kHostSlice};
    nanosleep(&pause, nullptr);
  }
}

// The mirrors' buffers are free at this point. A rank publishes a chunk only after every rank has published the
// previous one. By then all ranks have read the chunk before that, which used the same buffer.
void SharedMemory::exchange(int lane, uint32_t sequence, size_t bytes, size_t stride) {
  for (int h = 0; h < hosts_->size(); h++) {
    if (h == hosts_->own()) continue;
    const size_t begin = stride * hosts_->first(h), count = stride ? stride * hosts_->end(h) - begin : bytes;
    hosts_->send(lane, hosts_->receiver(h, rank_), piece(rank_, lane, sequence) + begin, count);
  }
  const size_t begin = stride * first_here(), most = stride ? stride * end_here() - begin : kLaneBytes;
  for (int r = 0; r < size_; r++)
    if (!hosts_->here(r) && hosts_->receiver(hosts_->own(), r) == rank_)
      hosts_->receive(lane, r, piece(r, lane, sequence) + begin, most, segments_[r]->lanes[lane].signal, sequence + 1);
}

SharedMemory::Scattered SharedMemory::scattered(size_t rows, size_t width, size_t bytes) const {
  return {*this, rows, width, bytes, rows * width * bytes <= kOneLaneBytes ? 1 : kLanes};
}

SharedMemory::Range SharedMemory::Scattered::lane(int rank, int lane) const {
  const auto [first, last] = ranks.rows_of(rows, rank);
  const size_t begin = first * width, end = last * width, unit = kLine / bytes;
  const size_t lines = (end - begin + unit - 1) / unit;
  auto at = [&](int i) { return std::min(end, begin + lines * i / lanes * unit); };
  return {at(lane), at(lane + 1)};
}

SharedMemory::Range SharedMemory::Scattered::share(int rank, int lane, size_t offset, size_t most) const {
  const Range range = this->lane(rank, lane);
  const size_t begin = std::min(range.end, range.begin + offset);
  return {begin, std::min(range.end, begin + most)};
}

size_t SharedMemory::Scattered::longest(int which) const {
  size_t most = 0;
  for (int r = 0; r < ranks.size(); r++) most = std::max(most, lane(r, which).size());
  return most;
}

size_t SharedMemory::Scattered::stride(int lane, size_t offset, size_t most) const {
  constexpr size_t kUnit = kLine / sizeof(float);
  return std::min(most, (longest(lane) - offset + kUnit - 1) / kUnit * kUnit);
}

void SharedMemory::all_reduce(float* x, size_t n, int thread, int threads) {
  if (size_ == 1) return;
  const Timed timed(exchanged_, thread == 0);
  if (n * sizeof(float) <= kAtOnceBytes) return all_reduce_at_once(x, n, thread, threads);
  for (size_t begin = 0; begin < n; begin += kBlockFloats) {
    const Scattered shape = scattered(std::min(kBlockFloats, n - begin), 1, sizeof(float));
    reduce_scatter(x + begin, shape, thread, threads);
    all_gather(reinterpret_cast<char*>(x + begin), shape, thread,
               threads);  // each thread gathers the lanes that it summed
  }
}

void SharedMemory::reduce_scatter_rows(float* x, size_t rows, size_t width, int thread, int threads) {
  if (size_ == 1) return;
  const Timed timed(exchanged_, thread == 0);
  reduce_scatter(x, scattered(rows, width, sizeof(float)), thread, threads);
}

void SharedMemory::all_gather_rows(void* base, size_t rows, size_t row_bytes, int thread, int threads) {
  if (size_ == 1) return;
  const Timed timed(exchanged_, thread == 0);
  all_gather(static_cast<char*>(base), scattered(rows, row_bytes, 1), thread, threads);
}

// A thread's lanes advance together, chunk by chunk: it publishes all of them before it waits for any. The number of
// chunks of a lane follows from the shape, so all ranks agree on it.

void SharedMemory::reduce_scatter(float* x, const Scattered& shape, int thread, int threads) {
  // A chunk holds an equal part for each rank.
  const size_t most = kLaneBytes / kLine / size_ * kLine / sizeof(float);
  const float* partials[kMaxRanks];
  size_t longest = 0;
  for (int lane = thread; lane < shape.lanes; lane += threads) longest = std::max(longest, shape.longest(lane));
  for (size_t offset = 0; offset < longest; offset += most) {
    for (int lane = thread; lane < shape.lanes; lane += threads) {
      if (offset >= shape.longest(lane)) continue;
      const uint32_t sequence = sequence_[lane].next;
      const size_t stride = shape.stride(lane, offset, most);
      float* to = reinterpret_cast<float*>(piece(rank_, lane, sequence));
      for (int r = 0; r < size_; r++) {
        const Range share = shape.share(r, lane, offset, most);
        if (r != rank_) std::memcpy(to + r * stride, x + share.begin, share.size() * sizeof(float));
      }
      publish_piece(lane, sequence, 0, stride * sizeof(float));
    }
    for (int lane = thread; lane < shape.lanes; lane += threads) {
      if (offset >= shape.longest(lane)) continue;
      const uint32_t sequence = sequence_[lane].next++;
      const size_t stride = shape.stride(lane, offset, most);
      const Range own = shape.share(rank_, lane, offset, most);
      await_all(lane, sequence, "reduce-scatter");
      for (int r = 0; r < size_; r++)
        partials[r] =
            r == rank_ ? x + own.begin : reinterpret_cast<const float*>(piece(r, lane, sequence)) + rank_ * stride;
      sum_(partials, size_, x + own.begin, own.size());
    }
  }
}

void SharedMemory::all_gather(char* base, const Scattered& shape, int thread, int threads) {
  const size_t most = kLaneBytes / shape.bytes;
  size_t longest = 0;
  for (int lane = thread; lane < shape.lanes; lane += threads) longest = std::max(longest, shape.longest(lane));
  for (size_t offset = 0; offset < longest; offset += most) {
    for (int lane = thread; lane < shape.lanes; lane += threads) {
      if (offset >= shape.longest(lane)) continue;
      const uint32_t sequence = sequence_[lane].next;
      const Range own = shape.share(rank_, lane, offset, most);
      std::memcpy(piece(rank_, lane, sequence), base + own.begin * shape.bytes, own.size() * shape.bytes);
      publish_piece(lane, sequence, own.size() * shape.bytes);
    }
    for (int lane = thread; lane < shape.lanes; lane += threads) {
      if (offset >= shape.longest(lane)) continue;
      const uint32_t sequence = sequence_[lane].next++;
      for (int r = 0; r < size_; r++) {
        if (r == rank_) continue;
        await(r, lane, sequence, "all-gather");
        const Range share = shape.share(r, lane, offset, most);
        std::memcpy(base + share.begin * shape.bytes, piece(r, lane, sequence), share.size() * shape.bytes);
      }
      finish(lane, "all-gather");
    }
  }
}

// Every rank reads all values of every other rank.
void SharedMemory::all_reduce_at_once(float* x, size_t n, int thread, int threads) {
  const int lanes = n * sizeof(float) <= kOneLaneBytes ? 1 : kLanes;
  constexpr size_t kMost = kLaneBytes / sizeof(float);
  const float* partials[kMaxRanks];
  const auto share = [&](int lane, size_t offset) {
    const size_t end = n * (lane + 1) / lanes, begin = std::min(end, n * lane / lanes + offset);
    return Range{begin, std::min(end, begin + kMost)};
  };
  for (size_t offset = 0; offset < (n + lanes - 1) / lanes; offset += kMost) {
    for (int lane = thread; lane < lanes; lane += threads) {
      const Range range = share(lane, offset);
      if (!range.size()) continue;
      const uint32_t sequence = sequence_[lane].next;
      std::memcpy(piece(rank_, lane, sequence), x + range.begin, range.size() * sizeof(float));
      publish_piece(lane, sequence, range.size() * sizeof(float));
    }
    for (int lane = thread; lane < lanes; lane += threads) {
      const Range range = share(lane, offset);
      if (!range.size()) continue;
      const uint32_t sequence = sequence_[lane].next++;
      await_all(lane, sequence, "allreduce");
      for (int r = 0; r < size_; r++) partials[r] = reinterpret_cast<const float*>(piece(r, lane, sequence));
      sum_(partials, size_, x + range.begin, range.size());
    }
  }
}

std::vector<std::string> SharedMemory::gather(const std::string& bytes) {
  std::vector<std::string> all(rank_ == 0 ? size_ : 0);
  if (size_ == 1) {
    all[0] = bytes;
    return all;
  }
  // The first chunk starts with the length. Every rank reads all lengths, so all agree on the number of chunks.
  const uint64_t length = bytes.size();
  std::string message(reinterpret_cast<const char*>(&length), sizeof length);
  message += bytes;
  std::vector<size_t> lengths(size_, 0);
  size_t longest = message.size();
  for (size_t offset = 0; offset < longest; offset += kLaneBytes) {
    const uint32_t sequence = sequence_[kGatherLane].next++;
    const size_t own = std::min(kLaneBytes, message.size() - std::min(offset, message.size()));
    if (own) std::memcpy(piece(rank_, kGatherLane, sequence), message.data() + offset, own);
    publish_piece(kGatherLane, sequence, own);
    for (int r = 0; r < size_; r++) {
      if (r != rank_) await(r, kGatherLane, sequence, "gather");
      const char* data = piece(r, kGatherLane, sequence);
      if (offset == 0) {
        uint64_t l;
        std::memcpy(&l, data, sizeof l);
        lengths[r] = l + sizeof l;
        longest = std::max(longest, lengths[r]);
      }
      if (rank_ == 0 && offset < lengths[r]) {
        const size_t count = std::min(kLaneBytes, lengths[r] - offset);
        if (offset == 0) all[r].assign(data + sizeof length, count - sizeof length);
        else all[r].append(data, count);
      }
    }
    finish(kGatherLane, "gather");
  }
  return all;
}

// The first rank of each host passes the chunks on to the other ranks of its host.
void SharedMemory::broadcast(std::string& bytes) {
  if (size_ == 1) return;
  constexpr int kLane = kBroadcastLane;
  Signal& sent = segments_[0]->lanes[kLane].signal;
  uint64_t length = bytes.size();
  size_t at = 0;  // position in the bytes, which follow the length
  do {
    const uint32_t sequence = sequence_[kLane].next++;
    char* data = piece(0, kLane, sequence);
    const size_t head = at == 0 ? sizeof length : 0;
    if (rank_ == 0) {
      if (head) std::memcpy(data, &length, head);
      const size_t count = bytes.copy(data + head, kLaneBytes - head, at);
      sent.publish(sequence + 1);
      for (int h = 1; hosts_ && h < hosts_->size(); h++) hosts_->send(kLane, hosts_->first(h), data, head + count);
      at += count;
    } else {
      if (rank_ == first_here()) hosts_->receive(kLane, 0, data, kLaneBytes, sent, sequence + 1);
      await(0, kLane, sequence, "broadcast");
      if (head) {
        std::memcpy(&length, data, head);
        bytes.clear();
      }
      bytes.append(data + head, std::min<size_t>(kLaneBytes - head, length - at));
      at = bytes.size();
      segments_[rank_]->lanes[kLane].signal.publish(sequence + 1);
    }
    if (rank_ != first_here()) continue;
    // The chunk is being sent. The next one reuses the other buffer, so all ranks must have taken the previous chunk.
    for (int r = first_here() + 1; r < end_here(); r++)
      wait(segments_[r]->lanes[kLane].signal, sequence, r, "broadcast", kLane);
    finish(kLane, "broadcast");
  } while (at < length);
}

void SharedMemory::publish(int kind, const std::string& payload) {
  if (link_) link_->command(kind, payload);
  size_t offset = 0;
  do {
    for (int r = 1; r < end_here(); r++) wait(segments_[r]->taken, commands_, r, "taking a command");
    const size_t count = std::min(kCommandBytes, payload.size() - offset);
    put_command(commands_++, kind, payload.data() + offset, count, offset + count < payload.size());
    offset += count;
  } while (offset < payload.size());
}

void SharedMemory::put_command(uint32_t before, int kind, const char* data, size_t bytes, bool more) {
  Segment* root = segments_[0];
  std::memcpy(root->command_data, data, bytes);
  root->kind = kind;
  root->length = (uint32_t)bytes;
  root->more = more;
  root->command.publish(before + 1);
}

bool SharedMemory::relay(int kind, const char* data, size_t bytes, bool more) {
  for (int r = first_here(); r < end_here(); r++)
    if (!reached(segments_[r]->taken.value.load(std::memory_order_acquire), relayed_)) return false;
  put_command(relayed_++, kind, data, bytes, more);
  return true;
}

std::vector<uint64_t> SharedMemory::heartbeats() const {
  std::vector<uint64_t> found;
  for (const Segment* s : segments_) found.push_back(s->heartbeats.load(std::memory_order_relaxed));
  return found;
}

void SharedMemory::heard(int host, const std::vector<uint64_t>& heartbeats) {
  for (int r = 0; r < std::min(size_, (int)heartbeats.size()); r++)
    if (host == 0 ? !hosts_->here(r) : r >= hosts_->first(host) && r < hosts_->end(host))
      segments_[r]->heartbeats.store(heartbeats[r], std::memory_order_relaxed);
}

bool SharedMemory::wait_command(double timeout, int& kind, std::string& payload) {
  Segment* root = segments_[0];
  payload.clear();
  const auto start = Clock::now();
  int spins = spin_ ? kSpins : 0;
  while (true) {
    const uint32_t seen = root->command.value.load(std::memory_order_acquire);
    if (reached(seen, commands_ + 1)) {
      kind = root->kind;
      payload.append(root->command_data, root->length);
      const bool more = root->more;
      segments_[rank_]->taken.publish(++commands_);
      if (!more) return true;
      continue;
    }
    if (spins-- > 0) {
      cpu_pause();
      continue;
    }
    check_abort();
    if (rank_ != 0) check_silence(0, "waiting for a command");
    const double left = timeout - seconds_since(start);
    if (left <= 0 && payload.empty()) return false;
    if (left <= -timeout_) throw std::runtime_error("rank 0 stopped in the middle of a command");
    // A command or an abort wakes the sleeper. The limit bounds the delay if the abort comes just before the sleep.
    root->command.sleep(seen, (int64_t)(std::clamp(left, 0.001, 0.9) * 1e9));
  }
}

}  // namespace as
