#include "allspark/client.h"

#include <google/protobuf/util/json_util.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>

#include "engine_state.h"

namespace allspark::client {

namespace internal {

namespace {

// How long profiling a model may take, s: the first call measures the machine.
constexpr double kProfileSeconds = 600;

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
