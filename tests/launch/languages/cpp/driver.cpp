// Requests as test_cpp.py wants them, and what became of them, as one line of JSON each.
//
//   driver ADDRESS [KEY=VALUE...]
//
// Keys of the client: resume, timeout, token, ca, cert, key, server_name, model (default: the first that runs), threads
// (each request has one of its own). Of all following requests: max, n, seed, temperature, early_stopping, logprobs,
// image (a file; repeatable), stop_after (Stop() after so many tokens), drop_after (release it then), going (write
// "going" once every request has so many tokens). Each prompt=1,2, text=… or chat=… is a request.
#include <allspark/client.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

namespace as = allspark::client;

namespace {

struct Wanted {
  as::RequestContent content;
  size_t stop_after = 0, drop_after = 0;
};

std::string quoted(const std::string& text) {
  std::string found = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') found += '\\';
    if (c == '\n') found += "\\n";
    else found += c;
  }
  return found + "\"";
}

template <class Values>
std::string list(const Values& values) {
  std::ostringstream text;
  const char* between = "";
  text << '[';
  for (const auto& value : values) text << std::exchange(between, ", ") << value;
  text << ']';
  return text.str();
}

std::string report(as::Generation& answer, const Wanted& wanted) {
  std::vector<std::vector<int64_t>> ids(wanted.content.config.n.value_or(1));
  std::vector<float> logprobs;
  std::vector<std::string> tops, lists;
  std::string text, error;
  size_t count = 0;
  bool stopped = false;
  try {
    while (auto elements = answer.Next()) {
      auto& sample = ids.at(elements->sample_index);
      sample.insert(sample.end(), elements->ids_from_generate.begin(), elements->ids_from_generate.end());
      count += elements->ids_from_generate.size();
      text += elements->text;
      logprobs.insert(logprobs.end(), elements->token_logprobs_list.begin(), elements->token_logprobs_list.end());
      for (const auto& token : elements->log_probs_list) {
        std::vector<int> likely;
        for (const auto& [id, logprob] : token) likely.push_back(id);
        tops.push_back(list(likely));
      }
      if (wanted.stop_after && count >= wanted.stop_after && !std::exchange(stopped, true)) answer.Stop();
      if (wanted.drop_after && count >= wanted.drop_after) return "";
    }
  } catch (const as::AllSparkError& found) { error = found.what(); }
  for (const auto& sample : ids) lists.push_back(list(sample));
  auto stat = answer.queue().RequestStatInfo();
  std::ostringstream line;
  line << "{\"ids\": " << list(lists) << ", \"text\": " << quoted(text) << ", \"logprobs\": " << list(logprobs)
       << ", \"tops\": " << list(tops) << ", \"status\": " << quoted(as::ToString(answer.queue().GenerateStatus()))
       << ", \"reason\": " << quoted(answer.queue().FinishReason()) << ", \"error\": " << quoted(error)
       << ", \"length\": " << answer.queue().GeneratedLength() << ", \"told\": " << stat["generated_token_length"]
       << "}\n";
  return line.str();
}

int run(int argc, char** argv) {
  as::ClientOptions options;
  as::TlsConfig tls;
  as::GenerateConfig config;
  std::vector<Wanted> requests;
  std::vector<as::Image> images;
  Wanted next;
  size_t going = 0;
  std::string model;
  bool threads = false;
  options.log = [](const std::string& line) { std::cerr << line << std::endl; };
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i], name = word.substr(0, word.find('=')), value = word.substr(word.find('=') + 1);
    if (name == "resume") options.resume = value == "1";
    if (name == "timeout") options.reconnect_timeout = std::stod(value);
    if (name == "token") options.token = value;
    if (name == "ca") tls.ca = value;
    if (name == "cert") tls.cert = value;
    if (name == "key") tls.key = value;
    if (name == "server_name") tls.server_name = value;
    if (name == "max") config.max_new_tokens = std::stoi(value);
    if (name == "n") config.n = std::stoi(value);
    if (name == "seed") config.seed = std::stoull(value);
    if (name == "temperature") config.temperature = std::stod(value);
    if (name == "early_stopping") config.early_stopping = value == "1";
    if (name == "logprobs") config.logprobs = true, config.top_logprobs = std::stoi(value);
    if (name == "stop_after") next.stop_after = std::stoul(value);
    if (name == "drop_after") next.drop_after = std::stoul(value);
    if (name == "model") model = value;
    if (name == "threads") threads = true;
    if (name == "image") {
      std::ifstream file(value, std::ios::binary);
      images.push_back({{std::istreambuf_iterator<char>(file), {}}, 0, static_cast<int>(images.size())});
    }
    if (name == "going") going = std::stoul(value);
    next.content = {};
    if (name == "prompt") {
      std::istringstream ids(value);
      for (std::string id; std::getline(ids, id, ',');) next.content.input_ids.push_back(std::stoi(id));
    }
    if (name == "text") next.content.text = value;
    if (name == "chat") next.content.messages = {{"user", value, ""}};
    if (name == "chat" && !images.empty()) {
      std::string parts;
      for (size_t image = 0; image < images.size(); ++image) parts += R"({"type": "image"}, )";
      parts += R"({"type": "text", "text": )" + quoted(value) + "}";
      next.content.messages = {{"", "", R"({"role": "user", "content": [)" + parts + "]}"}};
    }
    next.content.images = images;
    if (name != "prompt" && name != "text" && name != "chat") continue;
    next.content.config = config;
    requests.push_back(next);
  }
  if (!tls.ca.empty()) options.tls = tls;
  as::ClientEngine engine(argv[1], options);
  for (const as::ModelState& state : engine.ListModels())
    if (model.empty() && state.running) model = state.name;
  if (threads) {
    std::vector<std::string> lines(requests.size());
    std::vector<std::thread> running;
    for (size_t i = 0; i < requests.size(); ++i)
      running.emplace_back([&, i] {
        as::Generation answer = engine.Generate(model, requests[i].content);
        lines[i] = report(answer, requests[i]);
      });
    for (std::thread& each : running) each.join();
    for (const std::string& line : lines) std::cout << line;
    return 0;
  }
  std::vector<as::Generation> answers;
  for (const Wanted& wanted : requests) answers.push_back(engine.Generate(model, wanted.content));
  if (going) {
    for (as::Generation& answer : answers)
      while (answer.queue().GeneratedLength() < going) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::cout << "going" << std::endl;
  }
  for (size_t i = 0; i < answers.size(); ++i) std::cout << report(answers[i], requests[i]) << std::flush;
  if (requests.empty()) {
    for (const as::MemberState& member : engine.Members())
      std::cout << "{\"address\": " << quoted(member.address) << ", \"connected\": " << member.connected
                << ", \"models\": " << member.models.size() << "}" << std::endl;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::invalid_argument& error) {
    std::cerr << "invalid argument: " << error.what() << std::endl;
    return 2;
  } catch (const as::AllSparkError& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
