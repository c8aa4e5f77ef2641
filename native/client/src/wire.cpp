#include "wire.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <random>

namespace allspark::client {

const char* ToString(AsStatus status) {
  switch (status) {
    case AsStatus::ALLSPARK_SUCCESS:
      return "ALLSPARK_SUCCESS";
    case AsStatus::ALLSPARK_UNKNOWN_ERROR:
      return "ALLSPARK_UNKNOWN_ERROR";
    case AsStatus::ALLSPARK_PARAM_ERROR:
      return "ALLSPARK_PARAM_ERROR";
    case AsStatus::ALLSPARK_IO_ERROR:
      return "ALLSPARK_IO_ERROR";
    case AsStatus::ALLSPARK_MEMORY_ERROR:
      return "ALLSPARK_MEMORY_ERROR";
    case AsStatus::ALLSPARK_RUNTIME_ERROR:
      return "ALLSPARK_RUNTIME_ERROR";
    case AsStatus::ALLSPARK_EXCEED_LIMIT_ERROR:
      return "ALLSPARK_EXCEED_LIMIT_ERROR";
    case AsStatus::ALLSPARK_INVALID_CALL_ERROR:
      return "ALLSPARK_INVALID_CALL_ERROR";
    case AsStatus::ALLSPARK_EMPTY_REQUEST:
      return "ALLSPARK_EMPTY_REQUEST";
    case AsStatus::ALLSPARK_ILLEGAL_REQUEST_ID:
      return "ALLSPARK_ILLEGAL_REQUEST_ID";
    case AsStatus::ALLSPARK_CACHE_MEMORY_OUT:
      return "ALLSPARK_CACHE_MEMORY_OUT";
    case AsStatus::ALLSPARK_REQUEST_DENIED:
      return "ALLSPARK_REQUEST_DENIED";
    case AsStatus::ALLSPARK_LORA_NOT_FOUND:
      return "ALLSPARK_LORA_NOT_FOUND";
    case AsStatus::ALLSPARK_LORA_ALREADY_LOADED:
      return "ALLSPARK_LORA_ALREADY_LOADED";
    case AsStatus::ALLSPARK_LORA_IN_USE:
      return "ALLSPARK_LORA_IN_USE";
    case AsStatus::ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR:
      return "ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR";
    case AsStatus::ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR:
      return "ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR";
    case AsStatus::ALLSPARK_STREAMING:
      return "ALLSPARK_STREAMING";
  }
  return "ALLSPARK_UNKNOWN_ERROR";
}

const char* ToString(GenerateRequestStatus status) {
  switch (status) {
    case GenerateRequestStatus::Init:
      return "Init";
    case GenerateRequestStatus::ContextFinished:
      return "ContextFinished";
    case GenerateRequestStatus::Generating:
      return "Generating";
    case GenerateRequestStatus::GenerateFinished:
      return "GenerateFinished";
    case GenerateRequestStatus::GenerateInterrupted:
      return "GenerateInterrupted";
    case GenerateRequestStatus::InternalError:
      return "InternalError";
  }
  return "InternalError";
}

AllSparkError::AllSparkError(AsStatus status, const std::string& message, bool retryable)
    : std::runtime_error(std::string(ToString(status)) + ": " + message),
      status_(status),
      message_(message),
      retryable_(retryable) {}

}  // namespace allspark::client

namespace allspark::client::internal {

namespace {

constexpr const char* kErrorKey = "allspark-error-bin";

std::string versions(int oldest, int newest) {
  if (oldest == newest) return "version " + std::to_string(newest);
  return "versions " + std::to_string(oldest) + " to " + std::to_string(newest);
}

std::vector<std::pair<int, float>> pairs(const pb::PromptLogprobs& token) {
  std::vector<std::pair<int, float>> found;
  for (int i = 0; i < std::min(token.ids_size(), token.logprobs_size()); ++i)
    found.emplace_back(token.ids(i), token.logprobs(i));
  return found;
}

void config_to_pb(const GenerateConfig& config, pb::GenerateConfig* message) {
  if (config.do_sample) message->set_do_sample(*config.do_sample);
  if (config.seed) message->set_seed(*config.seed);
  if (config.temperature) message->set_temperature(*config.temperature);
  if (config.top_k) message->set_top_k(*config.top_k);
  if (config.top_p) message->set_top_p(*config.top_p);
  if (config.min_p) message->set_min_p(*config.min_p);
  if (config.repetition_penalty) message->set_repetition_penalty(*config.repetition_penalty);
  if (config.presence_penalty) message->set_presence_penalty(*config.presence_penalty);
  if (config.frequency_penalty) message->set_frequency_penalty(*config.frequency_penalty);
  if (config.suppress_repetition_in_generation)
    message->set_suppress_repetition_in_generation(*config.suppress_repetition_in_generation);
  if (config.no_repeat_ngram_size) message->set_no_repeat_ngram_size(*config.no_repeat_ngram_size);
  if (config.truncate_prompt_tokens) message->set_truncate_prompt_tokens(*config.truncate_prompt_tokens);
  if (config.min_length) message->set_min_length(*config.min_length);
  if (config.min_new_tokens) message->set_min_new_tokens(*config.min_new_tokens);
  if (config.max_length) message->set_max_length(*config.max_length);
  if (config.max_new_tokens) message->set_max_new_tokens(*config.max_new_tokens);
  if (config.early_stopping) message->set_early_stopping(*config.early_stopping);
  if (config.eos_token_id || !config.eos_token_ids.empty()) {
    pb::TokenIds* ids = message->mutable_eos_token_ids();  // present, but empty: there is none
    if (config.eos_token_id && *config.eos_token_id >= 0) ids->add_ids(*config.eos_token_id);
    for (int id : config.eos_token_ids) ids->add_ids(id);
  }
  for (const auto& word : config.stop_words_ids) {
    pb::TokenIds* ids = message->add_stop_words_ids();
    for (int64_t id : word) ids->add_ids(static_cast<int32_t>(id));
  }
  for (const auto& word : config.bad_words_ids)
    message->add_bad_words_ids()->mutable_ids()->Add(word.begin(), word.end());
  for (const auto& text : config.stop) message->add_stop(text);
  for (const auto& text : config.bad_words) message->add_bad_words(text);
  if (config.include_stop_str_in_output) message->set_include_stop_str_in_output(*config.include_stop_str_in_output);
  if (config.skip_special_tokens) message->set_skip_special_tokens(*config.skip_special_tokens);
  if (config.thinking_token_budget) message->set_thinking_token_budget(*config.thinking_token_budget);
  message->mutable_logit_bias()->insert(config.logit_bias.begin(), config.logit_bias.end());
  if (config.logprobs) message->set_logprobs(*config.logprobs);
  if (config.top_logprobs) message->set_top_logprobs(*config.top_logprobs);
  if (config.prompt_logprobs) message->set_prompt_logprobs(*config.prompt_logprobs);
  if (config.pooling) message->set_pooling(*config.pooling);
  if (!config.lora_name.empty()) message->set_lora_name(config.lora_name);
  if (!config.response_format.empty()) message->set_response_format_json(config.response_format);
  message->mutable_vocab()->insert(config.vocab.begin(), config.vocab.end());
  if (config.vocab_type) message->set_vocab_type(static_cast<int>(*config.vocab_type));
  if (!config.uuid.empty()) message->set_uuid(config.uuid);
  if (!config.user_request_id.empty()) message->set_user_request_id(config.user_request_id);
  if (config.priority) message->set_priority(*config.priority);
  if (config.queue_timeout) message->set_queue_timeout(*config.queue_timeout);
  if (!config.cache_salt.empty()) message->set_cache_salt(config.cache_salt);
  if (config.n) message->set_n(*config.n);
}

void chat_options_to_pb(const ChatOptions& options, pb::ChatOptions* message) {
  message->set_tools_json(options.tools_json);
  message->set_tool_choice_json(options.tool_choice_json);
  message->set_chat_template_kwargs_json(options.chat_template_kwargs_json);
  message->set_chat_format(options.chat_format);
  message->set_chat_template(options.chat_template);
  if (options.parallel_tool_calls) message->set_parallel_tool_calls(*options.parallel_tool_calls);
  message->set_continue_final_message(options.continue_final_message);
}

uint64_t random_seed() {
  std::random_device device;
  return ((static_cast<uint64_t>(device()) << 32) | device()) >> 1;
}

}  // namespace

AllSparkError as_allspark_error(const pb::Error& error) {
  const bool known = error.status() > 0 && error.status() <= static_cast<int>(AsStatus::ALLSPARK_STREAMING);
  return {known ? static_cast<AsStatus>(error.status()) : AsStatus::ALLSPARK_UNKNOWN_ERROR, error.message(),
          error.retryable()};
}

std::exception_ptr error_from_pb(const pb::Error& error) {
  if (error.kind() == pb::VALUE_ERROR || error.kind() == pb::TYPE_ERROR)
    return std::make_exception_ptr(std::invalid_argument(error.message()));
  if (error.elsewhere()) return std::make_exception_ptr(Draining(error.message()));
  if (!error.not_loaded().empty()) return std::make_exception_ptr(NotLoaded(error.not_loaded()));
  return std::make_exception_ptr(as_allspark_error(error));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& found) { return found.what(); }
}

std::exception_ptr translate(const grpc::Status& status, const grpc::ClientContext& context,
                             const std::string& address) {
  const auto& trailing = context.GetServerTrailingMetadata();
  if (auto entry = trailing.find(kErrorKey); entry != trailing.end()) {
    pb::Error error;
    if (error.ParseFromArray(entry->second.data(), static_cast<int>(entry->second.size()))) return error_from_pb(error);
  }
  const std::string details = status.error_message().empty() ? "no details" : status.error_message();
  const std::string server = "the server at " + address;
  auto failed = [](AsStatus code, const std::string& text) {
    return std::make_exception_ptr(AllSparkError(code, text));
  };
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return std::make_exception_ptr(Unavailable(address, "the server closed the session"));
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return std::make_exception_ptr(Unavailable(address, details));
    case grpc::StatusCode::RESOURCE_EXHAUSTED:  // by gRPC: a message that is too large, say
      return failed(AsStatus::ALLSPARK_EXCEED_LIMIT_ERROR, server + " refused: " + details);
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
      return failed(AsStatus::ALLSPARK_REQUEST_DENIED, server + " refused this client: " + details);
    case grpc::StatusCode::UNIMPLEMENTED:
      return failed(AsStatus::ALLSPARK_INVALID_CALL_ERROR, server + " does not offer this call: " + details);
    default:
      return failed(AsStatus::ALLSPARK_RUNTIME_ERROR,
                    server + " failed: code " + std::to_string(status.error_code()) + ": " + details);
  }
}

void check_protocol(const pb::ServerInfo& info, const std::string& address) {
  const int newest = info.protocol();
  const int oldest = info.oldest_protocol() ? info.oldest_protocol() : newest;
  if (std::min(kProtocol, newest) >= std::max(kOldestProtocol, oldest)) return;
  const std::string peer = "the server at " + address + " (version " + info.version() + ")";
  throw AllSparkError(AsStatus::ALLSPARK_REQUEST_DENIED,
                      peer + " speaks " + versions(oldest, newest) + " of the protocol, this client (" + kProgram +
                          ") speaks " + versions(kOldestProtocol, kProtocol) + ": upgrade " +
                          (newest < kOldestProtocol ? peer : "this client"));
}

pb::GenerateRequest request_to_pb(const std::string& model, const RequestContent& content) {
  const int prompts = !content.input_ids.empty() + !content.text.empty() + !content.messages.empty();
  if (prompts != 1)
    throw std::invalid_argument("the request has " + std::to_string(prompts) +
                                " prompts; set exactly one of input_ids, text and messages");
  pb::GenerateRequest message;
  message.set_model(model);
  config_to_pb(content.config, message.mutable_config());
  if (!content.config.seed) message.mutable_config()->set_seed(random_seed());
  if (!content.input_ids.empty()) {
    auto first = content.input_ids.begin();
    const std::optional<int>& most = content.config.truncate_prompt_tokens;
    // Before it is sent: servers refuse longer prompts than a model's.
    if (most && *most > 0 && static_cast<size_t>(*most) < content.input_ids.size())
      first = content.input_ids.end() - *most;
    message.mutable_input_ids()->mutable_ids()->Add(first, content.input_ids.end());
  } else if (!content.text.empty()) {
    message.set_text(content.text);
  } else {
    for (const ChatMessage& each : content.messages) {
      pb::ChatMessage* added = message.mutable_chat()->add_messages();
      added->set_role(each.role);
      added->set_content(each.content);
      added->set_json(each.json);
    }
  }
  for (const Image& image : content.images) {
    pb::Image* added = message.add_images();
    added->set_content(image.content);
    added->set_min_pixels(image.min_pixels);
    added->set_max_pixels(image.max_pixels);
  }
  // Set for text and chats, too: when they are resumed, their prompt is ids.
  message.set_want_text(content.want_text || content.input_ids.empty());
  if (content.chat_options) chat_options_to_pb(*content.chat_options, message.mutable_chat_options());
  message.set_trace(content.trace);
  return message;
}

pb::ModelConfig model_config_to_pb(const AsModelConfig& config) {
  pb::ModelConfig message;
  auto& fields = *message.mutable_fields();
  for (const auto& [name, value] : config.fields) {
    pb::Value& slot = fields[name];
    if (const auto* flag = std::get_if<bool>(&value)) slot.set_flag(*flag);
    if (const auto* number = std::get_if<int64_t>(&value)) slot.set_number(*number);
    if (const auto* real = std::get_if<double>(&value)) slot.set_real(*real);
    if (const auto* text = std::get_if<std::string>(&value)) slot.set_text(*text);
    if (const auto* texts = std::get_if<std::vector<std::string>>(&value)) {
      slot.mutable_texts();  // present, also if it is empty
      for (const std::string& item : *texts) slot.mutable_texts()->add_items(item);
    }
  }
  fields["model_name"].set_text(config.model_name);
  fields["model_path"].set_text(config.model_path);
  return message;
}

GeneratedElements elements_from_pb(const pb::Elements& message) {
  GeneratedElements elements;
  elements.ids_from_generate.assign(message.ids().begin(), message.ids().end());
  elements.token_logprobs_list.assign(message.token_logprobs().begin(), message.token_logprobs().end());
  const int tops = std::min(message.top_ids_size(), message.top_logprobs_size());
  int at = 0;
  for (int count : message.top_counts()) {
    auto& token = elements.log_probs_list.emplace_back();
    for (const int end = std::min(at + count, tops); at < end; ++at)
      token.emplace_back(message.top_ids(at), message.top_logprobs(at));
  }
  for (const auto& token : message.prompt_logprobs()) elements.prompt_logprobs_list.push_back(pairs(token));
  elements.embedding.assign(message.embedding().begin(), message.embedding().end());
  elements.prefix_cache_len = message.prefix_cache_len();
  elements.prefix_len_gpu = message.prefix_len_gpu();
  elements.prefix_len_cpu = message.prefix_len_cpu();
  elements.sample_index = message.sample_index();
  elements.text = message.text();
  elements.finish_reason = message.finish_reason();
  elements.stop_string = message.stop_string();
  return elements;
}

ModelState model_from_pb(const pb::ModelState& message) {
  ModelState state;
  state.name = message.name();
  state.running = message.running();
  state.fingerprint = message.fingerprint();
  state.load = message.load();
  state.work = message.work();
  state.adapters.insert(message.adapters().begin(), message.adapters().end());
  state.aliases.assign(message.aliases().begin(), message.aliases().end());
  state.on_demand = message.on_demand();
  state.isa = message.isa();
  state.image_fingerprint = message.image_fingerprint();
  return state;
}

AsEngineStat engine_stat_from_pb(const pb::EngineStat& message) {
  AsEngineStat stat;
  stat.model_name = message.model_name();
  stat.total_span = message.total_span();
  stat.used_span = message.used_span();
  stat.free_span = message.free_span();
  stat.total_token = message.total_token();
  stat.free_token = message.free_token();
  stat.pendding_request = message.pendding_request();
  stat.running_request = message.running_request();
  stat.total_prefill_token = message.total_prefill_token();
  stat.total_generated_token = message.total_generated_token();
  stat.generate_token_persec = message.generate_token_persec();
  stat.process_token_persec = message.process_token_persec();
  stat.token_usage_percentage = message.token_usage_percentage();
  stat.prefix_cache_hit_token = message.prefix_cache_hit_token();
  stat.prefix_cache_miss_token = message.prefix_cache_miss_token();
  stat.prefix_cache_hit_rate = message.prefix_cache_hit_rate();
  stat.prefix_cache_miss_rate = message.prefix_cache_miss_rate();
  stat.preempted_request = message.preempted_request();
  return stat;
}

std::string adapter_name(const std::string& lora) {
  const size_t equals = lora.find('=');
  if (equals != std::string::npos && lora.find('/') > equals) return lora.substr(0, equals);
  const size_t end = lora.find_last_not_of('/');
  const std::string path = end == std::string::npos ? "" : lora.substr(0, end + 1);
  return path.substr(path.find_last_of('/') + 1);  // npos + 1 is 0
}

}  // namespace allspark::client::internal
