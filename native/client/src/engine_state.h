// What is behind a ClientEngine: the members of its pool and its requests, started, stopped and resumed.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allspark/client.h"
#include "pool.h"

namespace allspark::client::internal {

inline AllSparkError failure(const std::string& text) { return {AsStatus::ALLSPARK_RUNTIME_ERROR, text}; }

struct EngineState {
  explicit EngineState(ClientOptions given) : options(std::move(given)) {}

  ClientOptions options;
  Background background;
  std::vector<std::unique_ptr<Member>> members;
  std::mutex mutex;
  std::map<RequestHandle_t, std::shared_ptr<LiveRequest>> requests;
  std::atomic<int64_t> started = 0;  // requests sent to members, each attempt counted

  void log(const std::string& text) const {
    if (options.log) options.log(text);
  }

  void connect(const std::vector<std::string>& addresses);
  void close();
  void check_open() const {
    if (background.closing()) throw AllSparkError(AsStatus::ALLSPARK_INVALID_CALL_ERROR, "the engine is closed");
  }

  // The result of `attempt` with the first member that can be reached, retried up to reconnect_timeout. Throws what
  // `attempt` throws, and AllSparkError once no member could be reached.
  template <class Attempt>
  auto retry(const Attempt& attempt, const std::function<std::vector<Member*>()>& candidates)
      -> decltype(attempt(*candidates()[0])) {
    const auto deadline = after(options.reconnect_timeout);
    while (true) {
      check_open();
      std::string details;
      for (Member* member : candidates()) {
        try {
          return attempt(*member);
        } catch (const Unavailable& error) { details += (details.empty() ? "" : "; ") + std::string(error.what()); }
      }
      check_open();
      if (!options.resume) throw failure(details);
      if (Clock::now() >= deadline)
        throw failure(details + "; gave up after " + std::to_string(options.reconnect_timeout) + " s");
      background.pause(kRetrySeconds);
    }
  }
  template <class Question, class Answer>
  Answer ask(grpc::Status (pb::Allspark::Stub::*method)(grpc::ClientContext*, const Question&, Answer*),
             const Question& question, double timeout = kQuestionSeconds);
  // A call that every member must carry out; the first refusal is thrown. Once a member's answer was lost, a refusal
  // with the status `done` means that the lost call had succeeded; `again` is the question that is then sent.
  template <class Question>
  AsStatus call_all(grpc::Status (pb::Allspark::Stub::*method)(grpc::ClientContext*, const Question&, pb::Done*),
                    const Question& question, AsStatus done = AsStatus::ALLSPARK_SUCCESS,
                    const Question* again = nullptr);
  std::vector<Member*> connected_first();
  std::vector<Member*> by_load(const LiveRequest& request);

  std::shared_ptr<LiveRequest> start(const std::string& model, const RequestContent& content);
  std::shared_ptr<LiveRequest> find(const std::string& model, RequestHandle_t handle);
  void stop(const std::shared_ptr<LiveRequest>& request);
  void release(const std::shared_ptr<LiveRequest>& request);
  void drop(const std::shared_ptr<LiveRequest>& request);
  // Marks this client's requests of a model as stopped while `call` ends them: that is not an error then.
  AsStatus interrupting(const std::string& model, const std::function<AsStatus()>& call);

  void on_lost(const Session& session, Requests requests, const std::exception_ptr& error);
  void resume(Requests requests, const std::string& lost, std::string why);
  Requests send_again(const Requests& requests, Session& session);
};

template <class Question, class Answer>
Answer EngineState::ask(grpc::Status (pb::Allspark::Stub::*method)(grpc::ClientContext*, const Question&, Answer*),
                        const Question& question, double timeout) {
  auto call = [&](Member& member) { return member.call(method, question, timeout); };
  try {
    return retry(call, [this] { return connected_first(); });
  } catch (const NotLoaded&) {
    for (auto& member : members) {  // another one may have loaded it
      try {
        return call(*member);
      } catch (const NotLoaded& error) { log(error.what()); } catch (const Unavailable& error) {
        log(error.what());
      }
    }
    throw;
  }
}

template <class Question>
AsStatus EngineState::call_all(grpc::Status (pb::Allspark::Stub::*method)(grpc::ClientContext*, const Question&,
                                                                          pb::Done*),
                               const Question& question, AsStatus done, const Question* again) {
  check_open();
  std::vector<std::future<void>> answers;
  for (auto& each : members) {
    Member* const member = each.get();
    answers.push_back(std::async(std::launch::async, [this, member, method, done, again, &question] {
      bool lost = false;
      retry(
          [&](Member& target) {
            const bool repeated = std::exchange(lost, true);
            try {
              target.call(method, repeated && again != nullptr ? *again : question);
            } catch (const AllSparkError& error) {
              if (!repeated || done == AsStatus::ALLSPARK_SUCCESS || error.status() != done) throw;
            }
          },
          [member] { return std::vector<Member*>{member}; });
    }));
  }
  std::exception_ptr first;
  for (auto& answer : answers) {
    try {
      answer.get();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return AsStatus::ALLSPARK_SUCCESS;
}

}  // namespace allspark::client::internal
