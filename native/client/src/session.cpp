#include "session.h"

#include <unistd.h>

#include <algorithm>

namespace allspark::client::internal {

namespace {

// The numbers of lost servers after which a request fails: of servers that ran it alone without a new token, and of all
// servers in a row.
constexpr int kMaxDeaths = 2;
constexpr int kMaxLosses = 10;
// How long a server may take to accept or refuse a request, s.
constexpr double kAnswerSeconds = 60;
// How long a write may go on once the server has ended the stream, s.
constexpr double kWriterSeconds = 1;
// Upper bound of a request's id and the framing of its message, bytes.
constexpr size_t kEnvelopeBytes = 64;

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// `error`, or if it is of another kind an Unavailable with its text: the server has not answered.
std::exception_ptr unavailable(const std::exception_ptr& error, const std::string& address) {
  try {
    std::rethrow_exception(error);
  } catch (const Unavailable&) { return error; } catch (const std::exception& found) {
    return std::make_exception_ptr(Unavailable(address, found.what()));
  }
}

const char* reason_of(GenerateRequestStatus status) {
  if (status == GenerateRequestStatus::GenerateFinished) return "stop";
  return status == GenerateRequestStatus::GenerateInterrupted ? "interrupted" : "error";
}

template <class T>
void append(std::vector<T>& to, std::vector<T>& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

void extend(GeneratedElements& last, GeneratedElements& added) {
  append(last.ids_from_generate, added.ids_from_generate);
  append(last.log_probs_list, added.log_probs_list);
  append(last.token_logprobs_list, added.token_logprobs_list);
  append(last.prompt_logprobs_list, added.prompt_logprobs_list);
  append(last.embedding, added.embedding);
  last.prefix_cache_len = std::max(last.prefix_cache_len, added.prefix_cache_len);
  last.prefix_len_gpu = std::max(last.prefix_len_gpu, added.prefix_len_gpu);
  last.prefix_len_cpu = std::max(last.prefix_len_cpu, added.prefix_len_cpu);
  last.text += added.text;
  if (added.finish_reason.empty()) return;
  last.finish_reason = std::move(added.finish_reason);
  last.stop_string = std::move(added.stop_string);
}

}  // namespace

// --- QueueState ---

void QueueState::put(GeneratedElements added) {
  std::lock_guard lock(mutex);
  if (is_final(status)) return;
  length += added.ids_from_generate.size();
  if (!elements.empty() && elements.back().sample_index == added.sample_index) extend(elements.back(), added);
  else elements.push_back(std::move(added));
  changed.notify_all();
}

void QueueState::set_status(GenerateRequestStatus next) {
  std::lock_guard lock(mutex);
  if (status < next && !is_final(next)) status = next;
}

void QueueState::finish(GenerateRequestStatus end, std::optional<AllSparkError> failure, const std::string& why) {
  std::lock_guard lock(mutex);
  if (is_final(status)) return;
  status = end;
  error = std::move(failure);
  reason = why.empty() ? reason_of(end) : why;
  changed.notify_all();
}

bool QueueState::wait_final(double timeout) {
  std::unique_lock lock(mutex);
  return changed.wait_for(lock, seconds(timeout), [this] { return is_final(status); });
}

void QueueState::wait_final() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return is_final(status); });
}

// --- LiveRequest ---

LiveRequest::LiveRequest(pb::GenerateRequest sent)
    : queue(state),
      model(sent.model()),
      lora_name(sent.config().lora_name()),
      request(std::move(sent)),
      wall_arrival(unix_time()) {
  const int n = request.config().has_n() ? request.config().n() : 1;
  received.resize(std::clamp(n, 1, 1024));  // the server refuses others
  cached.resize(received.size());
}

size_t LiveRequest::generated() const {
  size_t count = 0;
  for (const auto& ids : received) count += ids.size();
  return count;
}

std::string LiveRequest::note_loss() {
  if (generated() > generated_at_start) losses = deaths = 0;
  else if (deaths == 0 || begun) ++deaths;
  ++losses;
  if (deaths > kMaxDeaths)  // at the first loss, other requests were running, too
    return std::to_string(kMaxDeaths) + " servers were lost while they ran this request alone: it seems to crash them";
  if (losses > kMaxLosses)
    return "servers were lost " + std::to_string(losses) + " times in a row without a new token of this request";
  return "";
}

// --- Session ---

Session::Session(std::string address, pb::Allspark::Stub* stub, const std::string& token, OnLost on_lost)
    : address_(std::move(address)), on_lost_(std::move(on_lost)) {
  if (!token.empty()) context_.AddMetadata("authorization", "Bearer " + token);
  stream_ = stub->Session(&context_);
  writer_ = std::thread([this] { write(); });
  reader_ = std::thread([this] { read(); });
}

void Session::greet(double timeout) {
  pb::SessionRequest message;
  message.mutable_hello()->set_protocol(kOldestProtocol);
  message.mutable_hello()->set_newest_protocol(kProtocol);
  message.mutable_hello()->set_client(std::string(kProgram) + " pid " + std::to_string(getpid()));
  pb::ServerInfo answer;
  {
    std::unique_lock lock(mutex_);
    put(std::move(message));
    if (!greeted_changed_.wait_for(lock, seconds(timeout), [this] { return greeted_; })) {
      context_.TryCancel();
      throw Unavailable(address_, "no answer within " + std::to_string(timeout) + " s");
    }
    if (broken_) std::rethrow_exception(broken_);
    answer = info_;
  }
  try {
    check_protocol(answer, address_);
  } catch (const AllSparkError&) {
    close();
    throw;
  }
}

void Session::send(const std::shared_ptr<LiveRequest>& request) {
  std::lock_guard session_lock(mutex_);
  std::lock_guard lock(request->mutex);
  pb::SessionRequest message;
  pb::GenerateRequest& body = *message.mutable_start()->mutable_request();
  body = request->request;
  if (request->received.size() == 1) {
    body.mutable_generated()->Add(request->received[0].begin(), request->received[0].end());
  } else if (request->generated() > 0) {
    for (const auto& ids : request->received) body.add_samples()->mutable_ids()->Add(ids.begin(), ids.end());
  }
  body.set_resumed(request->resumed);
  body.set_deaths(request->deaths);
  request->generated_at_start = request->generated();
  request->begun = false;
  request->answered = false;
  request->refusal = nullptr;
  if (broken_) std::rethrow_exception(unavailable(broken_, address_));
  if (body.images_size() > 0 && info_.protocol() < kImagesProtocol) {
    // An older server would answer as if there were none.
    request->refusal = std::make_exception_ptr(AllSparkError(
        AsStatus::ALLSPARK_INVALID_CALL_ERROR,
        "images: the server at " + address_ + " (version " + info_.version() + ") takes none; upgrade it"));
    request->answered = true;
    return;
  }
  const size_t size = body.ByteSizeLong() + kEnvelopeBytes;
  if (const auto most = static_cast<size_t>(info_.max_message_bytes()); most > 0 && size > most) {
    // Sending it would end the whole stream.
    request->refusal = std::make_exception_ptr(AllSparkError(
        AsStatus::ALLSPARK_EXCEED_LIMIT_ERROR, "the request is a message of " + std::to_string(size) +
                                                   " bytes, and the server at " + address_ + " takes at most " +
                                                   std::to_string(most) + " (its --max-message-mib)"));
    request->answered = true;
    return;
  }
  request->session = shared_from_this();
  request->wire_id = next_id_++;
  live_[request->wire_id] = request;
  message.mutable_start()->set_id(request->wire_id);
  put(std::move(message));
}

void Session::wait_answer(const std::shared_ptr<LiveRequest>& request) {
  {
    std::unique_lock lock(request->mutex);
    if (request->answered_changed.wait_for(lock, seconds(kAnswerSeconds), [&] { return request->answered; })) {
      if (request->refusal) std::rethrow_exception(request->refusal);
      return;
    }
  }
  std::lock_guard session_lock(mutex_);
  std::lock_guard lock(request->mutex);
  if (request->answered) {  // meanwhile
    if (request->refusal) std::rethrow_exception(request->refusal);
    return;
  }
  live_.erase(request->wire_id);
  pb::SessionRequest message;
  message.set_release(request->wire_id);
  put(std::move(message));
  throw Unavailable(address_, "no answer to a request within " + std::to_string(kAnswerSeconds) + " s");
}

void Session::stop(const std::shared_ptr<LiveRequest>& request) {
  std::lock_guard session_lock(mutex_);
  std::lock_guard lock(request->mutex);
  pb::SessionRequest message;
  message.set_stop(request->wire_id);
  put(std::move(message));
}

void Session::release(const std::shared_ptr<LiveRequest>& request) {
  std::lock_guard session_lock(mutex_);
  std::lock_guard lock(request->mutex);
  auto found = live_.find(request->wire_id);
  if (found == live_.end() || found->second != request) return;  // it has ended, and the server has forgotten it
  live_.erase(found);
  if (!request->answered) {
    request->refusal =
        std::make_exception_ptr(AllSparkError(AsStatus::ALLSPARK_INVALID_CALL_ERROR, "the request was released"));
    request->answered = true;
    request->answered_changed.notify_all();
  }
  pb::SessionRequest message;
  message.set_release(request->wire_id);
  put(std::move(message));
}

void Session::close() {
  end_writing();
  context_.TryCancel();
}

void Session::join() {
  if (reader_.joinable()) reader_.join();
}

bool Session::broken() const {
  std::lock_guard lock(mutex_);
  return broken_ != nullptr;
}

size_t Session::live() const {
  std::lock_guard lock(mutex_);
  return live_.size();
}

pb::ServerInfo Session::info() const {
  std::lock_guard lock(mutex_);
  return info_;
}

void Session::put(pb::SessionRequest message) {
  outbox_.push_back(std::move(message));
  outbox_changed_.notify_one();
}

void Session::end_writing() {
  std::lock_guard lock(mutex_);
  writing_ = false;
  outbox_changed_.notify_one();
}

void Session::write() {
  std::unique_lock lock(mutex_);
  while (true) {
    outbox_changed_.wait(lock, [this] { return !writing_ || !outbox_.empty(); });
    if (!writing_) break;
    const pb::SessionRequest message = std::move(outbox_.front());
    outbox_.pop_front();
    lock.unlock();
    const bool written = stream_->Write(message);
    lock.lock();
    if (!written) break;  // the stream is broken, which read() finds out, too
  }
  writer_ended_ = true;
  writer_changed_.notify_all();
}

void Session::read() {
  pb::SessionResponse message;
  while (stream_->Read(&message)) {
    std::lock_guard lock(mutex_);
    if (message.has_info()) {
      info_ = message.info();
      greeted_ = true;
      greeted_changed_.notify_all();
    }
    if (message.has_tokens()) apply(message.tokens());
    for (const pb::RequestEvent& event : message.events()) apply(event);
  }
  end_writing();
  {
    std::unique_lock lock(mutex_);
    // A writer that waits for a server that does not read any more must not wait for ever.
    if (!writer_changed_.wait_for(lock, seconds(kWriterSeconds), [this] { return writer_ended_; }))
      context_.TryCancel();
  }
  writer_.join();
  const grpc::Status status = stream_->Finish();
  std::exception_ptr error = translate(status, context_, address_);
  if (caught<std::invalid_argument>(error))  // about the stream itself
    error = std::make_exception_ptr(
        AllSparkError(AsStatus::ALLSPARK_RUNTIME_ERROR, "the session with " + address_ + " ended: " + text_of(error)));
  Requests started;
  {
    std::lock_guard session_lock(mutex_);
    broken_ = error;
    for (auto& [id, request] : live_) {
      std::lock_guard lock(request->mutex);
      if (request->answered) {
        started.push_back(request);
      } else {
        request->refusal = unavailable(error, address_);
        request->answered = true;
        request->answered_changed.notify_all();
      }
    }
    live_.clear();
    greeted_ = true;
    greeted_changed_.notify_all();
  }
  on_lost_(*this, std::move(started), error);
}

std::shared_ptr<LiveRequest> Session::find(uint64_t id) const {
  auto found = live_.find(id);
  return found == live_.end() ? nullptr : found->second;  // null: released meanwhile
}

void Session::apply(const pb::Tokens& message) {
  int logprob = 0, top = 0;
  for (int i = 0; i < std::min(message.requests_size(), message.ids_size()); ++i) {
    GeneratedElements elements;
    elements.ids_from_generate = {message.ids(i)};
    if (i < message.texts_size()) elements.text = message.texts(i);
    if (i < message.samples_size()) elements.sample_index = message.samples(i);
    if (const int count = i < message.top_counts_size() ? message.top_counts(i) : -1; count >= 0) {
      elements.token_logprobs_list = {logprob < message.logprobs_size() ? message.logprobs(logprob) : 0.0f};
      ++logprob;
      auto& likely = elements.log_probs_list.emplace_back();
      const int end = std::min({top + count, message.top_ids_size(), message.top_logprobs_size()});
      for (; top < end; ++top) likely.emplace_back(message.top_ids(top), message.top_logprobs(top));
    }
    const std::shared_ptr<LiveRequest> request = find(message.requests(i));
    if (!request) continue;
    std::lock_guard lock(request->mutex);
    const auto sample = static_cast<size_t>(elements.sample_index);
    if (sample >= request->received.size()) continue;
    request->received[sample].push_back(message.ids(i));
    const LiveRequest::Cached& cached = request->cached[sample];
    elements.prefix_cache_len = cached.all;
    elements.prefix_len_gpu = cached.gpu;
    elements.prefix_len_cpu = cached.cpu;
    request->state->put(std::move(elements));
  }
}

void Session::apply(const pb::RequestEvent& event) {
  const std::shared_ptr<LiveRequest> request = find(event.id());
  if (!request) return;
  std::lock_guard lock(request->mutex);
  auto answer = [&] {
    request->answered = true;
    request->answered_changed.notify_all();
  };
  if (event.has_refused()) {
    live_.erase(event.id());
    request->refusal = error_from_pb(event.refused());
    if (event.refused().elsewhere())
      request->refusal = std::make_exception_ptr(Unavailable(address_, event.refused().message()));
    answer();
    return;
  }
  for (const pb::Elements& message : event.elements()) {
    const auto sample = static_cast<size_t>(message.sample_index());
    if (sample >= request->received.size()) continue;
    if (!request->first_token) request->first_token = Clock::now();
    request->received[sample].insert(request->received[sample].end(), message.ids().begin(), message.ids().end());
    request->cached[sample] = {message.prefix_cache_len(), message.prefix_len_gpu(), message.prefix_len_cpu()};
    request->state->put(elements_from_pb(message));
  }
  request->begun = request->begun || event.begun();
  if (event.has_status()) {
    const auto status = static_cast<GenerateRequestStatus>(event.status());
    if (event.has_stat()) set_stat(*request, event.stat());
    if (is_final(status)) {
      live_.erase(event.id());
      std::optional<AllSparkError> error;
      if (event.has_error()) error = as_allspark_error(event.error());
      if (status == GenerateRequestStatus::GenerateInterrupted && !request->stopped && !error)
        error = AllSparkError(AsStatus::ALLSPARK_RUNTIME_ERROR,
                              "the server at " + address_ + " interrupted the request: model '" + request->model +
                                  "' was stopped or released there, or the server is stopping");
      request->state->finish(status, error, event.finish_reason());
    } else {
      request->state->set_status(status);
    }
  }
  if (event.has_started()) {
    const pb::Started& started = event.started();
    request->fingerprint = started.fingerprint();
    request->image_fingerprint = started.image_fingerprint();
    request->request.set_adapter(started.adapter());
    request->request.set_ticket(started.ticket());
    if (!started.opened().empty()) {
      std::lock_guard queue_lock(request->state->mutex);
      if (request->state->opened.empty()) request->state->opened = started.opened();
    }
    // Text that another server renders or tokenizes again may give other ids.
    if (started.prompt_ids_size() > 0) *request->request.mutable_input_ids()->mutable_ids() = started.prompt_ids();
    answer();
  }
}

void Session::set_stat(LiveRequest& request, const pb::RequestStat& message) {
  std::lock_guard lock(request.state->mutex);
  auto& stat = request.state->stat;
  stat["arrival_time"] = message.arrival_time();
  stat["first_token_time"] = message.first_token_time();
  stat["last_token_time"] = message.last_token_time();
  stat["time_to_first_token"] = message.time_to_first_token();
  stat["time_in_queue"] = message.time_in_queue();
  stat["finish_time"] = message.finish_time();
  stat["context_token_length"] = message.context_token_length();
  stat["generated_token_length"] = message.generated_token_length();
  stat["context_cached_length"] = message.context_cached_length();
  stat["context_tps"] = message.context_tps();
  stat["generate_tps"] = message.generate_tps();
  if (!request.resumed) return;
  // The server knows only what it generated itself.
  stat["generated_token_length"] = static_cast<double>(request.state->length);
  stat["arrival_time"] = request.wall_arrival;
  stat["finish_time"] = std::chrono::duration<double, std::milli>(Clock::now() - request.arrival).count();
  if (!request.first_token) return;
  const auto wait = *request.first_token - request.arrival;
  stat["time_to_first_token"] = std::chrono::duration<double, std::milli>(wait).count();
  stat["first_token_time"] = request.wall_arrival + std::chrono::duration<double>(wait).count();
}

}  // namespace allspark::client::internal
