#include "batch/plan.h"

#include <cstring>
#include <stdexcept>

namespace as {
namespace {

constexpr int32_t kMagic = 0x41535031;  // "ASP1"

struct Reader {
  const int32_t* p;
  const int32_t* end;

  int32_t next() {
    if (p == end) throw std::invalid_argument("step plan ends early");
    return *p++;
  }
  int32_t count(const char* what) {
    const int32_t n = next();
    if (n < 0 || n > end - p)
      throw std::invalid_argument(std::string("step plan: impossible number of ") + what + ": " + std::to_string(n));
    return n;
  }
  std::vector<int32_t> list(int32_t n) {
    if (n < 0 || n > end - p) throw std::invalid_argument("step plan ends within a list");
    std::vector<int32_t> v(p, p + n);
    p += n;
    return v;
  }
};

}  // namespace

Plan Plan::parse(const std::string& bytes) {
  if (bytes.empty() || bytes.size() % 4)
    throw std::invalid_argument("step plan: length must be a multiple of 4, got " + std::to_string(bytes.size()));
  std::vector<int32_t> words(bytes.size() / 4);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  Reader in{words.data(), words.data() + words.size()};
  if (in.next() != kMagic) throw std::invalid_argument("not a step plan of this version");
  Plan plan;
  const int32_t n_free = in.count("freed slots"), n_new = in.count("new sequences"), n_work = in.count("work items");
  plan.free = in.list(n_free);
  for (int32_t i = 0; i < n_new; i++) {
    NewSequence s;
    s.slot = in.next();
    const int32_t n_history = in.count("history tokens");
    s.sampling = SamplingParams::parse(in.p, in.end);
    s.history = in.list(n_history);
    plan.fresh.push_back(std::move(s));
  }
  for (int32_t i = 0; i < n_work; i++) {
    Work w;
    w.slot = in.next();
    w.start = in.next();
    w.count = in.next();
    w.sample = in.next() & 1;
    const int32_t n_append = in.count("appended tokens"), n_spans = in.count("spans");
    w.append = in.list(n_append);
    w.spans = in.list(n_spans);
    plan.work.push_back(std::move(w));
  }
  if (in.p != in.end) throw std::invalid_argument("step plan: words left over at the end");
  return plan;
}

}  // namespace as
