#include "cuda/step/warm_up.h"

#include <algorithm>
#include <set>

#include "cuda/expert_stream.h"

namespace as::cuda {
namespace {

// The numbers of rows from which on some op has another kernel; for several ranks powers of two, because those numbers
// depend on a rank's share, which may be uneven, and all ranks run steps of the same sizes.
std::set<int> kernel_borders(const Workspace& workspace, bool several_ranks) {
  const Limits& limits = workspace.limits;
  const int most = (int)std::min((int64_t)limits.max_rows, (int64_t)limits.max_slots * limits.max_length);
  std::set<int> borders{1};
  if (several_ranks) {
    for (int rows = 2; rows < most; rows *= 2) borders.insert(rows);
    borders.insert(most);
    return borders;
  }
  if (const ExpertStream* stream = workspace.experts ? workspace.experts->stream() : nullptr)
    if (stream->takes(most)) borders.insert(stream->first_rows());
  for (const KernelTable::Row& row : workspace.kernels.rows()) {
    if (row.op != "expert_linear") {
      borders.insert(std::clamp(row.first, 1, most));
      continue;
    }
    for (const auto& [set, entries] : workspace.expert_rows)
      borders.insert(std::clamp((row.first + entries.routing.top - 1) / entries.routing.top, 1, most));
  }
  return borders;
}

}  // namespace

std::vector<Workspace::Size> warm_up_sizes(const Workspace& workspace, bool adapted, bool several_ranks) {
  const Limits& limits = workspace.limits;
  std::vector<Workspace::Size> sizes;
  const auto in_forms = [&](Workspace::Size size) {
    for (int form = 0; form <= (int)adapted; form++) size.adapted = form, sizes.push_back(size);
  };
  for (int rows : kernel_borders(workspace, several_ranks)) in_forms({rows, std::min(rows, limits.max_outputs), 0, 1});
  if (!workspace.samples()) return sizes;
  in_forms({1, 1, 1, 1, workspace.max_splits > 1 ? 2 : 1});  // of both kinds of tiles
  const int most = limits.most_padded_rows();
  for (int rows = 1, padded; rows <= most; rows = padded + 1) {
    padded = padded_rows(rows, most);
    for (int splits = 1; splits <= std::min(workspace.max_splits, 2); splits++)
      in_forms({padded, padded, padded, 0, splits});
  }
  return sizes;
}

}  // namespace as::cuda
