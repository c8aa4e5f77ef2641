// compress: keeps a step's rows, and the entries of the positions that the step completes.
//
// An entry's rows come from the step or, if earlier steps had them, from the cache, where they lie in float32: so its
// bits do not depend on where a prompt was cut. Drafts may complete an entry that is computed anew once other rows have
// taken their place; no row sees it before.
#include <algorithm>

#include "cpu/ops/entries.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

class Compress : public BoundOp {
 public:
  explicit Compress(const Binding& b)
      : core_(b.core),
        in_(b.parts[0].in()),
        bias_(b.parts[0].vector(0)),
        norm_(b.parts[0].op.weights.size() > 1 ? b.parts[0].vector(1) : nullptr),
        eps_((float)b.parts[0].op.number("eps")),
        parts_(b.parts[0].op.flag("overlapping") ? 2 : 1),
        rate_(b.parts[0].op.integer("rate")),
        dim_(in_.width / (2 * parts_)),
        table_(b.parts[0].op.integer("rotary_dim") ? rotary_table(b, b.parts[0].op.integer("table")) : nullptr),
        rows_group_(b.parts[0].op.integer("rows_group")),
        rows_(b.cache.layer(rows_group_, b.parts[0].op.integer("rows_layer"))),
        entries_{b.cache.layer(b.parts[0].op.integer("cache_group"), b.parts[0].op.integer("layer")),
                 b.parts[0].op.integer("cache_group"), rate_, rows_.layout.span_size} {}

  void begin(const Batch& batch) override {
    completed_.clear();
    for (const Item& item : batch.items)
      for (int e = item.start / rate_; (e + 1) * rate_ <= item.start + item.count; e++)
        completed_.push_back({&item, e});
  }

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = part((int)batch.rows.size(), thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      const Row& row = batch.rows[r];
      write_latent(rows_.layout, span_of(batch, row.slot, row.position), row.position % rows_.layout.span_size,
                   in_.row(r));
    }
    const auto [e0, e1] = part((int)completed_.size(), thread, core_.pool.size());
    if (e0 == e1) return;  // as in most steps that decode
    Own own(*this);
    for (int i = e0; i < e1; i++) complete(batch, *completed_[i].item, completed_[i].entry, own);
  }

 private:
  struct Completed {
    const Item* item;
    int entry;
  };

  // Memory of a thread.
  struct Own {
    std::vector<const float*> values, gates, bias;
    std::vector<float> entry, cosine, sine;
    explicit Own(const Compress& op)
        : values(op.parts_ * op.rate_),
          gates(values.size()),
          bias(values.size()),
          entry(op.dim_),
          cosine(op.table_ ? op.table_->half : 0),
          sine(cosine.size()) {}
  };

  char* span_of(const Batch& batch, int slot, int position) const {
    return rows_.span(batch.slot(slot).spans[rows_group_][position / rows_.layout.span_size], 0);
  }

  const float* row_of(const Batch& batch, const Item& item, int position) const {
    if (position >= item.start) return in_.row(item.row + position - item.start);
    return reinterpret_cast<const float*>(span_of(batch, item.slot, position) +
                                          position % rows_.layout.span_size * rows_.layout.row_bytes);
  }

  void complete(const Batch& batch, const Item& item, int entry, Own& own) const {
    const int first = entry * rate_, width = parts_ * dim_;
    int count = 0;
    // The first halves of the positions before, if there are some; then the entry's own positions.
    for (int p = std::max(0, first - (parts_ - 1) * rate_); p < first + rate_; p++, count++) {
      const int column = p < first ? 0 : (parts_ - 1) * dim_;
      const float* row = row_of(batch, item, p);
      own.values[count] = row + column, own.gates[count] = row + width + column;
      own.bias[count] = bias_ + (size_t)(p % rate_) * width + column;
    }
    float* y = own.entry.data();
    core_.k.softmax_pool(own.values.data(), own.gates.data(), own.bias.data(), count, y, dim_);
    if (norm_) core_.k.rms_norm(y, norm_, y, dim_, eps_);
    if (table_) {
      table_->angles(first, own.cosine.data(), own.sine.data());
      core_.k.rope_interleaved(y + dim_ - 2 * table_->half, own.cosine.data(), own.sine.data(), table_->half);
    }
    write_latent(entries_.cache.layout, entries_.row(batch.slot(item.slot), entry), 0, y);
  }

  const Core& core_;
  const Tensor in_;
  const float* const bias_;  // [rate, width of gates]
  const float* const norm_;  // null: none
  const float eps_;
  const int parts_, rate_, dim_;              // parts_: 2 if entries overlap
  const std::shared_ptr<RotaryTable> table_;  // null: entries are not rotated
  const int rows_group_;
  const LayerCache rows_;
  const EntryCache entries_;
  std::vector<Completed> completed_;  // by this step
};

}  // namespace

const RegisterCpuOp kCompress({{Op::compress}}, bind_op<Compress>);

}  // namespace as
