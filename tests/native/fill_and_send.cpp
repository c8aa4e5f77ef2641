// Items are filled by several threads and sent in order, each when all of its group are filled, and none is filled
// again before what was in its place is sent. A failure of any part ends it.
#include <atomic>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/memory/host_threads.h"

namespace {

struct Case {
  int count, group, rooms, threads;
  int bad_fill = -1, bad_send = -1;
};

// What was sent, group by group. delay: calls of sent() until a group is.
std::vector<int> run(const Case& c, int delay) {
  std::vector<int> place(c.group * c.rooms, -1), out;  // not atomic: ThreadSanitizer checks that it need not be
  int begun = 0, ended = 0, calls = 0;
  as::cuda::fill_and_send(
      c.count, c.group, c.rooms, c.threads,
      [&](int i) {
        if (i == c.bad_fill) throw std::runtime_error("item " + std::to_string(i));
        place[i % place.size()] = i;
      },
      [&](int g) {
        if (g == c.bad_send) throw std::runtime_error("group " + std::to_string(g));
        if (g != begun++) throw std::logic_error("groups are not sent in order");
      },
      [&](int g) {
        if (g != ended || g >= begun) throw std::logic_error("sent() of a group that is not the next one");
        if (calls++ % (delay + 1) < delay) return false;
        // Only now is it read: it must still be there.
        for (int i = g * c.group; i < std::min(c.count, (g + 1) * c.group); i++) out.push_back(place[i % place.size()]);
        ended++;
        return true;
      });
  for (int i = ended * c.group; i < c.count; i++) out.push_back(place[i % place.size()]);
  return out;
}

std::string error_of(const Case& c) {
  try {
    run(c, 1);
  } catch (const std::runtime_error& error) { return error.what(); }
  return "";
}

}  // namespace

int main() {
  std::minstd_rand random(1);
  const auto one_of = [&](int most) { return 1 + (int)(random() % most); };
  for (int round = 0; round < 300; round++) {
    const Case c{one_of(200), one_of(9), one_of(5), one_of(5)};
    const std::vector<int> out = run(c, (int)(random() % 3));
    bool right = (int)out.size() == c.count;
    for (int i = 0; right && i < c.count; i++) right = out[i] == i;
    if (!right) return std::printf("%d items in groups of %d\n", c.count, c.group), 1;
    Case bad = c;
    bad.bad_fill = (int)(random() % c.count);
    if (error_of(bad) != "item " + std::to_string(bad.bad_fill)) return std::printf("a failed item\n"), 1;
    bad.bad_fill = -1, bad.bad_send = (int)(random() % ((c.count + c.group - 1) / c.group));
    if (error_of(bad) != "group " + std::to_string(bad.bad_send)) return std::printf("a failed group\n"), 1;
  }
  run({0, 4, 4, 3}, 0);
}
