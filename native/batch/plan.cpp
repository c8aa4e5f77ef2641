#include "batch/plan.h"

#include <cstring>
#include <stdexcept>

namespace as {
namespace {

constexpr int32_t kMagic = 0x41535032;  // "ASP2"

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

Plan Plan::parse(const std::string& bytes, int groups) {
  if (bytes.empty() || bytes.size() % 4)
    throw std::invalid_argument("step plan: length must be a multiple of 4, got " + std::to_string(bytes.size()));
  std::vector<int32_t> words(bytes.size() / 4);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  Reader in{words.data(), words.data() + words.size()};
  if (in.next() != kMagic) throw std::invalid_argument("not a step plan of this version");
  Plan plan;
  const int32_t n_free = in.count("freed slots"), n_new = in.count("new sequences"), n_work = in.count("work items");
  const int32_t n_groups = in.next(), n_sections = in.count("sections");
  if (n_groups != groups)
    throw std::invalid_argument("step plan: " + std::to_string(n_groups) + " cache groups, the model has " +
                                std::to_string(groups));
  plan.free = in.list(n_free);
  for (int32_t i = 0; i < n_new; i++) {
    NewSequence s;
    s.slot = in.next();
    s.cached = in.next();
    const int32_t n_history = in.count("history tokens");
    s.sampling = SamplingParams::parse(in.p, in.end);
    s.history = in.list(n_history);
    plan.fresh.push_back(std::move(s));
  }
  plan.work.resize(n_work);
  auto column = [&](int Work::* field) {
    for (Work& w : plan.work) w.*field = in.next();
  };
  column(&Work::slot), column(&Work::rows), column(&Work::outputs), column(&Work::drafts), column(&Work::flags);
  column(&Work::adapter), column(&Work::mask);
  const std::vector<int32_t> n_known = in.list(n_work);
  std::vector<std::vector<int32_t>> n_spans;
  for (int g = 0; g < groups; g++) n_spans.push_back(in.list(n_work));
  for (int32_t i = 0; i < n_work; i++) plan.work[i].known = in.list(n_known[i]);
  for (int g = 0; g < groups; g++)
    for (int32_t i = 0; i < n_work; i++) plan.work[i].spans.push_back(in.list(n_spans[g][i]));
  if (n_sections)
    throw std::invalid_argument("step plan: a section of kind " + std::to_string(in.next()) +
                                ", which this backend does not have");
  if (in.p != in.end) throw std::invalid_argument("step plan: words left over at the end");
  return plan;
}

}  // namespace as
