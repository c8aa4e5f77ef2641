// The choice of a kernel for a GEMM or an attention on a chip. Pure functions choose by format, shape, rows and chip
// and need no GPU. Compiling a program makes a table of their results. All kernels of a format give the same bits.
#pragma once
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/chip.h"
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

// The properties of a linear that the choice depends on.
struct Gemm {
  Matrix w;
  bool writes_16_bytes = true;  // rows of the output can be written 16 bytes at a time
  bool gated = false;           // gate and up columns
  bool normed = false;          // a norm precedes it
  bool fuses = false;           // its kernel may norm the single row of a step, or quantize it to 8 bits
  bool pushed = false;          // its 16-bit partial sums of few rows go to another GPU, too
  bool few_columns = false;     // logits of experts or gates of rows: float32, few columns
  bool long_rows = false;       // products of residual streams: float32, few columns of long rows
};
// The properties of a product that is not normed or pushed.
Gemm gemm_of(const GemmArgs& p);

struct GemmChoice {
  GemmAlgo algo = GemmAlgo::simt;
  bool fused = false;  // the kernel itself norms or quantizes the single row, long_k all rows

  bool operator==(const GemmChoice& other) const { return algo == other.algo && fused == other.fused; }
};
// wanted: `any`, or for tests a kernel. If it cannot compute the GEMM, the nearest one that can is chosen.
GemmChoice choose_gemm(const Chip& chip, const Gemm& gemm, int rows, GemmAlgo wanted = GemmAlgo::any);

// The choice for a stack of experts: the kernel, and how many of an expert's entries (its rows) form a tile.
struct ExpertChoice {
  GemmAlgo algo = GemmAlgo::simt;
  int tile_rows = 0;

  bool operator==(const ExpertChoice& other) const { return algo == other.algo && tile_rows == other.tile_rows; }
};
ExpertChoice choose_expert_gemm(const Chip& chip, Kind kind, int entries, int experts, GemmAlgo wanted = GemmAlgo::any,
                                int tile_rows = 0);
// Whether a layer's two matrices have special kernels for a step of one row.
bool has_expert_gemv(const Chip& chip, const Matrix& up, const Matrix& down);

// biased: with ALiBi slopes.
AttentionChoice choose_attention(const Chip& chip, CacheType type, int head_dim, bool biased);

// mma for rows of kLatentDim + kLatentRope features of 16 bits, otherwise simt.
AttentionAlgo choose_latent_attention(const Chip& chip, CacheType type, int latent_dim, int rope_dim);
// The same for rows of kLatentDim features.
AttentionAlgo choose_compressed_attention(const Chip& chip, CacheType type, int head_dim);

// Choices by number of rows. Each range ends at `last` (INT_MAX: no limit).
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

  // Returned references stay valid.
  const GemmTable& gemm(const Gemm& gemm);
  const ExpertTable& experts(const Matrix& stack);
  AttentionChoice attention(const LayerCache& cache, int group, bool biased);
  AttentionAlgo latent_attention(const LayerCache& cache, int group);
  AttentionAlgo compressed_attention(const LayerCache& cache, int group);

  // A row for display: op, format and shape, first and last row (0: no limit), kernel.
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
  std::list<std::pair<std::string, AttentionAlgo>> latents_, compressed_;
};
std::vector<KernelTable::Row> rows_of(const Gemm& gemm, const GemmTable& table);

const char* name_of(GemmAlgo algo);
const char* name_of(AttentionAlgo algo);
// Throws std::invalid_argument for an unknown name.
GemmAlgo gemm_algo_of(const std::string& name);
std::string format_of(const Matrix& matrix);  // as add_matrix() takes it

}  // namespace as::cuda
