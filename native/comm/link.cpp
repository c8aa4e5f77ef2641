#include "comm/link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace as {
namespace {

constexpr int kLookMs = 200;               // interval between checks for an abort of this host
constexpr double kShortSend = 0.5;         // s; a heartbeat that takes longer counts as lost
constexpr uint64_t kLongest = 1ull << 30;  // bytes of a message

}  // namespace

Link::Link(LinkEnd& end, std::vector<int> sockets, std::vector<int> hosts, double heartbeat_seconds, size_t piece)
    : end_(end), heartbeat_seconds_(heartbeat_seconds), piece_(piece) {
  if (sockets.empty() || sockets.size() != hosts.size()) throw std::invalid_argument("link: one socket for each host");
  for (size_t i = 0; i < sockets.size(); i++) {
    fcntl(sockets[i], F_SETFL, fcntl(sockets[i], F_GETFL) | O_NONBLOCK);
    peers_.push_back({sockets[i], hosts[i], {}, 0, true});
  }
  if (pipe2(wake_, O_NONBLOCK | O_CLOEXEC)) throw std::runtime_error("link: the limit on open files is reached");
  thread_ = std::thread([this] { run(); });
}

void Link::close() {
  if (!thread_.joinable()) return;
  closed_ = true;
  if (write(wake_[1], "x", 1) < 0) return thread_.join();  // the pipe is full, so the thread is awake
  thread_.join();
  std::string why;
  const bool aborted = end_.aborted(why);
  for (Peer& peer : peers_) {
    try {
      if (peer.open) send(peer, aborted ? kAbort : kBye, 0, why.data(), why.size(), kShortSend);
    } catch (const std::runtime_error&) { peer.open = false; }
    ::close(peer.socket);
  }
  ::close(wake_[0]), ::close(wake_[1]);
}

void Link::command(int kind, const std::string& payload) {
  for (const Peer& peer : peers_)
    send(peer, kCommand, kind, payload.data(), payload.size(), kLease * heartbeat_seconds_);
}

void Link::send(const Peer& peer, Type type, int kind, const char* data, size_t bytes, double timeout) {
  std::lock_guard<std::mutex> lock(sending_);
  const Header header{type, kind, bytes};
  auto taken = Clock::now();
  for (size_t at = 0; at < sizeof header + bytes;) {
    iovec parts[2] = {{(char*)&header + std::min(at, sizeof header), sizeof header - std::min(at, sizeof header)},
                      {(char*)data + (at - std::min(at, sizeof header)), bytes - (at - std::min(at, sizeof header))}};
    msghdr message{};
    message.msg_iov = parts, message.msg_iovlen = 2;
    const ssize_t n = sendmsg(peer.socket, &message, MSG_NOSIGNAL);
    if (n >= 0) {
      at += n;
      taken = Clock::now();
      continue;
    }
    if (errno != EAGAIN && errno != EINTR)
      throw std::runtime_error("the connection to host " + std::to_string(peer.host) + " is lost: " + strerror(errno));
    std::string why;
    if (type == kCommand && end_.aborted(why)) throw std::runtime_error(why);
    if (std::chrono::duration<double>(Clock::now() - taken).count() > timeout)
      throw std::runtime_error("host " + std::to_string(peer.host) + " has accepted no data for " +
                               std::to_string((int)timeout) + " s");
    pollfd ready{peer.socket, POLLOUT, 0};
    poll(&ready, 1, 50);
  }
}

void Link::run() {
  const auto beat_pause =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(heartbeat_seconds_));
  auto next_beat = Clock::now();
  std::vector<pollfd> ready(peers_.size() + 1);
  while (!closed_) {
    std::string why;
    if (!told_ && end_.aborted(why)) {
      told_ = true;
      for (Peer& peer : peers_) try {
          if (peer.open) send(peer, kAbort, 0, why.data(), why.size(), kShortSend);
        } catch (const std::runtime_error&) { peer.open = false; }
    }
    if (Clock::now() >= next_beat) {
      send_heartbeat();
      next_beat = Clock::now() + beat_pause;
    }
    const bool idle = relay();
    for (size_t i = 0; i < peers_.size(); i++) ready[i] = {peers_[i].open ? peers_[i].socket : -1, POLLIN, 0};
    ready.back() = {wake_[0], POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(next_beat - Clock::now()).count();
    // A rank that has not taken the last command yet is in a step. It takes the command soon, so wait 0.2 ms only.
    const int64_t wait = idle ? std::clamp<int64_t>(left, 0, kLookMs * 1'000'000ll) : 200'000;
    const timespec limit{0, (long)wait};
    if (ppoll(ready.data(), ready.size(), &limit, nullptr) <= 0) continue;
    for (size_t i = 0; i < peers_.size(); i++)
      if (ready[i].revents) read(peers_[i]);
  }
}

void Link::send_heartbeat() {
  const std::vector<uint64_t> heartbeats = end_.heartbeats();
  for (Peer& peer : peers_) {
    if (!peer.open) continue;
    if (++peer.silent > kLease) {
      lose(peer, "it has been silent for " + std::to_string(kLease) + " heartbeats");
      continue;
    }
    try {
      send(peer, kHeartbeats, 0, reinterpret_cast<const char*>(heartbeats.data()),
           heartbeats.size() * sizeof heartbeats[0], kShortSend);
    } catch (const std::runtime_error& error) { lose(peer, error.what()); }
  }
}

void Link::lose(Peer& peer, const std::string& why) {
  peer.open = false;
  if (!closed_) end_.abort("host " + std::to_string(peer.host) + " is lost: " + why + "; the group is given up");
}

void Link::read(Peer& peer) {
  char buffer[1 << 16];
  std::string ended;  // why no more data arrives
  while (ended.empty()) {
    const ssize_t n = recv(peer.socket, buffer, sizeof buffer, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (n <= 0) ended = n ? strerror(errno) : "its process has closed the connection";
    else peer.received.append(buffer, n), peer.silent = 0;
  }
  size_t at = 0;
  Header header;
  while (peer.received.size() - at >= sizeof header) {
    std::memcpy(&header, peer.received.data() + at, sizeof header);
    if (header.length > kLongest) return lose(peer, "it sent an invalid message");
    if (peer.received.size() - at - sizeof header < header.length) break;
    const char* data = peer.received.data() + at + sizeof header;
    if (header.type == kCommand) relayed_.push_back({header.kind, std::string(data, header.length)});
    else if (header.type == kAbort) end_.abort(std::string(data, header.length));
    else if (header.type == kBye) peer.open = false;
    else {
      std::vector<uint64_t> heartbeats(header.length / sizeof(uint64_t));
      std::memcpy(heartbeats.data(), data, heartbeats.size() * sizeof heartbeats[0]);
      end_.heard(peer.host, heartbeats);
    }
    at += sizeof header + header.length;
  }
  peer.received.erase(0, at);
  if (!ended.empty() && peer.open) lose(peer, ended);  // closed without a farewell
}

bool Link::relay() {
  while (!relayed_.empty()) {
    Relayed& next = relayed_.front();
    const size_t count = std::min(piece_, next.payload.size() - next.done);
    const bool more = next.done + count < next.payload.size();
    if (!end_.relay(next.kind, next.payload.data() + next.done, count, more)) return false;
    next.done += count;
    if (!more) relayed_.pop_front();
  }
  return true;
}

}  // namespace as
