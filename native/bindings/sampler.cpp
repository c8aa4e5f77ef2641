// The sampler for Python tests: samples from given shards with the calls that the executor makes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/pool.h"
#include "sampling/sampler.h"

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

// Every rank's blob of one round. Checks that candidates() and narrow() restore the logits.
template <class Round>
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

Blobs blob_views(const std::vector<std::vector<uint8_t>>& blobs) {
  Blobs out;
  for (const auto& blob : blobs) out.emplace_back(blob.data(), blob.size());
  return out;
}

py::dict sample_once(const py::sequence& logits, const Ints& block, const Ints& history, const py::object& mask,
                     int threads) {
  std::vector<std::vector<float>> shards;
  for (const auto& item : logits) {
    const Floats shard = py::cast<Floats>(item);
    shards.emplace_back(shard.data(), shard.data() + shard.size());
  }
  const int32_t* words = block.data();
  const SamplingParams params = SamplingParams::parse(words, block.data() + block.size());
  if (words != block.data() + block.size()) throw std::invalid_argument("words follow the end of the sampling block");
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
  // One rank's round, by one call or by several threads.
  const auto split = [&](const SampleInput& in, int begin, int local, int size, const Search* at,
                         std::vector<uint8_t>& blob) {
    ShardSampler sampler;
    sampler.begin(in, begin, local, size, threads, at);
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back([&sampler, t] { sampler.scan(t); });
    sampler.scan(0);
    for (std::thread& other : others) other.join();
    return sampler.finish(blob);
  };
  SampleOutput out;
  Search search{};
  int rounds = 1;
  size_t largest = 0;
  const auto views = [&](const std::vector<std::vector<uint8_t>>& blobs) {
    for (const auto& blob : blobs) largest = std::max(largest, blob.size());
    return blob_views(blobs);
  };
  const auto first_round = [&](const SampleInput& in, int begin, int local, int size, std::vector<uint8_t>& blob) {
    return threads ? split(in, begin, local, size, nullptr, blob) : candidates(in, begin, local, size, blob);
  };
  bool done = merge(params, input.history_len, views(run_round(first_round, input, shards)), search, out);
  if (!done && !may_narrow(params)) throw std::logic_error("ranks do not expect a second round");
  for (; !done; ++rounds) {
    const auto round = [&](const SampleInput& in, int begin, int local, int size, std::vector<uint8_t>& blob) {
      return threads ? split(in, begin, local, size, &search, blob) : narrow(in, begin, local, size, search, blob);
    };
    done = merge_narrowed(params, views(run_round(round, input, shards)), search, out);
  }
  py::dict result;
  result["token"] = out.token;
  result["logprob"] = out.logprob;
  result["top_ids"] = std::vector<int32_t>(out.top_ids, out.top_ids + kMaxTopLogprobs);
  result["top_logprobs"] = std::vector<float>(out.top_logprobs, out.top_logprobs + kMaxTopLogprobs);
  result["status"] = out.status == SampleStatus::kOk ? std::string() : std::string(describe(out.status));
  result["rounds"] = rounds;
  result["largest_blob"] = largest;
  return result;
}

// Seconds to sample a row on one rank with a pool of `threads` threads (the minimum of `repeats` runs), and how much of
// that one thread works alone.
std::pair<double, double> sample_seconds(const Floats& logits, const Ints& block, int threads, int repeats) {
  const int32_t* words = block.data();
  const SamplingParams params = SamplingParams::parse(words, block.data() + block.size());
  const int vocab = static_cast<int>(logits.size());
  std::vector<float> row(logits.data(), logits.data() + vocab);
  std::vector<uint8_t> blob;
  SampleInput input;
  input.params = &params;
  input.logits = row.data();
  ShardSampler sampler;
  Pool pool(threads, {}, true);
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  double best = 1e9, best_alone = 1e9;
  for (int i = 0; i < repeats; ++i) {
    double alone = 0.0;
    bool done = false;
    Search search{};
    SampleOutput out;
    const auto start = Clock::now();
    pool.run([&](int thread) {
      for (bool first = true;; first = false) {
        if (thread == 0) sampler.begin(input, 0, vocab, vocab, threads, first ? nullptr : &search);
        pool.barrier();
        sampler.scan(thread);
        pool.barrier();
        if (thread == 0) {
          const auto begin = Clock::now();
          blob.clear();
          sampler.finish(blob);
          const Blobs blobs{{blob.data(), blob.size()}};
          done = first ? merge(params, 0, blobs, search, out) : merge_narrowed(params, blobs, search, out);
          alone += since(begin);
        }
        pool.barrier();
        if (done) return;
      }
    });
    best = std::min(best, since(start)), best_alone = std::min(best_alone, alone);
  }
  return {best, best_alone};
}

}  // namespace

void bind_sampler(py::module_& m) {
  m.def("sample_once", &sample_once, py::arg("logits"), py::arg("block"), py::arg("history"),
        py::arg("mask") = py::none(), py::arg("threads") = 0,
        "Samples one token. logits: a float32 array [ranks, shard] or a list of 1-D shards of the vocabulary; block: "
        "the\n"
        "int32 words of a sampling block; history: int32 ids; mask: uint32 words, bit i%32 of word i/32 allows id i;\n"
        "threads: how many share a shard (0: candidates() and narrow() alone). Returns a dict: token (-1 with a "
        "status),\n"
        "logprob, top_ids, top_logprobs, status ('' if fine), rounds (1 or more), largest_blob (bytes). Raises "
        "ValueError\n"
        "for a malformed block or mask.");
  m.def("sample_seconds", &sample_seconds, py::arg("logits"), py::arg("block"), py::arg("threads") = 1,
        py::arg("repeats") = 5,
        "Seconds that sampling a token takes on one rank with `threads` threads, and the part of them that one thread\n"
        "works alone: the least of `repeats`.");
  m.def("chunk_of", &chunk_of, py::arg("vocab_size"), "Ids in a chunk of the vocabulary. A chunk belongs to one rank.");
}

}  // namespace as
