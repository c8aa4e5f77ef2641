// Which kernel serves a GEMM or an attention on a chip: pure functions of format, shape, rows and chip, which need no
// GPU, and a table of their results that is made when a program is compiled. All kernels of a format give the same
// bits.
#pragma once
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/chip.h"
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

// A linear, as the choice depends on it.
struct Gemm {
  Matrix w;
  bool writes_16_bytes = true;  // rows of the output can be written 16 bytes at a time
  bool normed = false;          // a norm comes before it
  bool fuses = false;           // its kernel may norm, or quantize to 8 bits, the single row of a step itself
  bool pushed = false;          // its 16-bit partial sums of few rows go to another GPU, too
  bool few_columns = false;     // logits of experts or gates of rows: float32, of few columns
};
// The GEMM of a product that is not normed or pushed.
Gemm gemm_of(const GemmArgs& p);

struct GemmChoice {
  GemmAlgo algo = GemmAlgo::simt;
  bool fused = false;  // the kernel norms, or quantizes, the single row itself

  bool operator==(const GemmChoice& other) const { return algo == other.algo && fused == other.fused; }
};
// wanted: `any`, or for tests a kernel; if that does not serve the GEMM, the nearest one that does.
GemmChoice choose_gemm(const Chip& chip, const Gemm& gemm, int rows, GemmAlgo wanted = GemmAlgo::any);

// GEMMs of a stack of experts: the kernel, and how many entries (visits of rows to experts) of an expert form a tile.
struct ExpertChoice {
  GemmAlgo algo = GemmAlgo::simt;
  int tile_rows = 0;

  bool operator==(const ExpertChoice& other) const { return algo == other.algo && tile_rows == other.tile_rows; }
};
ExpertChoice choose_expert_gemm(const Chip& chip, Kind kind, int entries, int experts, GemmAlgo wanted = GemmAlgo::any,
                                int tile_rows = 0);
// Whether a step of one row has kernels of its own for a layer's two matrices.
bool has_expert_gemv(const Chip& chip, const Matrix& up, const Matrix& down);

// biased: with ALiBi slopes or sinks. group: query heads of a KV head.
AttentionChoice choose_attention(const Chip& chip, CacheType type, int head_dim, int group, bool biased);

// Choices by number of rows, in ranges that end at `last` (INT_MAX: of all that follow).
template <typename Choice>
struct RowRanges {
  struct Range {
    int last;
    Choice choice;
  };
  std::vector<Range> ranges;

  const Choice& at(int rows) const {
    size_t i = 0;
    while (rows > ranges[i].last) i++;
    return ranges[i].choice;
  }
};
using GemmTable = RowRanges<GemmChoice>;
GemmTable gemm_table(const Chip& chip, const Gemm& gemm);
using ExpertTable = RowRanges<ExpertChoice>;  // by entries
ExpertTable expert_table(const Chip& chip, Kind kind, int experts);

// The kernels of a compiled program: one table for each GEMM and attention that differs from the others.
class KernelTable {
 public:
  explicit KernelTable(const Chip& chip) : chip(chip) {}

  // References stay valid.
  const GemmTable& gemm(const Gemm& gemm);
  const ExpertTable& experts(const Matrix& stack);
  AttentionChoice attention(const LayerCache& cache, int group, bool biased);

  // For people: op, format and shape, first and last row (0: no limit), kernel.
  struct Row {
    std::string op, shape;
    int first, last;
    std::string kernel;
  };
  std::vector<Row> rows() const;

  const Chip chip;

 private:
  std::list<std::pair<Gemm, GemmTable>> gemms_;
  std::list<std::pair<Matrix, ExpertTable>> experts_;
  std::list<std::pair<std::string, AttentionChoice>> attentions_;
};
std::vector<KernelTable::Row> rows_of(const Gemm& gemm, const GemmTable& table);

const char* name_of(GemmAlgo algo);
const char* name_of(AttentionAlgo algo);
// Throws std::invalid_argument for a name that there is not.
GemmAlgo gemm_algo_of(const std::string& name);
std::string format_of(const Matrix& matrix);  // as add_matrix() takes it

}  // namespace as::cuda
