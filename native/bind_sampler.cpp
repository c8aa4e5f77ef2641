// Python's view of the sampler, for tests: one draw over given shards, by the very calls the executor makes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "sampler.h"

namespace py = pybind11;

namespace as {

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Ints = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Words = py::array_t<uint32_t, py::array::c_style | py::array::forcecast>;

std::vector<int> shard_starts(const std::vector<std::vector<float>>& shards) {
  std::vector<int> starts{0};
  for (const auto& shard : shards) starts.push_back(starts.back() + static_cast<int>(shard.size()));
  return starts;
}

using Round = size_t (*)(const SampleInput&, int, int, int, std::vector<uint8_t>&);

// Every rank's blob of one round. Checks what candidates() and full() promise: the logits are left as they were.
std::vector<std::vector<uint8_t>> run_round(Round round, SampleInput input, std::vector<std::vector<float>>& shards) {
  const std::vector<int> starts = shard_starts(shards);
  std::vector<std::vector<uint8_t>> blobs(shards.size());
  for (size_t r = 0; r < shards.size(); ++r) {
    const std::vector<float> before = shards[r];
    input.logits = shards[r].data();
    const size_t bytes = round(input, starts[r], static_cast<int>(shards[r].size()), starts.back(), blobs[r]);
    if (bytes != blobs[r].size() || blob_bytes(blobs[r].data()) != bytes)
      throw std::logic_error("blob length is wrong");
    for (size_t i = 0; i < before.size(); ++i) {
      const bool both_nan = before[i] != before[i] && shards[r][i] != shards[r][i];
      if (before[i] != shards[r][i] && !both_nan) {
        throw std::logic_error("sampling changed logit " + std::to_string(starts[r] + i));
      }
    }
  }
  return blobs;
}

Blobs views(const std::vector<std::vector<uint8_t>>& blobs) {
  Blobs out;
  for (const auto& blob : blobs) out.emplace_back(blob.data(), blob.size());
  return out;
}

py::dict sample_once(const py::sequence& logits, const Ints& block, const Ints& history, const py::object& mask) {
  std::vector<std::vector<float>> shards;
  for (const auto& item : logits) {
    const Floats shard = py::cast<Floats>(item);
    shards.emplace_back(shard.data(), shard.data() + shard.size());
  }
  const int32_t* words = block.data();
  const SamplingParams params = SamplingParams::parse(words, block.data() + block.size());
  if (words != block.data() + block.size())
    throw std::invalid_argument("words are left over behind the sampling block");
  SampleInput input;
  input.params = &params;
  input.history = history.data();
  input.history_len = static_cast<int>(history.size());
  Words bits;
  if (!mask.is_none()) {
    bits = py::cast<Words>(mask);
    const int vocab = shard_starts(shards).back();
    if (bits.size() < (vocab + 31) / 32) {
      throw std::invalid_argument("mask has " + std::to_string(bits.size()) + " words; a vocabulary of " +
                                  std::to_string(vocab) + " needs " + std::to_string((vocab + 31) / 32));
    }
    input.mask = bits.data();
  }
  SampleOutput out;
  int rounds = 1;
  if (!merge(params, input.history_len, views(run_round(candidates, input, shards)), out)) {
    rounds = 2;
    merge_full(params, input.history_len, views(run_round(full, input, shards)), out);
  }
  py::dict result;
  result["token"] = out.token;
  result["logprob"] = out.logprob;
  result["top_ids"] = std::vector<int32_t>(out.top_ids, out.top_ids + kMaxTopLogprobs);
  result["top_logprobs"] = std::vector<float>(out.top_logprobs, out.top_logprobs + kMaxTopLogprobs);
  result["status"] = out.status == SampleStatus::kOk ? std::string() : std::string(describe(out.status));
  result["rounds"] = rounds;
  return result;
}

}  // namespace

void bind_sampler(py::module_& m) {
  m.def("sample_once", &sample_once, py::arg("logits"), py::arg("block"), py::arg("history"),
        py::arg("mask") = py::none(),
        "One draw. logits: a float32 array [ranks, shard] or a list of 1-D shards of the vocabulary; block: the int32 "
        "words of "
        "a sampling block; history: int32 ids; mask: uint32 words, bit i%32 of word i/32 allows id i. Returns a dict: "
        "token "
        "(-1 with a status), logprob, top_ids, top_logprobs, status ('' if fine), rounds (1 or 2). Raises ValueError "
        "for a "
        "block or mask that is malformed.");
}

}  // namespace as
