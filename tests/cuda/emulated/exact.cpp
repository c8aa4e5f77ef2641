// The exact kernels (native/cuda/kernels/exact) on the CPU, on the cases of a file (tests/support/exact_cases.py).
// Ends with 1, and says why, if there is a difference.
#include "cuda/kernels/exact/gemm_exact.cu"
#include "cuda/kernels/exact/gemm_exact_e2m1.cu"
#include "cuda/kernels/exact/gemm_exact_int4.cu"
#include "cuda/kernels/exact/gemm_exact_int8.cu"
#include "cuda/kernels/exact/gemm_exact_w4a8.cu"
#include "cuda/kernels/exact/gemm_exact_w8a8.cu"
#include "cuda/kernels/exact/quantize_exact.cu"
#include "support/exact_cases.h"

int main(int count, char** arguments) {
  using namespace exact_cases;
  std::FILE* file = count == 2 ? std::fopen(arguments[1], "rb") : nullptr;
  if (!file) return 2;
  size_t wrong = 0;
  int cases = 0;
  for (Case c; read(file, c); cases++) {
    Entries entries(c);
    ExactGemm p;
    p.w = exact_matrix(c.packed(), c.order.empty() ? nullptr : c.order.data());
    std::vector<const char*> experts;
    for (int e = 0; e < c.head.experts; e++) experts.push_back(c.panels.data() + e * p.w.bytes);
    std::vector<char> rows(exact_rows_bytes(p.w, c.entries()) + 16);
    char* memory = rows.data() + (16 - (uintptr_t)rows.data() % 16) % 16;
    p.x = exact_rows(memory, p.w, c.entries());
    quantize_exact(p.w, c.x.data(), c.head.gathers ? c.head.rows : c.entries(), p.x, {});
    int tiles = (int)entries.tiles.size();
    entries.tiles.resize(std::max(tiles, c.entries()));  // CTAs without a tile read one before they end
    p.routing.end = c.head.experts, p.routing.top = c.head.top, p.routing.row_of = entries.row_of.data();
    p.routing.tiles = entries.tiles.data(), p.routing.tile_count = &tiles;
    p.experts = experts.data(), p.bias = c.bias.empty() ? nullptr : c.bias.data(), p.gathers = c.head.gathers;
    p.gate = (ExactGate)c.head.gate, p.alpha = c.head.alpha, p.limit = c.head.limit;
    for (const int at_most : {kExactPairs, kExactFew, kExactFew + 1}) {  // all kernels
      p.rows = at_most;
      std::vector<float> y((size_t)c.entries() * c.width(), 77.0f);
      p.y = y.data();
      if (cases % 2) {  // one expert at a time
        for (int e = 0; e < c.head.experts; e++) {
          p.adjacent = experts[e], p.first = e, p.end = e + 1;
          gemm_exact(p, c.entries(), {});
        }
      } else {
        gemm_exact(p, c.entries(), {});
      }
      const size_t found = differences(c, entries, y.data());
      if (found) std::printf("%s: %zu of %zu values differ\n", c.name.c_str(), found, y.size());
      wrong += found;
    }
  }
  std::printf("%d cases, %zu differences\n", cases, wrong);
  return wrong > 0 || cases == 0;
}
