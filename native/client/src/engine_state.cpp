#include "engine_state.h"

#include <algorithm>
#include <tuple>

namespace allspark::client::internal {

namespace {

// How long a new client waits for its servers to accept connections, s.
constexpr double kFirstContactSeconds = 5;
// How long StopRequest waits for the server to confirm the end of a request, s.
constexpr double kStopSeconds = 10;
// Prompt tokens waiting to be computed that cost a member about as much work as one running request.
constexpr double kTokensPerRequest = 256;
// Bytes of text that make about one token.
constexpr int64_t kBytesPerToken = 4;

int64_t about_tokens(const pb::GenerateRequest& request) {
  if (request.has_input_ids()) return request.input_ids().ids_size();
  return static_cast<int64_t>(request.ByteSizeLong()) / kBytesPerToken;
}

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

std::vector<Member*> EngineState::connected_first() {
  std::vector<Member*> found;
  for (auto& member : members) found.push_back(member.get());
  std::stable_partition(found.begin(), found.end(), [](Member* member) { return member->live_session() != nullptr; });
  return found;
}

// As Pool.by_load of allspark_client/pool.py, without its memory of prefixes: of members with equal work, that which
// this client has not sent a request for longest comes first.
std::vector<Member*> EngineState::by_load(const LiveRequest& request) {
  if (members.size() == 1) return {members[0].get()};
  enum { kRuns, kLoads, kUnsuited, kUnreached };
  std::vector<std::tuple<int, double, int64_t, size_t>> ranked;
  for (size_t i = 0; i < members.size(); ++i) {
    Member& member = *members[i];
    const std::shared_ptr<Session> session = member.live_session();
    if (!session) {  // tried only if all others fail: connecting to a dead server takes seconds
      member.reconnect_soon();
      ranked.emplace_back(kUnreached, 0, member.last_request(), i);
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
      ranked.emplace_back(rank, load, member.last_request(), i);
    } catch (const std::exception&) { ranked.emplace_back(kUnreached, 0, member.last_request(), i); }
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<Member*> found;
  for (const auto& entry : ranked) found.push_back(members[std::get<3>(entry)].get());
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
    member.note_sent(tokens, ++started);
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

}  // namespace allspark::client::internal
