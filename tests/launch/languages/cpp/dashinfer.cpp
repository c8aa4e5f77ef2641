// A program in DashInfer's names: installs and starts a model, and uses every call that has its name here.
//
//   dashinfer ADDRESS MODEL_PATH
#include <allspark/dashinfer.h>

#include <iostream>

using namespace allspark;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::cerr << "line " << __LINE__ << ": " << #condition << std::endl; \
      return 1;                                                            \
    }                                                                      \
  } while (false)

int main(int, char** argv) {
  AsEngine engine(argv[1]);
  AsModelConfig config = AsModelConfigBuilder()
                             .withModelName("m")
                             .withModelPath(argv[2])
                             .withComputeUnit("CPU:0")
                             .withEngineMaxLength(256)
                             .withEngineMaxBatch(4)
                             .withEnablePrefixCache(true)
                             .build();
  CHECK(engine.BuildModelFromConfigStruct(config) == AsStatus::ALLSPARK_SUCCESS);
  CHECK(engine.StartModel("m") == AsStatus::ALLSPARK_SUCCESS);
  CHECK(engine.GetRankId() == 0 && engine.GetRankNums() == 1 && engine.IsAllSparkWorkAsService());
  CHECK(!engine.GetVersionFull().empty());

  auto request = std::make_shared<AsEngine::RequestContent>();
  request->input_ids = engine.Tokenize("m", "Once upon a time");
  request->config.max_length = static_cast<int>(request->input_ids.size()) + 12;
  request->config.do_sample = false;
  RequestHandle_t handle = nullptr;
  AsEngine::ResultQueue_t queue = nullptr;
  CHECK(engine.StartRequest("m", request, &handle, &queue) == AsStatus::ALLSPARK_SUCCESS);
  std::vector<int> ids;
  while (auto elements = queue->Get())
    ids.insert(ids.end(), elements->ids_from_generate.begin(), elements->ids_from_generate.end());
  CHECK(engine.SyncRequest("m", handle) == AsStatus::ALLSPARK_SUCCESS);
  CHECK(queue->GenerateStatus() == AsEngine::GenerateRequestStatus::GenerateFinished);
  CHECK(queue->GeneratedLength() == 12 && ids.size() == 12 && queue->FinishReason() == "length");
  CHECK(queue->RequestStatInfo().at("context_token_length") == static_cast<double>(request->input_ids.size()));
  CHECK(queue->GetNoWait() == nullptr && queue->Get(1) == nullptr);
  std::cout << engine.Detokenize("m", ids) << std::endl;
  CHECK(engine.GetAsEngineStat("m").total_generated_token == 12);
  CHECK(engine.ReleaseRequest("m", handle) == AsStatus::ALLSPARK_SUCCESS);

  // A handle that is gone, values that are wrong, and a model that is not there.
  try {
    engine.StopRequest("m", handle);
    CHECK(false);
  } catch (const AllSparkError& error) { CHECK(error.status() == AsStatus::ALLSPARK_ILLEGAL_REQUEST_ID); }
  request->config.top_p = 7;
  try {
    engine.StartRequest("m", request, &handle, &queue);
    CHECK(false);
  } catch (const std::invalid_argument& error) { CHECK(std::string(error.what()).find("top_p") != std::string::npos); }
  request->config.top_p.reset();
  request->text = "and a text";
  try {
    engine.StartRequest("m", request, &handle, &queue);
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find("2 prompts") != std::string::npos);
  }
  request->text.clear();
  try {
    engine.StartRequest("x", request, &handle, &queue);
    CHECK(false);
  } catch (const AllSparkError& error) { CHECK(error.status() == AsStatus::ALLSPARK_PARAM_ERROR); }
  try {
    engine.LoadLoraByName("m", "/none");
    CHECK(false);
  } catch (const std::exception&) {}

  request->config.max_length = 256;
  CHECK(engine.StartRequest("m", request, &handle, &queue) == AsStatus::ALLSPARK_SUCCESS);
  CHECK(queue->Get() != nullptr);
  CHECK(engine.StopRequest("m", handle) == AsStatus::ALLSPARK_SUCCESS);
  CHECK(queue->GenerateStatus() == AsEngine::GenerateRequestStatus::GenerateInterrupted ||
        queue->GeneratedLength() > 200);
  CHECK(engine.ReleaseRequest("m", handle) == AsStatus::ALLSPARK_SUCCESS);

  std::string info;
  CHECK(engine.GetModelInformation("m", &info) == AsStatus::ALLSPARK_SUCCESS);
  CHECK(info.find("\"vocab_size\"") != std::string::npos);
  CHECK(engine.StopModel("m") == AsStatus::ALLSPARK_SUCCESS);
  CHECK(engine.ReleaseModel("m") == AsStatus::ALLSPARK_SUCCESS);
  for (const auto& model : engine.ListModels()) CHECK(model.name != "m");
  return 0;
}
