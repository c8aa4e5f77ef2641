// Launches beside others: a linear whose result is needed only later, such as those of a shared expert or of a gate,
// runs on a stream of its own while other launches go on. With few rows these wait for memory or for each other most of
// the time.
#pragma once
#include <vector>

#include "cuda/ops/ops.h"

namespace as::cuda {

// The ops that some adjacent launches compute: [first, last], and others, which may have launches of their own for
// other numbers of rows.
struct LaunchedOps {
  size_t first, last;
  std::vector<size_t> also;
  size_t begin, end;  // launches
};

// Launches [begin, end), of linears, need nothing that is written after launch `fork`, and launch `join` is the first
// one that needs them. None between the two writes what they read, or uses what they write.
struct Aside {
  size_t begin, end, fork, join;
  std::vector<size_t> linears;  // their ops
};
// Those that can run beside at least one other launch, in ascending order; they do not overlap. ops: all, in order.
std::vector<Aside> asides_of(const Binding& b, const std::vector<LaunchedOps>& ops);

// Makes launches of a form run beside others in steps for which `beside` says so. sides: the same launches bound to the
// second stream of the device.
void set_aside(const std::vector<Aside>& asides, const Binding& b, const std::vector<Launch>& sides,
               const std::function<bool()>& beside, std::vector<Launch>& launches);

}  // namespace as::cuda
