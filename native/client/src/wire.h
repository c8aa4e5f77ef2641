// Conversions between the API's types and messages of proto/allspark.proto.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "allspark.pb.h"
#include "allspark/client.h"

namespace grpc {
class ClientContext;
class Status;
}  // namespace grpc

namespace allspark::client::internal {

namespace pb = ::allspark;

// The versions of allspark.proto that this code speaks. allspark_client/convert.py says when they change.
constexpr int kOldestProtocol = 1;
constexpr int kProtocol = 4;
// The first version with GenerateRequest.images.
constexpr int kImagesProtocol = 4;
constexpr const char* kProgram = "allspark C++ client";

// A server cannot be reached, or its connection broke. The call may succeed later, or on another server.
class Unavailable : public std::runtime_error {
 public:
  Unavailable(const std::string& address, const std::string& details)
      : std::runtime_error("the server at " + address + " cannot be reached: " + details) {}
};

// A server takes no new requests because it is about to stop.
class Draining : public AllSparkError {
 public:
  explicit Draining(const std::string& message)
      : AllSparkError(AsStatus::ALLSPARK_REQUEST_DENIED, message, /*retryable=*/true) {}
};

// A model that is loaded on demand is not loaded: LoadModel loads it.
class NotLoaded : public AllSparkError {
 public:
  explicit NotLoaded(const std::string& model)
      : AllSparkError(AsStatus::ALLSPARK_INVALID_CALL_ERROR,
                      "model '" + model + "' is loaded on demand, and is not loaded now", /*retryable=*/true),
        model(model) {}

  std::string model;
};

// A message as an AllSparkError, whatever its kind: the error that ended a running request.
AllSparkError as_allspark_error(const pb::Error& error);
// The exception that the engine raised: std::invalid_argument, Draining, NotLoaded or AllSparkError.
std::exception_ptr error_from_pb(const pb::Error& error);
std::string text_of(const std::exception_ptr& error);
// The exception as one of this kind, if it is one.
template <class Kind>
std::optional<Kind> caught(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Kind& found) { return found; } catch (...) {
    return std::nullopt;
  }
}
// The exception that a failed call stands for: what the engine raised, Unavailable, or AllSparkError.
std::exception_ptr translate(const grpc::Status& status, const grpc::ClientContext& context,
                             const std::string& address);

// Throws AllSparkError, which says which side must be upgraded, if the server speaks no version that this code does.
void check_protocol(const pb::ServerInfo& info, const std::string& address);

// Throws std::invalid_argument unless there is exactly one prompt. Draws a seed if none is set, and drops what
// truncate_prompt_tokens drops of ids.
pb::GenerateRequest request_to_pb(const std::string& model, const RequestContent& content);
pb::ModelConfig model_config_to_pb(const AsModelConfig& config);

GeneratedElements elements_from_pb(const pb::Elements& message);
ModelState model_from_pb(const pb::ModelState& message);
AsEngineStat engine_stat_from_pb(const pb::EngineStat& message);

// The name of a LoRA adapter that is given as NAME, PATH (its last part is the name) or NAME=PATH.
std::string adapter_name(const std::string& lora);

}  // namespace allspark::client::internal
