// Permanent connections between hosts: one from rank 0 to the first rank of every other host. They carry commands,
// heartbeats, and aborts. They are sockets, because a wait by MPI would keep a core busy.
//
// A host is lost if nothing arrives from it while this host counts kLease heartbeats of its own, or if its connection
// closes without a farewell.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace as {

constexpr int kLease = 5;

// The owner of a link. The link's thread calls these functions.
class LinkEnd {
 public:
  virtual ~LinkEnd() = default;
  virtual std::vector<uint64_t> heartbeats() const = 0;                       // of all ranks
  virtual void heard(int host, const std::vector<uint64_t>& heartbeats) = 0;  // the counts that `host` has
  // Passes on a command of rank 0, or a chunk of one. Returns false if its buffer is still in use.
  virtual bool relay(int kind, const char* data, size_t bytes, bool more) = 0;
  virtual void abort(const std::string& message) = 0;
  virtual bool aborted(std::string& message) const = 0;
};

class Link {
 public:
  // sockets: connected; close() closes them. hosts: the host at the other end of each. piece: the most bytes of a
  // command that are passed on at a time.
  Link(LinkEnd& end, std::vector<int> sockets, std::vector<int> hosts, double heartbeat_seconds, size_t piece);
  ~Link() { close(); }
  void close();

  // Sends a command to all hosts. Throws std::runtime_error if one is lost or the group has aborted.
  void command(int kind, const std::string& payload);

 private:
  using Clock = std::chrono::steady_clock;
  enum Type : uint32_t { kCommand = 1, kHeartbeats, kAbort, kBye };
  struct Header {
    uint32_t type;
    int32_t kind;
    uint64_t length;
  };
  struct Peer {
    int socket, host;
    std::string received;
    int silent = 0;  // this host's heartbeats since the last message
    bool open = true;
  };
  struct Relayed {
    int kind;
    std::string payload;
    size_t done = 0;
  };
  void run();
  void send_heartbeat();
  void read(Peer& peer);
  void lose(Peer& peer, const std::string& why);
  bool relay();  // returns whether all commands were passed on
  void send(const Peer& peer, Type type, int kind, const char* data, size_t bytes, double timeout);

  LinkEnd& end_;
  std::vector<Peer> peers_;
  const double heartbeat_seconds_;
  const size_t piece_;
  std::deque<Relayed> relayed_;
  std::mutex sending_;
  std::atomic<bool> closed_{false};
  bool told_ = false;  // the other hosts have been told of the abort
  int wake_[2];
  std::thread thread_;
};

}  // namespace as
