// Layers of experts for the exact kernels, as tests/support/exact_cases.py writes them to a file.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels/exact/exact.h"

namespace exact_cases {

using namespace as;
using namespace as::cuda;

struct Case {
  // In the order of the file.
  struct Head {
    int format, n, k, panel, group, scales, zeros, super_group, scale_bits, center, inputs;
    int experts, rows, top, gathers, gate, has_bias, has_order;
    float alpha, limit;
  } head;
  std::string name;
  std::vector<char> panels;  // of all experts
  std::vector<float> x, bias, wanted;
  std::vector<int> chosen, order;

  int entries() const { return head.rows * head.top; }
  int width() const { return head.gate ? head.n / 2 : head.n; }
  Packed packed() const {
    ScaleLayout scaling;
    scaling.scales = (ScaleType)head.scales, scaling.zeros = (ZeroType)head.zeros;
    scaling.super_group = head.super_group, scaling.scale_bits = head.scale_bits, scaling.center = head.center;
    return layout(head.n, head.k, {head.panel, false}, (Format)head.format, head.group, scaling, head.inputs);
  }
};

template <typename T>
void read(std::FILE* file, std::vector<T>& to, size_t count) {
  to.resize(count);
  if (count && std::fread(to.data(), sizeof(T), count, file) != count) std::fprintf(stderr, "a short file\n"), exit(2);
}

// Returns false at the file's end.
inline bool read(std::FILE* file, Case& c) {
  char name[64];
  if (std::fread(name, sizeof name, 1, file) != 1) return false;
  c.name = name;
  std::vector<Case::Head> head;
  read(file, head, 1);
  c.head = head[0];
  const Case::Head& h = c.head;
  const Packed m = c.packed();
  read(file, c.panels, (size_t)h.experts * m.panels() * m.panel_bytes);
  read(file, c.x, (size_t)(h.gathers ? h.rows : c.entries()) * h.inputs);
  read(file, c.chosen, c.entries());
  read(file, c.bias, h.has_bias ? (size_t)h.experts * h.n : 0);
  read(file, c.order, h.has_order ? h.k : 0);
  read(file, c.wanted, (size_t)c.entries() * c.width());
  return true;
}

// Entries by expert, as group_entries() makes them. entry_of: [rows, top].
struct Entries {
  std::vector<int> entry_of, row_of;
  std::vector<ExpertTile> tiles;

  explicit Entries(const Case& c) : entry_of(c.entries()), row_of(c.entries()) {
    int next = 0;
    for (int e = 0; e < c.head.experts; e++) {
      const int first = next;
      for (int i = 0; i < c.entries(); i++)
        if (c.chosen[i] == e) entry_of[i] = next, row_of[next++] = i / c.head.top;
      for (int at = first; at < next; at += kExactTile) tiles.push_back({e, at, std::min(kExactTile, next - at)});
    }
  }
};

// Compares y [entries, width] with what is wanted, of each row's experts. Returns the number of differences.
inline size_t differences(const Case& c, const Entries& entries, const float* y) {
  size_t wrong = 0;
  const int width = c.width();
  for (int i = 0; i < c.entries(); i++)
    for (int j = 0; j < width; j++) {
      const float found = y[(size_t)entries.entry_of[i] * width + j], wanted = c.wanted[(size_t)i * width + j];
      const bool same = wanted != wanted ? found != found : std::memcmp(&found, &wanted, 4) == 0;
      if (!same && ++wrong <= 3)
        std::printf("%s: row %d, expert %d, column %d: %a instead of %a\n", c.name.c_str(), i / c.head.top, c.chosen[i],
                    j, found, wanted);
    }
  return wrong;
}

}  // namespace exact_cases
