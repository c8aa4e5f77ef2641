#include "cpu/adapters.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/kernels/lora.h"
#include "cpu/weights.h"

namespace as {

namespace {

Packed layout_of(int rows, int columns, int panel, Format format) {
  return layout(rows, columns, {panel, false}, format, 0);
}

}  // namespace

size_t adapter_bytes(int rank, int inputs, int columns, Format format) {
  return matrix_bytes(layout_of(rank, inputs, lora_kernels().a_panel(), format)) +
         matrix_bytes(layout_of(columns, rank, lora_kernels().b_panel(), format));
}

Adapter::Adapter(const AdapterLimits& limits, int targets) : limits_(limits) {
  if (targets < 1 || limits.count < 1) throw std::invalid_argument("the model was allocated without adapters");
  pairs_.resize(targets);
}

Packed Adapter::packed(const SourceRows& source, int rows, int panel) {
  Packed m = layout_of(rows, (int)source.columns, panel, limits_.format);
  m.data = arena_.take(matrix_bytes(m), "an adapter");
  return m;
}

int64_t Adapter::set(int target, const SourceRows& a, int rank, const SourceRows& b, int columns, float scale) {
  if (target < 0 || target >= targets() || pairs_[target].a.k)
    throw std::invalid_argument("adapter: target " + std::to_string(target) + " of " + std::to_string(targets()) +
                                " does not exist or has its matrices already");
  if (a.step != 1 || b.step != 1) throw std::invalid_argument("adapter: columns must be adjacent in memory");
  if (rank < 1 || rank > limits_.max_rank || b.columns != rank || columns < 1 || a.columns < 1)
    throw std::invalid_argument("adapter: matrices of " + std::to_string(rank) + " x " + std::to_string(a.columns) +
                                " and " + std::to_string(columns) + " x " + std::to_string(b.columns) +
                                "; ranks are at most " + std::to_string(limits_.max_rank));
  pairs_[target] = {packed(a, rank, lora_kernels().a_panel()), packed(b, columns, lora_kernels().b_panel()), scale};
  return pack_floats(pairs_[target].a, a, 0, rank) + pack_floats(pairs_[target].b, b, 0, columns);
}

bool Adapters::begin(const Batch& batch) {
  for (AdaptedRows* set : {&all, &outputs}) set->rows.clear(), set->groups.clear();
  if (std::all_of(batch.items.begin(), batch.items.end(), [](const Item& item) { return item.adapter < 0; }))
    return false;
  std::vector<char> seen(loaded_.size());
  all.of_row.assign(batch.rows.size(), nullptr), outputs.of_row.assign(batch.outputs.size(), nullptr);
  for (const Item& first : batch.items) {
    if (first.adapter < 0 || seen.at(first.adapter)++) continue;
    const Adapter* adapter = loaded_[first.adapter].get();  // not null: the plan was checked
    const auto collect = [&](AdaptedRows& set, int Item::* begin, int Item::* count) {
      AdaptedRows::Group group{adapter, (int)set.rows.size(), 0};
      for (const Item& item : batch.items)
        for (int i = 0; item.adapter == first.adapter && i < item.*count; i++) set.rows.push_back(item.*begin + i);
      group.count = (int)set.rows.size() - group.begin;
      for (int i = 0; i < group.count; i++) set.of_row[set.rows[group.begin + i]] = adapter;
      if (group.count) set.groups.push_back(group);
    };
    collect(all, &Item::row, &Item::count);
    collect(outputs, &Item::output, &Item::outputs);
  }
  return !all.groups.empty();
}

}  // namespace as
