// A client of server groups for C++17. It speaks proto/allspark.proto, as the Python client does, and does as it does:
// the seed is fixed before a request is sent, a request goes to the member of the pool with the least work, and one
// whose server is lost continues on another member with an equal fingerprint, with the tokens that the lost server
// would have produced.
//
//   allspark::client::ClientEngine engine("host-a:50051,host-b:50051");
//   allspark::client::RequestContent content;
//   content.text = "Once upon a time";
//   content.config.max_new_tokens = 64;
//   auto answer = engine.Generate("m", content);
//   while (auto elements = answer.Next()) std::cout << elements->text << std::flush;
//
// Names are DashInfer's where it has the same call; <allspark/dashinfer.h> puts them in its namespace. No header of
// gRPC or Protocol Buffers is included. Any thread may call any method, but for destructors and moves.
//
// Errors are exceptions: std::invalid_argument where an argument is wrong, and AllSparkError for everything else that
// was refused or has failed. Methods that return an AsStatus return ALLSPARK_SUCCESS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace allspark::client {

// The result of a call. allspark_client/errors.py has the same values.
enum class AsStatus : int {
  ALLSPARK_SUCCESS = 0,
  ALLSPARK_UNKNOWN_ERROR = 1,
  ALLSPARK_PARAM_ERROR = 2,
  ALLSPARK_IO_ERROR = 3,
  ALLSPARK_MEMORY_ERROR = 4,
  ALLSPARK_RUNTIME_ERROR = 5,
  ALLSPARK_EXCEED_LIMIT_ERROR = 6,
  ALLSPARK_INVALID_CALL_ERROR = 7,
  ALLSPARK_EMPTY_REQUEST = 8,
  ALLSPARK_ILLEGAL_REQUEST_ID = 9,
  ALLSPARK_CACHE_MEMORY_OUT = 10,
  ALLSPARK_REQUEST_DENIED = 11,
  ALLSPARK_LORA_NOT_FOUND = 12,
  ALLSPARK_LORA_ALREADY_LOADED = 13,
  ALLSPARK_LORA_IN_USE = 14,
  ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR = 15,
  ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR = 16,
  ALLSPARK_STREAMING = 17,
};

const char* ToString(AsStatus status);

// A refused or failed call or request. what() is the status' name, a colon, and message().
class AllSparkError : public std::runtime_error {
 public:
  AllSparkError(AsStatus status, const std::string& message, bool retryable = false);

  AsStatus status() const { return status_; }
  const std::string& message() const { return message_; }
  // Whether the same call may succeed a little later, because a queue is full, say.
  bool retryable() const { return retryable_; }

 private:
  AsStatus status_;
  std::string message_;
  bool retryable_;
};

// The state of a request. The last three are final.
enum class GenerateRequestStatus : int {
  Init = 0,             // waiting to be scheduled
  ContextFinished = 1,  // the prompt has been computed
  Generating = 2,
  GenerateFinished = 3,     // ended by end-of-sequence, a stop word or a length limit
  GenerateInterrupted = 4,  // stopped by StopRequest, StopModel, a release or the end of its engine
  InternalError = 5,        // failed; ResultQueue::Get throws why
};

const char* ToString(GenerateRequestStatus status);

// Tokenizer family of GenerateConfig::vocab.
enum class VocabType : int { VOCAB_TYPE_WPM = 0, VOCAB_TYPE_SPM = 1, VOCAB_TYPE_UGM = 2, VOCAB_TYPE_BPE = 3 };

// How one request is generated. Fields that are not set have the API's defaults; docs/reference/configuration.md
// describes each. The server checks the values: a wrong one is a std::invalid_argument of the call that starts the
// request.
struct GenerateConfig {
  std::optional<bool> do_sample;
  std::optional<uint64_t> seed;  // not set: a random one, which the client draws
  std::optional<double> temperature;
  std::optional<int> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<double> presence_penalty;
  std::optional<double> frequency_penalty;
  std::optional<bool> suppress_repetition_in_generation;
  std::optional<int> no_repeat_ngram_size;
  std::optional<int> truncate_prompt_tokens;
  std::optional<int> min_length;
  std::optional<int> min_new_tokens;
  std::optional<int> max_length;
  std::optional<int> max_new_tokens;
  std::optional<bool> early_stopping;
  std::optional<int> eos_token_id;  // -1: there is none
  std::vector<int> eos_token_ids;   // several, instead of it
  std::vector<std::vector<int64_t>> stop_words_ids;
  std::vector<std::string> stop;
  std::optional<bool> include_stop_str_in_output;
  std::optional<bool> skip_special_tokens;
  std::optional<int> thinking_token_budget;
  std::vector<std::vector<int>> bad_words_ids;
  std::vector<std::string> bad_words;
  std::map<int, double> logit_bias;
  std::optional<bool> logprobs;
  std::optional<int> top_logprobs;
  std::optional<int> prompt_logprobs;
  std::optional<std::string> pooling;
  std::string lora_name;
  std::string response_format;  // JSON, such as {"type": "json_object"}
  std::map<std::string, int> vocab;
  std::optional<VocabType> vocab_type;
  std::string uuid;
  std::string user_request_id;
  std::optional<int> priority;
  std::optional<double> queue_timeout;
  std::string cache_salt;
  std::optional<int> n;
};

// A message of a chat: role and content, or instead of both the message in OpenAI's form as JSON.
struct ChatMessage {
  std::string role;
  std::string content;
  std::string json;
};

// How a chat is rendered, and what its answer may contain. Texts that end in _json are OpenAI's fields.
struct ChatOptions {
  std::string tools_json;
  std::string tool_choice_json;
  std::string chat_template_kwargs_json;
  std::string chat_format;    // empty: the model's
  std::string chat_template;  // a Jinja template; empty: the model's
  std::optional<bool> parallel_tool_calls;
  bool continue_final_message = false;
};

// An image of a prompt, for models that see.
struct Image {
  std::string content;  // an encoded file: PNG, JPEG, WebP or GIF
  int min_pixels = 0;   // what the model sees has at least and at most so many pixels; 0: the model's own bounds
  int max_pixels = 0;
};

// A request. Exactly one of input_ids, text and messages is given.
struct RequestContent {
  std::vector<int> input_ids;  // 0 to the vocabulary's size - 1
  std::string text;            // the server tokenizes it
  std::vector<ChatMessage> messages;
  // In order: one for each part {"type": "image"} of the messages, which are given as JSON then, or for each
  // placeholder that the model has for an image in text and ids.
  std::vector<Image> images;
  std::optional<ChatOptions> chat_options;
  bool want_text = false;  // with input_ids: elements carry text, too
  std::string trace;       // a traceparent (W3C Trace Context): the parent of the request's spans
  GenerateConfig config;
};

// New tokens of one sample of a request, in the order in which they were generated. Each of log_probs_list and
// token_logprobs_list is empty or has one entry per token.
struct GeneratedElements {
  std::vector<int64_t> ids_from_generate;
  std::vector<std::vector<std::pair<int, float>>> log_probs_list;  // (id, log probability), most likely first
  std::vector<float> token_logprobs_list;
  std::vector<std::vector<std::pair<int, float>>> prompt_logprobs_list;  // of the prompt's tokens but the first
  std::vector<float> embedding;                                          // of a request with pooling
  int prefix_cache_len = 0;  // prompt tokens from the prefix cache: in all, from a GPU's memory, from host memory
  int prefix_len_gpu = 0;
  int prefix_len_cpu = 0;
  int sample_index = 0;
  std::string text;           // of requests with text, messages or want_text
  std::string finish_reason;  // with the sample's last token; empty before
  std::string stop_string;    // the string of GenerateConfig::stop that ended the sample
};

namespace internal {
struct QueueState;
struct LiveRequest;
struct EngineState;
}  // namespace internal

// A request that was started; a pointer that is valid until the request is released.
class RequestHandle;
using RequestHandle_t = RequestHandle*;

// The tokens and the status of one request. Getters return each token once; tokens of one sample that have arrived
// together come as one. After the end, once all tokens are read, getters return null; if the request has failed, they
// throw its AllSparkError instead.
class ResultQueue {
 public:
  // By name, such as "time_to_first_token": times of day as Unix times in s, durations in ms, numbers of tokens.
  // RequestStat of proto/allspark.proto has the names. Empty before the server has said anything.
  using StatInfo = std::map<std::string, double>;

  // Waits for new tokens.
  std::shared_ptr<GeneratedElements> Get();
  // Waits at most so many milliseconds; null also when they are over. std::invalid_argument if negative.
  std::shared_ptr<GeneratedElements> Get(int timeout_ms);
  // Tokens that have arrived already, or null.
  std::shared_ptr<GeneratedElements> GetNoWait();

  // Tokens may remain to be read when the status is already final.
  GenerateRequestStatus GenerateStatus() const;
  // "stop", "length", "stop_word", "tool_calls", "interrupted" or "error"; empty before the end.
  std::string FinishReason() const;
  // The number of tokens so far, read or not, over all samples.
  size_t GeneratedLength() const;
  StatInfo RequestStatInfo() const;
  // The start of the answer that the chat template wrote, such as "<think>\n".
  std::string Opened() const;
  // Why the request failed or was interrupted by others than its caller; nothing otherwise.
  std::optional<AllSparkError> Error() const;

 private:
  friend struct internal::LiveRequest;
  explicit ResultQueue(std::shared_ptr<internal::QueueState> state) : state_(std::move(state)) {}

  std::shared_ptr<internal::QueueState> state_;
};
using ResultQueue_t = ResultQueue*;

// A value of AsModelConfig::fields.
using ConfigValue = std::variant<bool, int64_t, double, std::string, std::vector<std::string>>;

// Which model to load and how to run it. `fields` are those of the Python client's AsModelConfig by name; enumerations
// are given by their values' names. Fields that are not there have the API's defaults, and the server refuses unknown
// ones.
struct AsModelConfig {
  std::string model_name;
  std::string model_path;  // on the servers' machines
  std::map<std::string, ConfigValue> fields;
};

// Builds an AsModelConfig by chained calls, with DashInfer's names.
class AsModelConfigBuilder {
 public:
  AsModelConfigBuilder& withModelName(const std::string& name) { return config_.model_name = name, *this; }
  AsModelConfigBuilder& withModelPath(const std::string& path) { return config_.model_path = path, *this; }
  AsModelConfigBuilder& withWeightsPath(const std::string& path) { return with("weights_path", path); }
  AsModelConfigBuilder& withComputeUnit(const std::string& unit) { return with("compute_unit", unit); }
  AsModelConfigBuilder& withEngineMaxLength(int64_t length) { return with("engine_max_length", length); }
  AsModelConfigBuilder& withEngineMaxBatch(int64_t batch) { return with("engine_max_batch", batch); }
  AsModelConfigBuilder& withNumThreads(int64_t threads) { return with("num_threads", threads); }
  AsModelConfigBuilder& withMatmulPrecision(const std::string& name) { return with("matmul_precision", name); }
  AsModelConfigBuilder& withCacheSpanSize(int64_t size) { return with("cache_span_size", size); }
  AsModelConfigBuilder& withEnablePrefixCache(bool on) { return with("enable_prefix_cache", on); }
  AsModelConfigBuilder& withPrefixCacheTTL(int64_t seconds) { return with("prefix_cache_ttl", seconds); }
  // Any field by its name.
  AsModelConfigBuilder& with(const std::string& field, ConfigValue value) {
    return config_.fields[field] = std::move(value), *this;
  }
  AsModelConfig build() const { return config_; }

 private:
  AsModelConfig config_;
};

// The state of an installed model on one member.
struct ModelState {
  std::string name;
  bool running = false;
  std::string fingerprint;                      // equal fingerprints: the same request gives the same tokens
  int64_t load = 0;                             // waiting and running requests
  int64_t work = 0;                             // prompt tokens of these that are not computed yet, about
  std::map<std::string, std::string> adapters;  // names of the loaded LoRA adapters, and a digest of each
  std::vector<std::string> aliases;
  bool on_demand = false;  // it is not loaded now, and a request loads it
  std::string isa;
  std::string image_fingerprint;  // equal ones: an image is prepared and bounded alike; empty: it takes none
};

// A server group of the pool, as this client sees it.
struct MemberState {
  std::string address;
  bool connected = false;
  std::string version;
  int ranks = 0;
  bool draining = false;  // it takes no new requests
  std::vector<ModelState> models;
};

// A model's load, and its counters since it was started. EngineStat of proto/allspark.proto describes the fields.
struct AsEngineStat {
  std::string model_name;
  int64_t total_span = 0;
  int64_t used_span = 0;
  int64_t free_span = 0;
  int64_t total_token = 0;
  int64_t free_token = 0;
  int64_t pendding_request = 0;
  int64_t running_request = 0;
  int64_t total_prefill_token = 0;
  int64_t total_generated_token = 0;
  double generate_token_persec = 0;
  double process_token_persec = 0;
  double token_usage_percentage = 0;
  int64_t prefix_cache_hit_token = 0;
  int64_t prefix_cache_miss_token = 0;
  double prefix_cache_hit_rate = 0;
  double prefix_cache_miss_rate = 0;
  int64_t preempted_request = 0;
};

struct AsFileInfo {
  std::string create_version_graph;
  std::string create_version_param;
  std::string current_version_engine;
};

// Paths of PEM files.
struct TlsConfig {
  std::string ca;           // trusted certificate authorities; empty: gRPC's default ones
  std::string cert;         // this client's certificate, for servers that ask for one; needs key
  std::string key;          // its private key
  std::string server_name;  // the name that the server's certificate must have; empty: the address's host
};

struct ClientOptions {
  // Live requests of a lost group continue on another member with the same fingerprint, or on the same one once it is
  // back; meanwhile calls wait for a server. If false, both fail at once.
  bool resume = true;
  double reconnect_timeout = 60;  // how long requests and calls wait for a server, s
  std::optional<TlsConfig> tls;   // not set: no TLS. Unix sockets never use it
  // The bearer token to show. Not set: the first one in the file $ALLSPARK_TOKEN_FILE, if that is set.
  std::optional<std::string> token;
  // Is told of lost servers and of requests that continue elsewhere, from any thread.
  std::function<void(const std::string&)> log;
};

// A request that is released when this object ends, and so cancelled if it is live. It must not outlive its engine.
class Generation {
 public:
  Generation(Generation&& other) noexcept;
  Generation& operator=(Generation&& other) noexcept;
  ~Generation();

  // Waits for new tokens; null after the last. Throws AllSparkError if the request has failed, or was interrupted by
  // anything but Stop: what was read is then incomplete.
  std::shared_ptr<GeneratedElements> Next();
  // Ends the request early. What was generated before can still be read.
  void Stop();
  ResultQueue& queue();

 private:
  friend class ClientEngine;
  Generation(std::shared_ptr<internal::EngineState> engine, std::shared_ptr<internal::LiveRequest> request);

  std::shared_ptr<internal::EngineState> engine_;
  std::shared_ptr<internal::LiveRequest> request_;
};

// The engine's API in front of a server group, or a pool of them. Methods that change a model apply to every member of
// a pool, and a request goes to the member with the least work.
class ClientEngine {
 public:
  // DashInfer's places of these names.
  using ResultQueue = client::ResultQueue;
  using ResultQueue_t = client::ResultQueue_t;
  using RequestContent = client::RequestContent;
  using GeneratedElements = client::GeneratedElements;
  using GenerateRequestStatus = client::GenerateRequestStatus;

  // Connects. `addresses`: "host:port" or "unix:/path", with commas between the members of a pool; empty: those of
  // $ALLSPARK_ADDRESS. Throws std::invalid_argument for other addresses, and AllSparkError with ALLSPARK_IO_ERROR if no
  // server can be reached within 5 s, with ALLSPARK_REQUEST_DENIED if one refuses this client.
  explicit ClientEngine(const std::string& addresses = "", ClientOptions options = {});
  // Closes the connections: servers cancel live requests, whose queues end with GenerateInterrupted.
  ~ClientEngine();
  ClientEngine(const ClientEngine&) = delete;
  ClientEngine& operator=(const ClientEngine&) = delete;

  // Starts a request, and returns once a server has accepted it. A model on demand is loaded before.
  Generation Generate(const std::string& model_name, const RequestContent& content);

  // DashInfer's calls for requests. `*queue` is valid until the request is released.
  AsStatus StartRequest(const std::string& model_name, const std::shared_ptr<RequestContent>& content,
                        RequestHandle_t* handle, ResultQueue_t* queue);
  // Ends a request and waits for its end, at most 10 s. What was generated before can still be read.
  AsStatus StopRequest(const std::string& model_name, RequestHandle_t handle);
  AsStatus ReleaseRequest(const std::string& model_name, RequestHandle_t handle);
  // Waits until a request has ended.
  AsStatus SyncRequest(const std::string& model_name, RequestHandle_t handle);

  // Models. Loading has no time limit; a call fails if its connection breaks and cannot be repeated.
  AsStatus BuildModelFromConfigStruct(const AsModelConfig& config);
  AsStatus StartModel(const std::string& model_name);
  AsStatus StopModel(const std::string& model_name);
  AsStatus ReleaseModel(const std::string& model_name);
  AsStatus UnloadModelFromDeviceMemory(const std::string& model_name);
  AsStatus ReloadModelToDeviceMemory(const std::string& model_name);
  AsStatus LoadLoraByName(const std::string& model_name, const std::string& lora_name);
  AsStatus UnloadLoraByName(const std::string& model_name, const std::string& lora_name);

  // The models of the connected members, one member after the other.
  std::vector<ModelState> ListModels();
  // Does not wait for members that cannot be reached.
  std::vector<MemberState> Members();
  // On a pool, the sum over the members that can be reached.
  AsEngineStat GetAsEngineStat(const std::string& model_name);
  // What ModelInfo of proto/allspark.proto says about a model, as JSON, of one member.
  AsStatus GetModelInformation(const std::string& model_name, std::string* model_info);
  // The versions in a serialized model's two files on the server's machine.
  AsFileInfo GetFileInformation(const std::string& graph_path, const std::string& param_path);
  std::vector<int> Tokenize(const std::string& model_name, const std::string& text);
  std::string Detokenize(const std::string& model_name, const std::vector<int>& ids);
  std::string GetOpProfilingInfo(const std::string& model_name);
  // The server's version.
  std::string GetVersionFull();
  int GetRankId();
  int GetRankNums();
  bool IsAllSparkWorkAsService() const { return true; }

 private:
  std::shared_ptr<internal::EngineState> state_;
};

}  // namespace allspark::client
