// Runs the op list of a model for one rank: all prompt chunks and single tokens of a step in one call.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "batch/plan.h"
#include "comm/window.h"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"
#include "cpu/pool.h"
#include "cpu/quantized.h"

namespace as {

enum class OpType {
  rotary_table,
  embedding,
  all_reduce,
  rms_norm,
  linear,
  head_norm,
  rope,
  span_attention,
  silu_mul,
  add,
  select_rows,
  sample
};

// Attributes of an op by name, as the graph gives them; read once, at add_op.
using Attributes = std::map<std::string, double>;

// What an op has cost.
struct Counters {
  long count = 0;
  double total = 0, least = 0, most = 0;  // seconds on thread 0
  double bytes = 0, operations = 0;       // in total
};

struct Op {
  OpType type;
  std::string name;
  std::vector<int> inputs, outputs, weights;
  Attributes attributes;
  int vocab_begin = 0, vocab_size = 0, layer = 0, offset = 0, heads = 0, head_dim = 0, rotary_dim = 0;
  float eps = 0;
  // Fusions (fusion.cpp)
  bool gated = false;   // linear: many rows are computed together with the silu_mul that follows
  bool normed = false;  // add: together with the rms_norm that follows
  int feeds = -1;       // rms_norm, gated linear: the linear whose rows it prepares
  int fed_by = -1;      // linear: the op that prepares its rows
  // profile
  Counters alone, fused;
};

// Geometry of attention, the same in every layer.
struct AttentionShape {
  int q_heads = 0, kv_heads = 0, head_dim = 0, padded_dim = 0, q_head_begin = 0, group = 1, kv_begin = 0;
  float scale = 1;
  bool operator==(const AttentionShape& o) const {
    return q_heads == o.q_heads && kv_heads == o.kv_heads && head_dim == o.head_dim && q_head_begin == o.q_head_begin &&
           group == o.group && kv_begin == o.kv_begin && scale == o.scale;
  }
};

struct Rotary {
  std::vector<float> inverse_frequencies;
  float attention_factor = 1;
  bool dynamic = false;
  double base = 0, factor = 1, original_max = 0;
  int dim = 0;
};

struct StepOutput {
  std::vector<SampleOutput> samples;  // rank 0
  std::vector<float> logits;          // [rows that sample, local vocabulary], if wanted
  int logit_width = 0;
};

// Bytes of a matrix of this layout: what is prefetched past its end included.
inline size_t matrix_bytes(const Packed& m) { return m.panels() * m.panel_bytes + 4096; }

class Executor {
 public:
  Executor(int rank, int world, std::shared_ptr<Window> window, std::vector<int> cpus, int threads);

  // group_size: of quantized formats, along in_features; 0: one group a row.
  int add_matrix(int out_features, int in_features, Format format, int group_size);
  // Copies `rows` rows of source (from source.column on) into rows source.row_offset... Returns how many NaN or Inf
  // they have.
  long fill_matrix(int id, const SourceRows& source, long rows);
  // The same from rows that are quantized already.
  void fill_quantized(int id, const StoredRows& source, long rows, long row_offset, long column);
  // Of all bytes that fill_matrix() has read into a matrix: the same with any number of threads and instruction set.
  uint64_t source_hash(int id) const { return matrices_.at(id).source_hash; }
  // Quantizes rows into plain arrays. Returns how many values are NaN or infinite.
  long quantize(const SourceRows& source, const QuantizedRows& out, long rows);
  int add_vector(std::vector<float> values);
  int add_tensor(int width, bool logit_rows);
  void add_op(const std::string& type, std::vector<int> inputs, std::vector<int> outputs, std::vector<int> weights,
              Attributes attributes);
  void allocate(int max_rows, int max_slots, int max_length, int layers, int kv_heads, int head_dim, int span_size,
                int num_spans, DType cache_dtype);
  StepOutput step(const std::string& plan, bool want_logits);
  // y [rows, out features] = x w^T (+ bias) by all threads: one matrix alone, for tests and microbenchmarks.
  void multiply(int id, const float* x, const float* bias, float* y, int rows);

  int out_features(int id) const { return matrices_.at(id).packed.n; }
  int in_features(int id) const { return matrices_.at(id).packed.k; }
  int group(int id) const { return matrices_.at(id).packed.group; }
  // out [in features]: a row of a matrix as its format recovers it.
  void read_row(int id, long row, float* out) const;

  const std::vector<Op>& ops() const { return ops_; }
  void set_profiling(bool on);  // on: counts anew; off: what was counted stays
  // Memory that attention takes for partial results and queries.
  static size_t attention_bytes(const SpanLayout& layout, int threads, int max_length);
  size_t weight_bytes() const;
  size_t cache_bytes() const { return cache_.size(); }
  std::vector<std::pair<const void*, size_t>> memory() const;  // weights and cache, to check where their pages are

 private:
  struct Matrix {
    Packed packed;
    uint64_t source_hash;
  };
  struct Tensor {
    int width;
    bool logit_rows;
    float* data = nullptr;
  };
  struct Slot {
    bool live = false;
    SamplingParams sampling;
    std::vector<int32_t> history, spans;
    int cached = 0;  // positions whose keys and values are in the cache
  };
  // What a plan would make of a slot: sizes only.
  struct Outlook {
    bool live;
    long history, spans;
    int cached;
  };
  struct Row {
    int slot, position, token;
  };
  // Query rows of one sequence that share a KV head: positions [position, position + positions), local q heads [head0,
  // head1).
  struct Tile {
    int slot, row, position, positions, kv_head, head0, head1, blocks;
    int pair = 0;         // with blocks shared out: its first
    bool shared = false;  // several threads have blocks of it
    int rows() const { return positions * (head1 - head0); }
    int context() const { return position + positions; }
  };
  // A tile's block, and what is kept of it for merging when threads share the tile.
  enum class Kept { nothing, block, run };
  struct Pair {
    int tile, block;
    Kept kept;
    int partial;
  };
  // Adjacent tiles of one sequence and the same heads.
  struct TileGroup {
    int first, count;
  };
  struct BlockSpans {
    const void *block[kBlockTokens / kKeyGroup], *next[kBlockTokens / kKeyGroup];
  };

  const Packed& checked_part(int id, long rows, long row_offset, long column, long columns, long group) const;
  // fusion.cpp
  void fuse();
  bool only_reader(int tensor, int writer, int reader) const;
  int within(const Op& op) const;
  size_t fed_bytes() const;
  void gated_linear(const Op& op, int thread);
  void add_norm(const Op& op, int thread);

  void plan_buffers();
  void check(const Plan& plan);
  void begin_step(const Plan& plan);
  void make_tiles(const Plan& plan);
  void run_op(Op& op, int thread);
  struct Share {
    int p0, p1, r0, r1;  // panels and rows
  };
  Share share_of(int thread, int panels, int rows) const;
  bool activations(int thread, const Packed& m, const float* x, int rows, const char* ready, Activations& a);
  const char* ready_rows(const Op& op) const;
  void multiply_on(int thread, const Packed& m, const float* x, const float* bias, float* y, int rows,
                   const char* ready);
  size_t prepared_bytes(const Packed& m, int rows) const;

  // ops.cpp
  void rotary_table(const Op& op, int thread);
  void embedding(const Op& op, int thread);
  void rms_norm(const Op& op, int thread);
  void norm_row(const Op& op, int row, int thread);
  void linear(const Op& op, int thread);
  void head_norm(const Op& op, int thread);
  void rope(const Op& op, int thread);
  void silu_mul(const Op& op, int thread);
  void add(const Op& op, int thread);
  void select_rows(const Op& op, int thread);
  // attention.cpp
  void span_attention(const Op& op, int thread);
  void write_cache(const Op& op, int thread);
  AttentionTile prepare_tile(const Op& op, const Tile& tile, char* queries) const;
  int block_spans(int layer, const Tile& tile, int block, const void** spans) const;
  BlockSpans spans_of(int layer, const Tile& tile, int block, const Tile& next, int next_block) const;
  void take_block(AttentionTile& a, const Tile& tile, int block, const BlockSpans& spans, bool cold,
                  float* partial) const;
  void merge_block(const Tile& tile, int block, int row0, int row1, const float* partial, float* result) const;
  void finish_rows(const Op& op, const Tile& tile, int row0, int row1, const float* result) const;
  void attend_groups(const Op& op, int thread);
  void attend_split(const Op& op, int thread);
  void share_pairs();
  void merge_ascending(const Tile& tile, int block, const float* partial, float* run, float* result) const;
  static size_t partials_bytes(const SpanLayout& layout, int threads, int max_length);
  char* span_address(int layer, int span, int kv_head) const;
  // profile.cpp
  void measure_attention(const Plan& plan);
  std::pair<double, double> cost(const Op& op) const;
  void record(Op& op, int within, double seconds) const;
  // sampling.cpp
  void sample(const Op& op, int thread);
  void exchange_samples(bool may_narrow);

  int rows_of(const Tensor& t) const { return t.logit_rows ? (int)logit_rows_.size() : (int)rows_.size(); }
  std::pair<int, int> my_rows(const Tensor& t, int thread) const { return part(rows_of(t), thread, pool_.size()); }
  const Tensor& in(const Op& op, int i = 0) const { return tensors_[op.inputs[i]]; }
  const Tensor& out(const Op& op) const { return tensors_[op.outputs[0]]; }

  int rank_, world_;
  std::shared_ptr<Window> window_;
  Pool pool_;
  const Kernels& k_;
  Arena weights_;
  std::vector<Matrix> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Tensor> tensors_;
  std::vector<Op> ops_;
  AttentionShape shape_;
  Rotary rotary_;
  bool profiling_ = false, allocated_ = false;

  int max_rows_ = 0, max_slots_ = 0, max_length_ = 0, layers_ = 0, span_size_ = 0, num_spans_ = 0;
  SpanLayout layout_;  // of one span, layer and KV head
  Buffer activations_, cache_, partials_;
  Buffer prepared_, gated_;   // rows as linears want them: made by themselves or a norm, and by a gated linear
  Buffer norms_;              // a row of each thread
  Buffer attention_scratch_;  // of each thread
  std::vector<float> cosine_, sine_;

  // of the current step
  std::vector<Slot> slots_;
  std::vector<Outlook> outlook_;  // of the slots that a plan names
  std::vector<Row> rows_;
  std::vector<int> logit_rows_;  // rows that sample
  std::vector<Tile> tiles_;
  std::vector<TileGroup> groups_;
  std::atomic<int> taken_groups_{0};
  bool split_blocks_ = false;  // few tiles: threads share out (tile, block) pairs
  std::vector<Pair> pairs_;
  std::vector<std::vector<uint8_t>> blobs_;
  struct WideRow {
    int row;
    Search search;
  };
  std::vector<WideRow> wide_;  // rows whose set is wider than the candidates
  StepOutput output_;
  bool want_logits_ = false;
  double attention_bytes_ = 0, attention_operations_ = 0;  // of one layer, while profiling
};

}  // namespace as
