// What takes bytes from outside of a process, for a build with sanitizers that takes seconds: see test_sanitize.py.
//
//   sanitized plans    the decoder of step plans, with a model that only reads what it is given. Standard input: plans,
//                      each with its length (uint32) before it. Answers, int32 each: -1 for one that is refused, or how
//                      many items draw, and of each the number of tokens.
//   sanitized shared_memory   windows of several ranks over one host's memory, each rank a thread
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "batch/decoder.h"
#include "comm/shared_memory.h"

namespace as {

// The chosen instruction set's kernel is not compiled here.
void sum_partials(const float* const* partials, int count, float* out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    float sum = partials[0][i];
    for (int r = 1; r < count; r++) sum += partials[r][i];
    out[i] = sum;
  }
}

}  // namespace as

namespace {

// As tests/fuzz/plans.py has it.
constexpr int kSlots = 4, kSpans = 24, kSpan = 16, kLength = 96, kRows = 32, kVocabulary = 97;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Looks at all that an op could look at: what is missing or out of bounds is found here.
struct Reader : as::Runner {
  as::RunOutput run(const as::Batch& batch, bool) override {
    for (const as::Row& row : batch.rows) {
      const as::Slot& slot = batch.slot(row.slot);
      require(slot.live && row.position >= 0 && row.position < kLength, "a row of no sequence");
      require(slot.history.at(row.position) == row.token, "a row's token is not its history's");
      for (const auto& table : slot.spans)
        require((unsigned)table.at(row.position / kSpan) < (unsigned)kSpans, "a position in no span");
    }
    for (const as::Item& item : batch.items)
      require(
          item.row + item.count <= (int)batch.rows.size() && item.output + item.outputs <= (int)batch.outputs.size(),
          "an item beyond its batch");
    as::RunOutput drawn;
    for (const as::Output& output : batch.outputs) {
      const as::Slot& slot = batch.slot(output.slot);
      uint64_t sum = slot.sampling.seed + slot.history.at(output.history - 1);
      require(batch.rows.at(output.row).slot == output.slot, "an output of another sequence's row");
      drawn.samples.emplace_back();
      drawn.samples.back().token = int(sum % kVocabulary);
    }
    return drawn;
  }
};

void plans() {
  Reader model;
  as::SlotLimits limits;
  limits.max_rows = kRows, limits.max_outputs = kRows, limits.max_slots = kSlots, limits.max_length = kLength;
  limits.span_size = kSpan, limits.num_spans = kSpans, limits.windows = {0}, limits.masks = kSlots;
  as::Decoder decoder(model, nullptr, nullptr, limits);
  uint32_t length;
  while (std::fread(&length, sizeof length, 1, stdin) == 1) {
    std::string plan(length, '\0');
    require(std::fread(plan.data(), 1, length, stdin) == length, "half a plan");
    std::vector<int32_t> answer;
    try {
      const as::StepOutput output = decoder.step(plan, false);
      answer.push_back((int32_t)output.counts.size());
      answer.insert(answer.end(), output.counts.begin(), output.counts.end());
    } catch (const std::invalid_argument&) { answer.push_back(-1); }
    std::fwrite(answer.data(), sizeof answer[0], answer.size(), stdout);
    std::fflush(stdout);
  }
}

// What rank r has at i: sums of a few are exact.
float value(int r, size_t i) { return float(int((i * 31 + r * 17) % 1009) - 500); }

void use(as::SharedMemory& shared_memory, int ranks) {
  const int rank = shared_memory.rank();
  for (const size_t n : {size_t(1), size_t(7), size_t(897), size_t(8193), size_t(300001)}) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) x[i] = value(rank, i);
    shared_memory.all_reduce(x.data(), n, 0, 1);
    for (size_t i = 0; i < n; i++) {
      float sum = 0;
      for (int r = 0; r < ranks; r++) sum += value(r, i);
      require(x[i] == sum, "a sum is wrong");
    }
  }
  for (const auto& [rows, width] : {std::pair<size_t, size_t>{1, 13}, {5, 1}, {257, 96}}) {
    std::vector<float> x(rows * width);
    for (size_t i = 0; i < x.size(); i++) x[i] = value(rank, i);
    shared_memory.reduce_scatter_rows(x.data(), rows, width, 0, 1);
    shared_memory.all_gather_rows(x.data(), rows, width * sizeof(float), 0, 1);
    for (size_t i = 0; i < x.size(); i++) {
      float sum = 0;
      for (int r = 0; r < ranks; r++) sum += value(r, i);
      require(x[i] == sum, "a row is wrong");
    }
  }
  for (const size_t length : {0, 1, 262137, 700001}) {
    std::string message(rank == 0 ? length : 3, char('a' + length % 26));
    shared_memory.broadcast(message);
    require(message == std::string(length, char('a' + length % 26)), "a broadcast is wrong");
    const auto all = shared_memory.gather(std::string(length + rank, char('a' + rank)));
    require(all.size() == (rank ? 0u : (size_t)ranks), "a gather is wrong");
    for (size_t r = 0; r < all.size(); r++)
      require(all[r] == std::string(length + r, char('a' + r)), "what was gathered");
    if (rank == 0) {
      shared_memory.publish(3, std::string(length * 2, 'c'));
    } else {
      int kind = 0;
      std::string payload;
      require(shared_memory.wait_command(20, kind, payload) && kind == 3 && payload.size() == length * 2,
              "a command is wrong");
    }
  }
  if (rank == ranks - 1) shared_memory.abort("that is all");
  try {
    shared_memory.gather("x");
  } catch (const std::runtime_error& error) { require(std::strstr(error.what(), "that is all"), "another error"); }
}

void windows() {
  for (const int ranks : {1, 2, 3}) {
    std::vector<std::unique_ptr<char, decltype(&std::free)>> memory;
    std::vector<uintptr_t> addresses;
    for (int r = 0; r < ranks; r++) {
      memory.emplace_back((char*)std::aligned_alloc(4096, sizeof(as::Segment)), &std::free);
      std::memset(memory.back().get(), 0, sizeof(as::Segment));
      addresses.push_back((uintptr_t)memory.back().get());
    }
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; r++)
      threads.emplace_back([&, r] {
        as::SharedMemory shared_memory(r, ranks, addresses, false, 30, as::sum_partials);
        use(shared_memory, ranks);
        shared_memory.close();
      });
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  if (what == "plans") plans();
  if (what == "shared_memory") windows();
  return what != "plans" && what != "shared_memory";
}
