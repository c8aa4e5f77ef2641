#include "allspark/client.h"

#include <google/protobuf/util/json_util.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <thread>
#include <tuple>

#include "pool.h"

namespace allspark::client {

namespace internal {

namespace {

// How long a new client waits for its servers to accept connections, s.
constexpr double kFirstContactSeconds = 5;
// How long StopRequest waits for the server to confirm the end of a request, s.
constexpr double kStopSeconds = 10;
// How long profiling a model may take, s: the first call measures the machine.
constexpr double kProfileSeconds = 600;
// Prompt tokens waiting to be computed that cost a member about as much work as one running request.
constexpr double kTokensPerRequest = 256;
// Bytes of text that make about one token.
constexpr int64_t kBytesPerToken = 4;

std::vector<std::string> split_addresses(std::string text) {
  if (text.find_first_not_of(" \t") == std::string::npos) {
    const char* given = std::getenv("ALLSPARK_ADDRESS");
    text = given == nullptr ? "" : given;
    if (text.empty())
      throw std::invalid_argument("no address is given, and $ALLSPARK_ADDRESS is not set: this client starts no group");
  }
  std::vector<std::string> found;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string address = check_address(text.substr(begin, end - begin));
    if (std::find(found.begin(), found.end(), address) != found.end())
      throw std::invalid_argument("addresses names " + address + " twice");
    found.push_back(address);
    begin = end + 1;
  }
  return found;
}

AllSparkError failure(const std::string& text) { return {AsStatus::ALLSPARK_RUNTIME_ERROR, text}; }

int64_t about_tokens(const pb::GenerateRequest& request) {
  if (request.has_input_ids()) return request.input_ids().ids_size();
  return static_cast<int64_t>(request.ByteSizeLong()) / kBytesPerToken;
}

// The same path, absolute if it exists on this machine: servers have another working directory.
std::string absolute_path(const std::string& path) {
  char resolved[PATH_MAX];
  return !path.empty() && access(path.c_str(), F_OK) == 0 && realpath(path.c_str(), resolved) ? resolved : path;
}

// `lora` with an absolute path if an adapter is there.
std::string absolute_lora(const std::string& lora) {
  const size_t equals = lora.find('=');
  const std::string path = equals != std::string::npos && lora.find('/') > equals ? lora.substr(equals + 1) : lora;
  if (access((path + "/adapter_config.json").c_str(), F_OK) != 0) return lora;
  return adapter_name(lora) + "=" + absolute_path(path);
}

pb::ModelRequest model_request(const std::string& name) {
  if (name.empty()) throw std::invalid_argument("model_name is empty");
  pb::ModelRequest request;
  request.set_model(name);
  return request;
}

}  // namespace

struct EngineState {
  explicit EngineState(ClientOptions given) : options(std::move(given)) {}

  ClientOptions options;
  Background background;
  std::vector<std::unique_ptr<Member>> members;
  std::mutex mutex;
  std::map<RequestHandle_t, std::shared_ptr<LiveRequest>> requests;

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

namespace {

// Why a server cannot continue a request with identical bits, and whether that is permanent; "" where it can.
std::pair<std::string, bool> why_not_resumable(LiveRequest& request, const ModelState* model,
                                               const std::string& address) {
  std::lock_guard lock(request.mutex);
  if (model == nullptr || !model->running) return {"model '" + request.model + "' does not run on " + address, false};
  const std::string differs = address + " would not continue it identically (its ";
  if (model->fingerprint != request.fingerprint) return {differs + "fingerprint differs)", true};
  if (!request.image_fingerprint.empty() && model->image_fingerprint != request.image_fingerprint)
    return {differs + "preparation or bound of images differs)", true};
  if (request.lora_name.empty()) return {"", false};
  auto adapter = model->adapters.find(adapter_name(request.lora_name));
  if (adapter == model->adapters.end())
    return {address + " has not loaded lora_name='" + request.lora_name + "'", false};
  if (!request.request.adapter().empty() && adapter->second != request.request.adapter())
    return {differs + "adapter of that name differs)", true};
  return {"", false};
}

const ModelState* named(const std::vector<ModelState>& models, const std::string& name) {
  auto found = std::find_if(models.begin(), models.end(), [&](const ModelState& each) { return each.name == name; });
  return found == models.end() ? nullptr : &*found;
}

void fail(LiveRequest& request, const std::string& text,
          GenerateRequestStatus status = GenerateRequestStatus::InternalError) {
  request.state->finish(status, failure(text));
}

bool is_stopped(LiveRequest& request) {
  std::lock_guard lock(request.mutex);
  return request.stopped;
}

}  // namespace

// --- connections ---

void EngineState::connect(const std::vector<std::string>& addresses) {
  if (!(options.reconnect_timeout >= 0))
    throw std::invalid_argument("reconnect_timeout=" + std::to_string(options.reconnect_timeout) +
                                " must be a number of seconds, at least 0");
  const std::string token = options.token ? *options.token : environment_token();
  auto lost = [this](const Session& session, Requests requests, std::exception_ptr error) {
    on_lost(session, std::move(requests), error);
  };
  for (const std::string& address : addresses)
    members.push_back(std::make_unique<Member>(address, options.tls, token, lost, &background));
  const auto deadline = after(kFirstContactSeconds);
  while (true) {
    std::string details;
    size_t failed = 0;
    for (auto& member : members) {
      const std::chrono::duration<double> left = deadline - Clock::now();
      try {
        member->session(std::max(0.5, left.count()));
      } catch (const Unavailable& error) {
        ++failed;
        details += (details.empty() ? "" : "; ") + std::string(error.what());
      }
    }
    if (failed < members.size()) {
      if (failed > 0) log(details + "; the pool continues without");
      return;
    }
    if (Clock::now() >= deadline) throw AllSparkError(AsStatus::ALLSPARK_IO_ERROR, details);
    background.pause(kRetrySeconds);
  }
}

void EngineState::close() {
  background.begin_closing();
  std::map<RequestHandle_t, std::shared_ptr<LiveRequest>> ending;
  {
    std::lock_guard lock(mutex);
    ending.swap(requests);
  }
  for (auto& [handle, request] : ending) request->state->finish(GenerateRequestStatus::GenerateInterrupted);
  for (auto& member : members) member->close();
  background.join();
  for (auto& member : members) member->join();
}

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

std::vector<Member*> EngineState::connected_first() {
  std::vector<Member*> found;
  for (auto& member : members) found.push_back(member.get());
  std::stable_partition(found.begin(), found.end(), [](Member* member) { return member->live_session() != nullptr; });
  return found;
}

// As Pool.by_load of allspark_client/pool.py, without its memory of prefixes.
std::vector<Member*> EngineState::by_load(const LiveRequest& request) {
  if (members.size() == 1) return {members[0].get()};
  enum { kRuns, kLoads, kUnsuited, kUnreached };
  std::vector<std::tuple<int, double, size_t>> ranked;
  for (size_t i = 0; i < members.size(); ++i) {
    Member& member = *members[i];
    const std::shared_ptr<Session> session = member.live_session();
    if (!session) {  // tried only if all others fail: connecting to a dead server takes seconds
      member.reconnect_soon();
      ranked.emplace_back(kUnreached, 0, i);
      continue;
    }
    try {
      const std::vector<ModelState> models = member.models(kLoadAgeSeconds);
      const ModelState* model = named(models, request.model);
      // The member counts this client's requests as well, but its figure may be older than the latest of them.
      auto load = static_cast<double>(session->live());
      if (model != nullptr) load = std::max(load, static_cast<double>(model->load));
      load += static_cast<double>(member.sent_work() + (model != nullptr ? model->work : 0)) / kTokensPerRequest;
      int rank = kUnsuited;
      if (model != nullptr && !member.draining()) {
        const bool adapted = request.lora_name.empty() || model->adapters.count(adapter_name(request.lora_name)) > 0;
        rank = model->running && adapted ? kRuns : model->on_demand ? kLoads : kUnsuited;
      }
      ranked.emplace_back(rank, load, i);
    } catch (const std::exception&) { ranked.emplace_back(kUnreached, 0, i); }
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<Member*> found;
  for (const auto& entry : ranked) found.push_back(members[std::get<2>(entry)].get());
  return found;
}

// --- requests ---

std::shared_ptr<LiveRequest> EngineState::start(const std::string& model, const RequestContent& content) {
  check_open();
  auto request = std::make_shared<LiveRequest>(request_to_pb(model, content));
  {
    std::lock_guard lock(mutex);
    requests[request.get()] = request;
  }
  const int64_t tokens = about_tokens(request->request);
  auto begin = [&](Member& member) {
    const std::shared_ptr<Session> session = member.session();
    member.note_sent(tokens);
    while (true) {
      try {
        session->send(request);
        session->wait_answer(request);
        return;
      } catch (const NotLoaded& error) { member.load_model(error.model); }
    }
  };
  try {
    retry(begin, [&] { return by_load(*request); });
  } catch (...) {
    drop(request);
    throw;
  }
  return request;
}

std::shared_ptr<LiveRequest> EngineState::find(const std::string& model, RequestHandle_t handle) {
  check_open();
  std::lock_guard lock(mutex);
  auto found = requests.find(handle);
  if (found == requests.end() || found->second->model != model)
    throw AllSparkError(AsStatus::ALLSPARK_ILLEGAL_REQUEST_ID,
                        "model '" + model + "' has no request with this handle: it was released, or never started");
  return found->second;
}

void EngineState::stop(const std::shared_ptr<LiveRequest>& request) {
  std::shared_ptr<Session> session;
  {
    std::lock_guard lock(request->mutex);
    {
      std::lock_guard queue_lock(request->state->mutex);
      if (is_final(request->state->status)) return;
    }
    request->stopped = true;
    session = request->session;
  }
  if (!session || session->broken()) {
    request->state->finish(GenerateRequestStatus::GenerateInterrupted);
    return;
  }
  session->stop(request);
  if (request->state->wait_final(kStopSeconds)) return;
  log("the server at " + session->address() + " did not end a request in time");
  session->release(request);
  request->state->finish(GenerateRequestStatus::GenerateInterrupted);
}

void EngineState::release(const std::shared_ptr<LiveRequest>& request) {
  if (!background.closing()) stop(request);
  drop(request);
}

void EngineState::drop(const std::shared_ptr<LiveRequest>& request) {
  std::shared_ptr<Session> session;
  {
    std::lock_guard lock(request->mutex);
    request->dropped = true;
    request->stopped = true;
    session = request->session;
  }
  {
    std::lock_guard lock(mutex);
    requests.erase(request.get());
  }
  if (session && !session->broken()) session->release(request);
  request->state->finish(GenerateRequestStatus::GenerateInterrupted);
}

AsStatus EngineState::interrupting(const std::string& model, const std::function<AsStatus()>& call) {
  Requests ending;
  {
    std::lock_guard lock(mutex);
    for (auto& [handle, request] : requests)
      if (request->model == model && !is_stopped(*request)) ending.push_back(request);
  }
  auto mark = [&](bool stopped) {
    for (auto& request : ending) {
      std::lock_guard lock(request->mutex);
      request->stopped = stopped || request->dropped;
    }
  };
  mark(true);
  try {
    return call();
  } catch (...) {
    mark(false);
    throw;
  }
}

// --- resumption, as allspark_client/resumption.py ---

void EngineState::on_lost(const Session& session, Requests lost, const std::exception_ptr& error) {
  if (background.closing()) {
    for (auto& request : lost) request->state->finish(GenerateRequestStatus::GenerateInterrupted);
    return;
  }
  const std::optional<AllSparkError> on_purpose = caught<AllSparkError>(error);
  const std::string text = text_of(error);
  if (!lost.empty()) log(text + "; " + std::to_string(lost.size()) + " live requests");
  Requests resumable;
  for (auto& request : lost) {
    if (is_stopped(*request)) {
      request->state->finish(GenerateRequestStatus::GenerateInterrupted);
    } else if (on_purpose) {  // the server ended the session
      request->state->finish(GenerateRequestStatus::InternalError, on_purpose);
    } else if (!options.resume) {
      fail(*request, text + "; the engine was made with resume=false");
    } else {
      std::string why;
      {
        std::lock_guard lock(request->mutex);
        why = request->note_loss();
        request->resumed = true;
      }
      if (why.empty()) resumable.push_back(request);
      else fail(*request, text + "; " + why);
    }
  }
  if (resumable.empty()) return;
  // Requests that got no token from the last servers go first on the next one.
  std::stable_sort(resumable.begin(), resumable.end(),
                   [](const auto& one, const auto& other) { return one->losses > other->losses; });
  background.run([this, resumable, address = session.address(), text] { resume(resumable, address, text); });
}

void EngineState::resume(Requests waiting, const std::string& lost, std::string why) {
  const auto deadline = after(options.reconnect_timeout);
  while (!waiting.empty() && !background.closing()) {
    std::vector<Member*> order;
    for (auto& member : members) order.push_back(member.get());
    // The lost member comes last: it needs time to restart.
    std::stable_sort(order.begin(), order.end(), [&](Member* one, Member* other) {
      return std::pair(one->draining(), one->address == lost) < std::pair(other->draining(), other->address == lost);
    });
    std::map<LiveRequest*, size_t> different;  // members that can never continue a request
    for (Member* member : order) {
      std::shared_ptr<Session> session;
      std::vector<ModelState> models;
      try {
        session = member->session();
        models = member->models(kLoadAgeSeconds);
        for (auto& request : waiting) {
          const ModelState* model = named(models, request->model);
          if (model == nullptr || !model->on_demand) continue;
          member->load_model(request->model);
          models = member->models();
        }
      } catch (const Unavailable& error) {
        why = error.what();
        continue;
      } catch (const std::exception& error) {
        why = error.what();
        continue;
      }
      Requests suited;
      for (auto& request : waiting) {
        auto [reason, permanent] = why_not_resumable(*request, named(models, request->model), member->address);
        different[request.get()] += permanent;
        if (reason.empty()) suited.push_back(request);
        else why = reason;
      }
      for (auto& settled : send_again(suited, *session))
        waiting.erase(std::find(waiting.begin(), waiting.end(), settled));
    }
    const std::string text = "the connection to " + lost + " was lost; " + why;
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(),
                                 [&](auto& request) {
                                   if (different[request.get()] < members.size()) return false;
                                   fail(*request, text, GenerateRequestStatus::GenerateInterrupted);
                                   return true;
                                 }),
                  waiting.end());
    if (!waiting.empty() && Clock::now() >= deadline) {
      why += "; gave up after " + std::to_string(options.reconnect_timeout) + " s";
      break;
    }
    if (!waiting.empty()) background.pause(kRetrySeconds);
  }
  for (auto& request : waiting) fail(*request, "the connection to " + lost + " was lost; " + why);
}

// Sends requests to a server; returns those that run again or have ended. All are sent before the first answer is
// awaited: many requests take no longer than a few.
Requests EngineState::send_again(const Requests& waiting, Session& session) {
  Requests settled, sent;
  for (auto& request : waiting) {
    if (is_stopped(*request)) {
      request->state->finish(GenerateRequestStatus::GenerateInterrupted);
      settled.push_back(request);
      continue;
    }
    try {
      session.send(request);
    } catch (const Unavailable&) { break; }
    sent.push_back(request);
  }
  for (auto& request : sent) {
    try {
      session.wait_answer(request);
      log("a request continues at " + session.address());
      if (is_stopped(*request)) session.stop(request);  // while it was being sent
    } catch (const Unavailable&) { continue; } catch (const AllSparkError& error) {
      if (error.retryable()) continue;
      request->state->finish(GenerateRequestStatus::InternalError, error);
    } catch (const std::exception& error) {
      fail(*request, "resuming on " + session.address() + " was refused: " + error.what());
    }
    settled.push_back(request);
  }
  return settled;
}

}  // namespace internal

using internal::is_final;
namespace pb = internal::pb;
using Stub = pb::Allspark::Stub;

// --- ResultQueue ---

namespace {

// The next elements, if there are any; throws the error of a failed request. The mutex is held.
std::shared_ptr<GeneratedElements> take(internal::QueueState& state) {
  if (!state.elements.empty()) {
    auto found = std::make_shared<GeneratedElements>(std::move(state.elements.front()));
    state.elements.pop_front();
    return found;
  }
  if (state.status == GenerateRequestStatus::InternalError && state.error) throw AllSparkError(*state.error);
  return nullptr;
}

}  // namespace

std::shared_ptr<GeneratedElements> ResultQueue::Get() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return !state_->elements.empty() || is_final(state_->status); });
  return take(*state_);
}

std::shared_ptr<GeneratedElements> ResultQueue::Get(int timeout_ms) {
  if (timeout_ms < 0) throw std::invalid_argument("timeout_ms=" + std::to_string(timeout_ms) + " is negative");
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                           [this] { return !state_->elements.empty() || is_final(state_->status); });
  return take(*state_);
}

std::shared_ptr<GeneratedElements> ResultQueue::GetNoWait() {
  std::lock_guard lock(state_->mutex);
  return take(*state_);
}

GenerateRequestStatus ResultQueue::GenerateStatus() const {
  std::lock_guard lock(state_->mutex);
  return state_->status;
}

std::string ResultQueue::FinishReason() const {
  std::lock_guard lock(state_->mutex);
  return state_->reason;
}

size_t ResultQueue::GeneratedLength() const {
  std::lock_guard lock(state_->mutex);
  return state_->length;
}

ResultQueue::StatInfo ResultQueue::RequestStatInfo() const {
  std::lock_guard lock(state_->mutex);
  return state_->stat;
}

std::string ResultQueue::Opened() const {
  std::lock_guard lock(state_->mutex);
  return state_->opened;
}

std::optional<AllSparkError> ResultQueue::Error() const {
  std::lock_guard lock(state_->mutex);
  return state_->error;
}

// --- Generation ---

Generation::Generation(std::shared_ptr<internal::EngineState> engine, std::shared_ptr<internal::LiveRequest> request)
    : engine_(std::move(engine)), request_(std::move(request)) {}

Generation::Generation(Generation&& other) noexcept = default;

Generation& Generation::operator=(Generation&& other) noexcept {
  std::swap(engine_, other.engine_);
  std::swap(request_, other.request_);
  return *this;
}

Generation::~Generation() {
  if (request_) engine_->drop(request_);
}

std::shared_ptr<GeneratedElements> Generation::Next() {
  auto found = request_->queue.Get();
  if (!found)
    if (auto error = request_->queue.Error()) throw AllSparkError(*error);
  return found;
}

void Generation::Stop() { engine_->stop(request_); }

ResultQueue& Generation::queue() { return request_->queue; }

// --- ClientEngine ---

ClientEngine::ClientEngine(const std::string& addresses, ClientOptions options)
    : state_(std::make_shared<internal::EngineState>(std::move(options))) {
  const std::vector<std::string> given = internal::split_addresses(addresses);
  try {
    state_->connect(given);
  } catch (...) {
    state_->close();
    throw;
  }
}

ClientEngine::~ClientEngine() { state_->close(); }

Generation ClientEngine::Generate(const std::string& model_name, const RequestContent& content) {
  return {state_, state_->start(model_name, content)};
}

AsStatus ClientEngine::StartRequest(const std::string& model_name, const std::shared_ptr<RequestContent>& content,
                                    RequestHandle_t* handle, ResultQueue_t* queue) {
  if (!content || handle == nullptr || queue == nullptr)
    throw std::invalid_argument("content, handle and queue must not be null");
  auto request = state_->start(model_name, *content);
  *handle = request.get();
  *queue = &request->queue;
  return AsStatus::ALLSPARK_SUCCESS;
}

AsStatus ClientEngine::StopRequest(const std::string& model_name, RequestHandle_t handle) {
  state_->stop(state_->find(model_name, handle));
  return AsStatus::ALLSPARK_SUCCESS;
}

AsStatus ClientEngine::ReleaseRequest(const std::string& model_name, RequestHandle_t handle) {
  state_->release(state_->find(model_name, handle));
  return AsStatus::ALLSPARK_SUCCESS;
}

AsStatus ClientEngine::SyncRequest(const std::string& model_name, RequestHandle_t handle) {
  state_->find(model_name, handle)->state->wait_final();
  return AsStatus::ALLSPARK_SUCCESS;
}

AsStatus ClientEngine::BuildModelFromConfigStruct(const AsModelConfig& config) {
  AsModelConfig absolute = config;
  absolute.model_path = internal::absolute_path(config.model_path);
  for (const char* name : {"weights_path", "draft_model", "chat_template"})
    if (auto found = absolute.fields.find(name); found != absolute.fields.end())
      if (auto* path = std::get_if<std::string>(&found->second)) *path = internal::absolute_path(*path);
  pb::InstallModelRequest question;
  *question.mutable_config() = internal::model_config_to_pb(absolute);
  pb::InstallModelRequest again = question;
  again.set_retried(true);
  return state_->call_all(&Stub::InstallModel, question, AsStatus::ALLSPARK_SUCCESS, &again);
}

AsStatus ClientEngine::StartModel(const std::string& model_name) {
  return state_->call_all(&Stub::StartModel, internal::model_request(model_name));
}

AsStatus ClientEngine::StopModel(const std::string& model_name) {
  return state_->interrupting(model_name,
                              [&] { return state_->call_all(&Stub::StopModel, internal::model_request(model_name)); });
}

AsStatus ClientEngine::ReleaseModel(const std::string& model_name) {
  return state_->interrupting(model_name, [&] {
    return state_->call_all(&Stub::ReleaseModel, internal::model_request(model_name), AsStatus::ALLSPARK_PARAM_ERROR);
  });
}

AsStatus ClientEngine::UnloadModelFromDeviceMemory(const std::string& model_name) {
  return state_->call_all(&Stub::UnloadDeviceMem, internal::model_request(model_name));
}

AsStatus ClientEngine::ReloadModelToDeviceMemory(const std::string& model_name) {
  return state_->call_all(&Stub::LoadDeviceMem, internal::model_request(model_name));
}

AsStatus ClientEngine::LoadLoraByName(const std::string& model_name, const std::string& lora_name) {
  pb::LoraRequest question;
  question.set_model(model_name);
  question.set_lora(internal::absolute_lora(lora_name));
  return state_->call_all(&Stub::LoadLora, question, AsStatus::ALLSPARK_LORA_ALREADY_LOADED);
}

AsStatus ClientEngine::UnloadLoraByName(const std::string& model_name, const std::string& lora_name) {
  pb::LoraRequest question;
  question.set_model(model_name);
  question.set_lora(internal::absolute_lora(lora_name));
  return state_->call_all(&Stub::UnloadLora, question, AsStatus::ALLSPARK_LORA_NOT_FOUND);
}

std::vector<ModelState> ClientEngine::ListModels() {
  std::vector<ModelState> found;
  bool asked = false;
  for (auto& member : state_->members) {
    if (!member->live_session()) {
      member->reconnect_soon();
      continue;
    }
    try {
      for (ModelState& model : member->models()) found.push_back(std::move(model));
      asked = true;
    } catch (const internal::Unavailable& error) { state_->log(error.what()); }
  }
  if (asked) return found;
  return state_->retry([](internal::Member& member) { return member.models(); },
                       [this] { return state_->connected_first(); });
}

std::vector<MemberState> ClientEngine::Members() {
  std::vector<MemberState> found;
  for (auto& member : state_->members) {
    MemberState& state = found.emplace_back();
    state.address = member->address;
    const std::shared_ptr<internal::Session> session = member->live_session();
    if (!session) {
      member->reconnect_soon();
      continue;
    }
    const pb::ServerInfo info = session->info();
    state.connected = true;
    state.version = info.version();
    state.ranks = info.rank_nums();
    try {
      state.models = member->models(internal::kLoadAgeSeconds);
    } catch (const std::exception& error) { state_->log(error.what()); }
    state.draining = member->draining();
  }
  return found;
}

AsEngineStat ClientEngine::GetAsEngineStat(const std::string& model_name) {
  const pb::ModelRequest question = internal::model_request(model_name);
  AsEngineStat total;
  int answers = 0;
  for (auto& member : state_->members) {
    if (!member->live_session()) {
      member->reconnect_soon();
      continue;
    }
    try {
      const AsEngineStat stat =
          internal::engine_stat_from_pb(member->call(&Stub::GetStat, question, internal::kQuestionSeconds));
      if (answers++ == 0) {
        total = stat;
        continue;
      }
      for (auto field : {&AsEngineStat::total_span, &AsEngineStat::used_span, &AsEngineStat::free_span,
                         &AsEngineStat::total_token, &AsEngineStat::free_token, &AsEngineStat::pendding_request,
                         &AsEngineStat::running_request, &AsEngineStat::total_prefill_token,
                         &AsEngineStat::total_generated_token, &AsEngineStat::prefix_cache_hit_token,
                         &AsEngineStat::prefix_cache_miss_token, &AsEngineStat::preempted_request})
        total.*field += stat.*field;
      total.generate_token_persec += stat.generate_token_persec;
      total.process_token_persec += stat.process_token_persec;
    } catch (const internal::Unavailable& error) {
      state_->log(error.what());
    } catch (const internal::NotLoaded& error) {  // here; another member may have loaded it
      state_->log(error.what());
    }
  }
  if (answers == 0) return internal::engine_stat_from_pb(state_->ask(&Stub::GetStat, question));
  if (answers == 1) return total;
  const auto tokens = static_cast<double>(total.total_token);
  const auto seen = static_cast<double>(total.prefix_cache_hit_token + total.prefix_cache_miss_token);
  total.token_usage_percentage = tokens > 0 ? 100 * (tokens - static_cast<double>(total.free_token)) / tokens : 0;
  total.prefix_cache_hit_rate = seen > 0 ? static_cast<double>(total.prefix_cache_hit_token) / seen : 0;
  total.prefix_cache_miss_rate = seen > 0 ? static_cast<double>(total.prefix_cache_miss_token) / seen : 0;
  return total;
}

AsStatus ClientEngine::GetModelInformation(const std::string& model_name, std::string* model_info) {
  const pb::ModelInfo info = state_->ask(&Stub::GetModelInfo, internal::model_request(model_name));
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  model_info->clear();
  if (!google::protobuf::util::MessageToJsonString(info, model_info, options).ok())
    throw AllSparkError(AsStatus::ALLSPARK_UNKNOWN_ERROR, "the model's information cannot be written as JSON");
  return AsStatus::ALLSPARK_SUCCESS;
}

AsFileInfo ClientEngine::GetFileInformation(const std::string& graph_path, const std::string& param_path) {
  pb::FileInformationRequest question;
  question.set_graph_path(internal::absolute_path(graph_path));
  question.set_param_path(internal::absolute_path(param_path));
  const auto answer = state_->ask(&Stub::GetFileInformation, question);
  return {answer.create_version_graph(), answer.create_version_param(), answer.current_version_engine()};
}

std::vector<int> ClientEngine::Tokenize(const std::string& model_name, const std::string& text) {
  pb::TokenizeRequest question;
  question.mutable_request()->set_model(model_name);
  question.mutable_request()->set_text(text);
  const auto answer = state_->ask(&Stub::Tokenize, question);
  return {answer.ids().begin(), answer.ids().end()};
}

std::string ClientEngine::Detokenize(const std::string& model_name, const std::vector<int>& ids) {
  pb::DetokenizeRequest question;
  question.set_model(model_name);
  question.mutable_ids()->Add(ids.begin(), ids.end());
  return state_->ask(&Stub::Detokenize, question).text();
}

std::string ClientEngine::GetOpProfilingInfo(const std::string& model_name) {
  return state_->ask(&Stub::GetOpProfiling, internal::model_request(model_name), internal::kProfileSeconds).table();
}

std::string ClientEngine::GetVersionFull() {
  return state_->ask(&Stub::GetServerInfo, pb::ServerInfoRequest()).version();
}

int ClientEngine::GetRankId() { return state_->ask(&Stub::GetServerInfo, pb::ServerInfoRequest()).rank_id(); }

int ClientEngine::GetRankNums() { return state_->ask(&Stub::GetServerInfo, pb::ServerInfoRequest()).rank_nums(); }

}  // namespace allspark::client
