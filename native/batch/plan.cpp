#include "batch/plan.h"

#include <cstring>
#include <stdexcept>

namespace as {
namespace {

constexpr int32_t kMagic = 0x41535032;  // "ASP2"
// A section's type.
enum Section : int32_t { kRows = 1, kPositions = 2, kCopies = 3, kStates = 4, kSegments = 5, kPart = 6, kImages = 7 };

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
      throw std::invalid_argument(std::string("step plan: invalid number of ") + what + ": " + std::to_string(n));
    return n;
  }
  std::vector<int32_t> list(int32_t n) {
    if (n < 0 || n > end - p) throw std::invalid_argument("step plan ends within a list");
    std::vector<int32_t> v(p, p + n);
    p += n;
    return v;
  }
};

// A section of copies: the number of saved spans, then for each copy {span, span of the second tier, 4 words of its
// key}.
void parse_copies(Reader in, Plan& plan) {
  const int32_t saved = in.count("saved spans"), words = (int32_t)(in.end - in.p);
  if (words % 6 || saved > words / 6) throw std::invalid_argument("step plan: copies are of 6 words each");
  for (int32_t i = 0; in.p != in.end; i++) {
    SpanCopy copy;
    copy.span = in.next(), copy.host = in.next();
    std::memcpy(copy.key.data(), in.p, sizeof copy.key);
    in.p += 4;
    (i < saved ? plan.saved : plan.restored).push_back(copy);
  }
}

// A section of copies of states: the number of saved ones and of the spans of each, then for each {slot, position,
// spans}.
void parse_states(Reader in, Plan& plan) {
  const int32_t saved = in.count("saved states"), each = in.count("spans of a state");
  const int64_t words = in.end - in.p;
  if (words % (each + 2) || saved > words / (each + 2))
    throw std::invalid_argument("step plan: copies of states are of " + std::to_string(each + 2) + " words each");
  for (int32_t i = 0; in.p != in.end; i++) {
    StateCopy copy;
    copy.slot = in.next(), copy.position = in.next();
    copy.spans = in.list(each);
    (i < saved ? plan.saved_states : plan.loaded_states).push_back(std::move(copy));
  }
}

// A section of given rows: slot, position, rows, width, then the rows.
void parse_rows(Reader in, Plan& plan) {
  GivenRows given{in.next(), in.next(), in.next(), in.next(), nullptr, {}};
  const int64_t words = in.end - in.p;
  if (given.rows < 1 || given.width < 1 || (int64_t)given.rows * given.width != words)
    throw std::invalid_argument("step plan: " + std::to_string(given.rows) + " given rows of " +
                                std::to_string(given.width) + " values in " + std::to_string(words) + " words");
  given.values = reinterpret_cast<const float*>(in.p);
  plan.given.push_back(std::move(given));
}

// A section of rotary positions: slot, positions, delta, then three parts of each.
void parse_positions(Reader in, Plan& plan) {
  const int32_t slot = in.next(), count = in.next(), delta = in.next();
  if (count < 1 || 3 * (int64_t)count != in.end - in.p)
    throw std::invalid_argument("step plan: " + std::to_string(count) + " rotary positions in " +
                                std::to_string(in.end - in.p) + " words");
  plan.positions.push_back({slot, delta, in.list(3 * count)});
}

// A section of segments or images: slot, then places.
SlotPlaces parse_places(Reader in) {
  const int32_t slot = in.next();
  return {slot, in.list((int32_t)(in.end - in.p))};
}

// A section that says which part of the program is run: from where to where.
void parse_part(Reader in, Plan& plan) {
  plan.from = in.next(), plan.to = in.next();
  const std::string part = "step plan: a part from " + std::to_string(plan.from) + " to " + std::to_string(plan.to);
  if (plan.from < 0 || plan.from >= plan.to || in.p != in.end) throw std::invalid_argument(part);
  if (plan.from && !(plan.free.empty() && plan.fresh.empty() && plan.work.empty()))
    throw std::invalid_argument(part + " has work of its own");
}

void parse_section(int32_t kind, Reader in, Plan& plan) {
  switch (kind) {
    case kRows:
      return parse_rows(in, plan);
    case kPositions:
      return parse_positions(in, plan);
    case kCopies:
      return parse_copies(in, plan);
    case kStates:
      return parse_states(in, plan);
    case kSegments:
      return plan.segments.push_back(parse_places(in));
    case kPart:
      return parse_part(in, plan);
    case kImages:
      return plan.images.push_back(parse_places(in));
    default:
      throw std::invalid_argument("step plan: a section of kind " + std::to_string(kind) +
                                  ", which this version does not have");
  }
}

}  // namespace

Plan Plan::parse(std::string_view bytes, int groups) {
  if (bytes.empty() || bytes.size() % 4)
    throw std::invalid_argument("step plan: length must be a multiple of 4, got " + std::to_string(bytes.size()));
  std::vector<int32_t> copied;
  const int32_t* words = reinterpret_cast<const int32_t*>(bytes.data());
  if (reinterpret_cast<uintptr_t>(words) % alignof(int32_t)) {
    copied.resize(bytes.size() / 4);
    std::memcpy(copied.data(), bytes.data(), bytes.size());
    words = copied.data();
  }
  Reader in{words, words + bytes.size() / 4};
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
  for (int32_t i = 0; i < n_sections; i++) {
    const int32_t kind = in.next(), n_words = in.count("words of a section");
    parse_section(kind, {in.p, in.p + n_words}, plan);
    in.p += n_words;
  }
  if (in.p != in.end) throw std::invalid_argument("step plan: words left over at the end");
  for (GivenRows& given : plan.given)
    if (!copied.empty()) given.keep();
  return plan;
}

}  // namespace as
