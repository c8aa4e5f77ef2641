// A request on the client's side, and the session stream that the requests of a connection share.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "allspark.grpc.pb.h"
#include "wire.h"

namespace allspark::client {

class RequestHandle {};

}  // namespace allspark::client

namespace allspark::client::internal {

using Clock = std::chrono::steady_clock;

inline std::chrono::duration<double> seconds(double value) { return std::chrono::duration<double>(value); }
inline Clock::time_point after(double value) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds(value));
}

inline bool is_final(GenerateRequestStatus status) { return status >= GenerateRequestStatus::GenerateFinished; }

// What a ResultQueue and the side that fills it share.
struct QueueState {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<GeneratedElements> elements;
  GenerateRequestStatus status = GenerateRequestStatus::Init;
  std::string reason;
  std::string opened;
  std::optional<AllSparkError> error;
  size_t length = 0;
  std::map<std::string, double> stat;

  // Adds new tokens. Those that arrive after the end are dropped.
  void put(GeneratedElements added);
  // Advances the status to one that is not final; it never goes back.
  void set_status(GenerateRequestStatus next);
  // Ends the request; later calls have no effect. `end` by InternalError has an error, and GenerateInterrupted has one
  // unless the caller asked for it. `why`: the value of FinishReason, if the status does not imply it.
  void finish(GenerateRequestStatus end, std::optional<AllSparkError> failure = {}, const std::string& why = "");
  bool wait_final(double timeout);
  void wait_final();
};

class Session;

// A request and what was received of it. It outlives sessions: after a resumption another one feeds its queue. Its
// mutex is taken after a session's, and before its queue's.
struct LiveRequest : RequestHandle {
  explicit LiveRequest(pb::GenerateRequest sent);

  const std::shared_ptr<QueueState> state = std::make_shared<QueueState>();
  ResultQueue queue;
  const std::string model;
  const std::string lora_name;

  std::mutex mutex;
  std::condition_variable answered_changed;
  pb::GenerateRequest request;             // its prompt becomes ids once a server has tokenized it
  std::vector<std::vector<int>> received;  // token ids so far, one list a sample
  struct Cached {
    int all = 0, gpu = 0, cpu = 0;
  };
  std::vector<Cached> cached;     // by sample: its last elements' fields about the prefix cache
  std::string fingerprint;        // of the server that took it
  std::string image_fingerprint;  // likewise, of a request with images
  std::shared_ptr<Session> session;
  uint64_t wire_id = 0;           // its id within `session`
  bool stopped = false;           // the caller has asked for its end
  bool dropped = false;           // the caller has released it
  bool resumed = false;           // it was sent again after a server was lost
  int losses = 0;                 // servers lost in a row without a new token
  int deaths = 0;                 // those of `losses` that count, see GenerateRequest.deaths
  size_t generated_at_start = 0;  // tokens received when it was last sent
  bool begun = false;             // a step has computed it, alone, since it was last sent
  bool answered = false;          // the server has accepted or refused it
  std::exception_ptr refusal;     // why it was refused, or Unavailable
  const double wall_arrival;      // Unix time, s
  const Clock::time_point arrival = Clock::now();
  std::optional<Clock::time_point> first_token;

  // The next two are called with the mutex held.
  size_t generated() const;
  // Counts the loss of its server; returns why the request must not be resumed again, or "". A request that crashes its
  // server must not crash one server after the other: see allspark_client/live_request.py.
  std::string note_loss();
};

using Requests = std::vector<std::shared_ptr<LiveRequest>>;

// A live Session call: one stream in each direction for all requests of a connection. A thread reads the server's
// messages and feeds the requests' queues until the stream breaks; it then calls `on_lost` with the requests that were
// accepted and had not ended. Another one writes. join() must be called before the last owner lets go.
class Session : public std::enable_shared_from_this<Session> {
 public:
  using OnLost = std::function<void(const Session&, Requests, std::exception_ptr)>;

  Session(std::string address, pb::Allspark::Stub* stub, const std::string& token, OnLost on_lost);

  // Introduces this client and waits for the answer. Throws Unavailable, or AllSparkError if the server refuses it.
  void greet(double timeout);
  // Sends a request without waiting for the answer. Throws Unavailable.
  void send(const std::shared_ptr<LiveRequest>& request);
  // Waits for the answer to `send`; throws what the engine threw, or Unavailable.
  void wait_answer(const std::shared_ptr<LiveRequest>& request);
  // Asks the server to end a request; its end arrives as an event.
  void stop(const std::shared_ptr<LiveRequest>& request);
  // Tells the server to forget a request. A thread that waits for the answer to it gets an AllSparkError.
  void release(const std::shared_ptr<LiveRequest>& request);
  // Ends the stream; the server cancels its live requests.
  void close();
  void join();

  const std::string& address() const { return address_; }
  bool broken() const;
  size_t live() const;  // requests that have not ended
  pb::ServerInfo info() const;

 private:
  void read();
  void write();
  void put(pb::SessionRequest message);  // mutex_ held
  void end_writing();
  void apply(const pb::Tokens& message);
  void apply(const pb::RequestEvent& event);
  std::shared_ptr<LiveRequest> find(uint64_t id) const;
  void set_stat(LiveRequest& request, const pb::RequestStat& message);

  const std::string address_;
  const OnLost on_lost_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<pb::SessionRequest, pb::SessionResponse>> stream_;

  mutable std::mutex mutex_;
  std::condition_variable greeted_changed_, outbox_changed_, writer_changed_;
  std::deque<pb::SessionRequest> outbox_;
  bool writing_ = true;
  bool writer_ended_ = false;
  bool greeted_ = false;
  pb::ServerInfo info_;
  std::exception_ptr broken_;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<LiveRequest>> live_;
  std::thread reader_, writer_;
};

}  // namespace allspark::client::internal
