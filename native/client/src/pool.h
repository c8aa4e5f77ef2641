// The server groups of a client's pool: connections, and which one a call goes to.
#pragma once

#include <condition_variable>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "session.h"

namespace allspark::client::internal {

// How long a connection attempt may take before it counts as failed, s.
constexpr double kAttemptSeconds = 5;
// How old the state of models may be where a request chooses a member, s.
constexpr double kLoadAgeSeconds = 0.5;
// How long a server may take to answer a question, s.
constexpr double kQuestionSeconds = 30;
// Pause between attempts while no member can be reached, s.
constexpr double kRetrySeconds = 0.2;

// Tasks on threads of their own, until the client is closed.
class Background {
 public:
  void run(std::function<void()> task);
  // Waits; returns whether the client is being closed.
  bool pause(double duration);
  bool closing() const;
  // No further task begins, and pauses end.
  void begin_closing();
  void join();

 private:
  mutable std::mutex mutex_;
  std::condition_variable closing_changed_;
  bool closing_ = false;
  std::list<std::future<void>> tasks_;
};

// "host:port" or "unix:/path" without surrounding blanks; std::invalid_argument for anything else.
std::string check_address(const std::string& address);
// The first token of the file $ALLSPARK_TOKEN_FILE, whose lines are `TOKEN` or `ROLE TOKEN …`; empty if that is not
// set.
std::string environment_token();

// A server group, as a client sees it: a channel, and at most one live session.
class Member {
 public:
  Member(const std::string& address, const std::optional<TlsConfig>& tls, std::string token, Session::OnLost on_lost,
         Background* background);

  const std::string address;

  // The session if there is a live one, otherwise null. Does not wait.
  std::shared_ptr<Session> live_session() const;
  // The live session; opened if there is none. Throws Unavailable, or AllSparkError if the server refuses this client.
  std::shared_ptr<Session> session(double timeout = kAttemptSeconds);
  // Tries to open a session on another thread, so that callers do not wait for a server that may be dead.
  void reconnect_soon();

  // A unary call, which may take `timeout` seconds; 0: no limit. Throws what the engine threw, or Unavailable.
  template <class Question, class Answer>
  Answer call(grpc::Status (pb::Allspark::Stub::*method)(grpc::ClientContext*, const Question&, Answer*),
              const Question& question, double timeout = 0) {
    Answer answer;
    run_call(timeout, [&](grpc::ClientContext* context) { return (stub_.get()->*method)(context, question, &answer); });
    return answer;
  }
  // Has the server load a model on demand, and waits.
  void load_model(const std::string& name);
  // This server's models, as of at most `max_age` seconds ago.
  std::vector<ModelState> models(double max_age = 0);
  bool draining() const;
  // Prompt tokens that this client has sent since `models` last asked the server, about.
  int64_t sent_work() const;
  // The number of the client's last request that this member got.
  int64_t last_request() const;
  void note_sent(int64_t tokens, int64_t request);

  void close();
  void join();

 private:
  void run_call(double timeout, const std::function<grpc::Status(grpc::ClientContext*)>& body);

  const std::string token_;
  const Session::OnLost on_lost_;
  Background* const background_;
  std::unique_ptr<pb::Allspark::Stub> stub_;
  std::timed_mutex connecting_;  // held while connecting; taken before mutex_
  mutable std::mutex mutex_;
  bool closed_ = false;
  bool reconnecting_ = false;
  std::shared_ptr<Session> session_;  // the latest; perhaps not greeted yet, or broken
  bool greeted_ = false;
  std::set<grpc::ClientContext*> calls_;  // unary calls under way
  std::vector<ModelState> models_;
  std::optional<Clock::time_point> models_time_;
  bool draining_ = false;
  int64_t sent_work_ = 0;
  int64_t last_request_ = 0;
};

}  // namespace allspark::client::internal
