#include "cuda/ops/aside.h"

#include <algorithm>

#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

// The tensors that launches read and write.
struct Use {
  std::set<int> reads, writes;

  void add(const OpNode& op) {
    reads.insert(op.inputs.begin(), op.inputs.end());
    writes.insert(op.outputs.begin(), op.outputs.end());
    if (op.outputs.empty() && !op.inputs.empty()) writes.insert(op.inputs[0]);  // in place
  }
};

bool meet(const std::set<int>& a, const std::set<int>& b) {
  return std::any_of(a.begin(), a.end(), [&](int tensor) { return b.count(tensor) > 0; });
}

// Whether both may run at the same time.
bool independent(const Use& a, const Use& b) {
  return !meet(a.writes, b.reads) && !meet(a.writes, b.writes) && !meet(a.reads, b.writes);
}

// A linear, with or without an activation, whose kernels of few rows use no scratch memory.
bool may_run_beside(const Binding& b, const LaunchedOps& ops) {
  const OpNode& op = b.ops[ops.first];
  if (!op.is(Op::linear) || !ops.also.empty() || ops.end != ops.begin + 1 || partial_of(b, ops.first)) return false;
  const Matrix& m = b.matrix(op);
  if (m.kind != Kind::dtype16 || m.order || !b.in(op).rows.tiles) return false;
  return ops.last == ops.first || (ops.last == ops.first + 1 && is_gated(b.ops, b.weights, ops.first));
}

// Whether kernels of this choice use memory that other launches use, too.
bool shares_memory(GemmAlgo algo) {
  return algo != GemmAlgo::mma && algo != GemmAlgo::gemv && algo != GemmAlgo::split_k;
}

}  // namespace

std::vector<Aside> asides_of(const Binding& b, const std::vector<LaunchedOps>& ops) {
  std::vector<Use> uses(ops.size());
  for (size_t i = 0; i < ops.size(); i++) {
    for (size_t op = ops[i].first; op <= ops[i].last; op++) uses[i].add(b.ops[op]);
    for (size_t op : ops[i].also) uses[i].add(b.ops[op]);
  }
  std::vector<Aside> asides;
  size_t free = 0;  // asides so far join before these
  for (size_t first = 0; first < ops.size(); first++) {
    size_t end = first;
    while (end < ops.size() && may_run_beside(b, ops[end])) end++;
    // The longest run that ends there and has something beside it.
    for (size_t begin = std::max(first, free); begin < end; begin++) {
      Use all;
      for (size_t op = ops[begin].first; op <= ops[end - 1].last; op++) all.add(b.ops[op]);
      size_t fork = begin, join = end;  // fork: one behind it
      while (fork > free && independent(all, uses[fork - 1])) fork--;
      while (join < ops.size() && independent(all, uses[join])) join++;
      if (!fork || join == ops.size() || (fork == begin && join == end)) continue;
      Aside found{ops[begin].begin, ops[end - 1].end, ops[fork - 1].end - 1, ops[join].begin, {}};
      for (size_t i = begin; i < end; i++) found.linears.push_back(ops[i].first);
      asides.push_back(std::move(found));
      free = join + 1;
      break;
    }
    first = std::max(first, end);
  }
  return asides;
}

void set_aside(const std::vector<Aside>& asides, const Binding& b, const std::vector<Launch>& sides,
               const std::function<bool()>& beside, std::vector<Launch>& launches) {
  const Device& device = b.workspace.device;
  for (const Aside& aside : asides) {
    std::vector<const GemmTable*> tables;
    for (size_t op : aside.linears) tables.push_back(b.tables.at(op));
    const auto runs = [=, ws = &b.workspace,
                       row_set = b.in(b.ops[aside.linears[0]]).row_set](const Workspace::Size& size) {
      const int rows = ws->rows_of(row_set, size);
      return rows && beside() && std::none_of(tables.begin(), tables.end(), [&](const GemmTable* table) {
               return shares_memory(table->at(rows).algo);
             });
    };
    for (size_t i = aside.begin; i < aside.end; i++)
      launches[i] = [=, here = std::move(launches[i]), there = sides[i]](const Workspace::Size& size) {
        runs(size) ? there(size) : here(size);
      };
    launches[aside.fork] = [=, &device, before = std::move(launches[aside.fork])](const Workspace::Size& size) {
      before(size);
      if (runs(size)) device.fork();
    };
    launches[aside.join] = [=, &device, after = std::move(launches[aside.join])](const Workspace::Size& size) {
      if (runs(size)) device.join();
      after(size);
    };
  }
}

}  // namespace as::cuda
