// Prints what a model generates, as it is generated.
//
//   allspark_stream [OPTION...] TEXT
//   allspark_stream --ids 1,2,3 [OPTION...]     prints ids, one a line
//
// Options: --address A,B,… (default: $ALLSPARK_ADDRESS), --model NAME (default: the first that runs), --max-new-tokens
// N (64), --seed N, --greedy, --ca FILE, --cert FILE, --key FILE, --token TOKEN (default: that of
// $ALLSPARK_TOKEN_FILE).
#include <allspark/client.h>

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

namespace as = allspark::client;

namespace {

std::string first_model(as::ClientEngine& engine) {
  for (const as::ModelState& model : engine.ListModels())
    if (model.running) return model.name;
  throw std::runtime_error("no model runs there");
}

int stream(int argc, char** argv) {
  std::string address, model;
  as::RequestContent content;
  as::ClientOptions options;
  as::TlsConfig tls;
  content.config.max_new_tokens = 64;
  options.log = [](const std::string& text) { std::cerr << text << std::endl; };
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      content.text += (content.text.empty() ? "" : " ") + name;
      continue;
    }
    if (name == "--greedy") {
      content.config.do_sample = false;
      continue;
    }
    if (i + 1 == argc) throw std::invalid_argument(name + " needs a value");
    const std::string value = argv[++i];
    if (name == "--address") {
      address = value;
    } else if (name == "--model") {
      model = value;
    } else if (name == "--ids") {
      std::istringstream ids(value);
      for (std::string id; std::getline(ids, id, ',');) content.input_ids.push_back(std::stoi(id));
    } else if (name == "--max-new-tokens") {
      content.config.max_new_tokens = std::stoi(value);
    } else if (name == "--seed") {
      content.config.seed = std::stoull(value);
    } else if (name == "--ca") {
      tls.ca = value;
    } else if (name == "--cert") {
      tls.cert = value;
    } else if (name == "--key") {
      tls.key = value;
    } else if (name == "--token") {
      options.token = value;
    } else {
      throw std::invalid_argument(name + " is not known");
    }
  }
  if (!tls.ca.empty()) options.tls = tls;

  as::ClientEngine engine(address, options);
  as::Generation answer = engine.Generate(model.empty() ? first_model(engine) : model, content);
  while (auto elements = answer.Next()) {
    if (content.input_ids.empty()) {
      std::cout << elements->text << std::flush;
      continue;
    }
    for (int64_t id : elements->ids_from_generate) std::cout << id << std::endl;
  }
  if (content.input_ids.empty()) std::cout << std::endl;
  std::cerr << answer.queue().FinishReason() << " after " << answer.queue().GeneratedLength() << " tokens" << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return stream(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
