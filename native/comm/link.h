// The connections between hosts that are open all the time: one from rank 0 to the first rank of every other host. They
// carry commands, for which a thread sleeps on a socket (MPI's waits would keep a processor busy), beats, and the news
// that the group is given up.
//
// A host from which nothing comes for kLease beats of this one's own is lost, and so is one whose connection is closed
// without a farewell.
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

// Whose link it is. Called by the link's thread.
class LinkEnd {
 public:
  virtual ~LinkEnd() = default;
  virtual std::vector<uint64_t> beats() const = 0;                       // of all ranks
  virtual void heard(int host, const std::vector<uint64_t>& beats) = 0;  // those that the ranks of `host` know of
  // Hands on a command of rank 0, or a part of it. False: its place is taken still.
  virtual bool relay(int kind, const char* data, size_t bytes, bool more) = 0;
  virtual void abort(const std::string& message) = 0;
  virtual bool aborted(std::string& message) const = 0;
};

class Link {
 public:
  // sockets: connected ones, which are closed in the end; hosts: whose they are. piece: bytes of a command that are
  // relayed at once.
  Link(LinkEnd& end, std::vector<int> sockets, std::vector<int> hosts, double beat_seconds, size_t piece);
  ~Link() { close(); }
  void close();

  // To all hosts. Throws std::runtime_error if one takes nothing for `timeout` seconds, or the group was given up.
  void command(int kind, const std::string& payload, double timeout);

 private:
  using Clock = std::chrono::steady_clock;
  enum Type : uint32_t { kCommand = 1, kBeats, kAbort, kBye };
  struct Header {
    uint32_t type;
    int32_t kind;
    uint64_t length;
  };
  struct Peer {
    int socket, host;
    std::string received;
    int silent = 0;  // beats of this host since the last message
    bool open = true;
  };
  struct Relayed {
    int kind;
    std::string payload;
    size_t done = 0;
  };
  void run();
  void beat();
  void read(Peer& peer);
  void lose(Peer& peer, const std::string& why);
  bool relay();  // whether all commands are handed on
  void send(const Peer& peer, Type type, int kind, const char* data, size_t bytes, double timeout);

  LinkEnd& end_;
  std::vector<Peer> peers_;
  const double beat_seconds_;
  const size_t piece_;
  std::deque<Relayed> relayed_;
  std::mutex sending_;
  std::atomic<bool> closed_{false};
  bool told_ = false;  // the others know that the group is given up
  int wake_[2];
  std::thread thread_;
};

}  // namespace as
