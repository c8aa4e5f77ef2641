#include "comm/window.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "cpu/kernels/kernels.h"

namespace as {
namespace {

using Clock = std::chrono::steady_clock;
constexpr long kSlice = 50'000'000;  // ns a waiter sleeps before it looks for an abort again

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Window::Window(int rank, int size, const std::vector<uintptr_t>& addresses, bool spin, double timeout,
               double beat_seconds)
    : rank_(rank), size_(size), spin_(spin), timeout_(timeout), watched_(std::max(size, 0)) {
  if (size < 1 || rank < 0 || rank >= size || (int)addresses.size() != size)
    throw std::invalid_argument("window: rank " + std::to_string(rank) + " of " + std::to_string(size) + " with " +
                                std::to_string(addresses.size()) + " segments; one segment a rank is needed");
  if (!(beat_seconds > 0)) throw std::invalid_argument("window: beat_seconds must be positive");
  for (uintptr_t a : addresses) {
    if (a == 0 || a % 64 != 0) throw std::invalid_argument("window: segments must be aligned to 64 bytes");
    segments_.push_back(reinterpret_cast<Segment*>(a));
  }
  beating_ = std::thread([this, pause = std::chrono::duration<double>(beat_seconds)] {
    std::unique_lock<std::mutex> lock(closing_);
    do segments_[rank_]->beats.fetch_add(1, std::memory_order_relaxed);
    while (!closed_.wait_for(lock, pause, [this] { return is_closed_; }));
  });
}

void Window::close() {
  {
    std::lock_guard<std::mutex> lock(closing_);
    is_closed_ = true;
  }
  closed_.notify_all();
  if (beating_.joinable()) beating_.join();
}

bool Window::aborted(std::string& message) const {
  for (const Segment* s : segments_)
    if (s->aborted.load(std::memory_order_acquire) == 2) {
      message.assign(s->message, strnlen(s->message, sizeof s->message));
      return true;
    }
  return false;
}

void Window::check_abort() const {
  std::string message;
  if (aborted(message)) throw std::runtime_error(message);
}

void Window::abort(const std::string& message) {
  Segment* own = segments_[rank_];
  uint32_t nobody = 0;
  if (!own->aborted.compare_exchange_strong(nobody, 1)) return;  // another thread of this rank was first
  size_t length = std::min(message.size(), sizeof own->message - 1);
  while (length < message.size() && length > 0 && (message[length] & 0xc0) == 0x80) length--;  // whole characters
  std::memcpy(own->message, message.data(), length);
  own->message[length] = 0;
  own->aborted.store(2, std::memory_order_release);
  for (Segment* s : segments_) {  // wake every sleeper; waits look at `aborted` when they wake
    for (Lane& lane : s->lanes) lane.signal.wake();
    s->command.wake();
    s->taken.wake();
  }
}

void Window::check_silence(int peer, const char* what) {
  Watched& watched = watched_[peer];
  const uint64_t beats = segments_[peer]->beats.load(std::memory_order_relaxed),
                 own = segments_[rank_]->beats.load(std::memory_order_relaxed);
  if (beats != watched.beats.load(std::memory_order_relaxed)) {
    watched.beats.store(beats, std::memory_order_relaxed), watched.since.store(own, std::memory_order_relaxed);
    return;
  }
  if (own < watched.since.load(std::memory_order_relaxed) + kSilentBeats) return;
  const std::string message = "rank " + std::to_string(rank_) + " waited for rank " + std::to_string(peer) + " in " +
                              what +
                              ", but that is silent: "
                              "its process has ended or is stopped; the group is given up";
  abort(message);
  throw std::runtime_error(message);
}

void Window::wait(Signal& signal, uint32_t target, int peer, const char* what) {
  int spins = spin_ ? kSpins * 4 : 0;
  for (; spins > 0; spins--) {
    if (reached(signal.value.load(std::memory_order_acquire), target)) return;
    cpu_pause();
  }
  const auto start = Clock::now();
  while (true) {
    const uint32_t seen = signal.value.load(std::memory_order_acquire);
    if (reached(seen, target)) return;
    check_abort();
    check_silence(peer, what);
    if (seconds_since(start) > timeout_) {
      const std::string message = "rank " + std::to_string(rank_) + " waited " + std::to_string((int)timeout_) +
                                  " s for rank " + std::to_string(peer) + " in " + what + "; the group is given up";
      abort(message);
      throw std::runtime_error(message);
    }
    signal.sleep(seen, kSlice);
  }
}

void Window::all_reduce(float* x, size_t n, int thread, int threads) {
  if (size_ == 1) return;
  // The number of lanes depends on n alone: small sums are not worth more than one wait.
  const int lanes = n <= 8192 ? 1 : kLanes;
  constexpr size_t kPiece = kLaneBytes / sizeof(float);
  const float* partials[256];
  std::vector<const float*> many;
  const float** source = partials;
  if (size_ > 256) many.resize(size_), source = many.data();
  // A thread's lanes advance together, piece by piece, so that publishing all comes before waiting for any.
  size_t longest = 0;
  for (int lane = thread; lane < lanes; lane += threads) {
    const auto [begin, end] = std::pair<size_t, size_t>(n * lane / lanes, n * (lane + 1) / lanes);
    longest = std::max(longest, end - begin);
  }
  for (size_t offset = 0; offset < longest; offset += kPiece) {
    for (int pass = 0; pass < 2; pass++) {
      for (int lane = thread; lane < lanes; lane += threads) {
        const size_t begin = n * lane / lanes, end = n * (lane + 1) / lanes;
        if (begin + offset >= end) continue;
        const size_t count = std::min(kPiece, end - begin - offset);
        float* part = x + begin + offset;
        const uint32_t sequence = sequence_[lane];
        const int buffer = sequence & 1;
        if (pass == 0) {
          std::memcpy(segments_[rank_]->data[lane][buffer], part, count * sizeof(float));
          segments_[rank_]->lanes[lane].signal.publish(sequence + 1);
        } else {
          for (int r = 0; r < size_; r++) {
            if (r != rank_) wait(segments_[r]->lanes[lane].signal, sequence + 1, r, "allreduce");
            source[r] = reinterpret_cast<const float*>(segments_[r]->data[lane][buffer]);
          }
          kernels().sum_partials(source, size_, part, count);
          sequence_[lane] = sequence + 1;
        }
      }
    }
  }
}

std::vector<std::string> Window::gather(const std::string& bytes) {
  std::vector<std::string> all(rank_ == 0 ? size_ : 0);
  if (size_ == 1) {
    all[0] = bytes;
    return all;
  }
  // The first piece starts with the length; everybody reads all lengths, so all agree on the number of pieces.
  const uint64_t length = bytes.size();
  std::string message(reinterpret_cast<const char*>(&length), sizeof length);
  message += bytes;
  std::vector<size_t> lengths(size_, 0);
  size_t longest = message.size();
  for (size_t offset = 0; offset < longest; offset += kLaneBytes) {
    const uint32_t sequence = sequence_[kGatherLane]++;
    const int buffer = sequence & 1;
    if (offset < message.size())
      std::memcpy(segments_[rank_]->data[kGatherLane][buffer], message.data() + offset,
                  std::min(kLaneBytes, message.size() - offset));
    segments_[rank_]->lanes[kGatherLane].signal.publish(sequence + 1);
    for (int r = 0; r < size_; r++) {
      if (r != rank_) wait(segments_[r]->lanes[kGatherLane].signal, sequence + 1, r, "gather");
      const char* data = segments_[r]->data[kGatherLane][buffer];
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
  }
  return all;
}

void Window::publish(int kind, const std::string& payload) {
  Segment* own = segments_[0];
  size_t offset = 0;
  do {
    for (int r = 1; r < size_; r++) wait(segments_[r]->taken, commands_, r, "taking a command");
    const size_t count = std::min(kCommandBytes, payload.size() - offset);
    std::memcpy(own->command_data, payload.data() + offset, count);
    offset += count;
    own->kind = kind;
    own->length = (uint32_t)count;
    own->more = offset < payload.size();
    own->command.publish(++commands_);
  } while (offset < payload.size());
}

bool Window::wait_command(double timeout, int& kind, std::string& payload) {
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
    // Commands wake the sleeper at once; the long slice only bounds how late an abort is seen (it also wakes).
    root->command.sleep(seen, (long)(std::clamp(left, 0.001, 0.9) * 1e9));
  }
}

}  // namespace as
