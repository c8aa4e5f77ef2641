// rotary_table: cosines and sines of every row's position, in single precision as in transformers: angle = position *
// inverse frequency is rounded to float; the functions are exact.
//
// Dynamic NTK (modeling_rope_utils): the base grows with the length. A row's length is that of its prompt, or its own
// position + 1 once that is larger, so it does not depend on chunks. Qwen v1 uses the prompt's length alone. LongRoPE's
// long table is chosen by this length, but also by the length of the slot's initial history, because the scheduler
// restarts a sequence that grows beyond the original length.
#include <algorithm>
#include <stdexcept>

#include "common/exact.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

class RotaryTableOp : public RowOp {
 public:
  explicit RotaryTableOp(const Binding& b)
      : core_(b.core),
        inverse_(b.parts[0].weights.vector(b.parts[0].op.weights[0])),
        long_(b.parts[0].op.flag("long_table") ? &b.parts[0].weights.vector(b.parts[0].op.weights[1]) : nullptr),
        attention_factor_((float)b.parts[0].op.number("attention_factor")),
        dynamic_(b.parts[0].op.flag("dynamic")),
        powers_(std::string(b.parts[0].op.choice("growth")) == "powers"),
        base_(b.parts[0].op.number("base")),
        factor_(b.parts[0].op.number("factor")),
        original_max_(b.parts[0].op.number("original_max")),
        dim_(b.parts[0].op.integer("rotary_dim")),
        table_(std::make_shared<RotaryTable>()) {
    table_->number = b.parts[0].op.integer("table"), table_->half = dim_ / 2;
    table_->inverse = inverse_.data(), table_->attention_factor = attention_factor_;
    divide_pairs(b.parts[0].op);
    table_->cosine.resize((size_t)b.limits.max_rows * table_->half), table_->sine.resize(table_->cosine.size());
    b.rotary.push_back(table_);
  }

  int rows(const Batch& batch) const override { return (int)batch.rows.size(); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const int half = table_->half;
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    std::vector<float> grown(dynamic_ ? half : 0);
    int grown_length = -1;
    for (int r = r0; r < r1; r++) {
      const Row& row = batch.rows[r];
      const Slot& slot = batch.slot(row.slot);
      const float* inverse = inverse_.data();
      if (dynamic_ || long_) {
        const int prompt = long_ ? std::max(slot.sampling.prompt_len, slot.begun) : slot.sampling.prompt_len;
        const int length = powers_ ? prompt : std::max(prompt, row.position + 1);
        if (length > original_max_ && long_) {
          inverse = long_->data();
        } else if (length > original_max_) {
          if (length != grown_length) grow(length, grown.data());
          grown_length = length;
          inverse = grown.data();
        }
      }
      const int position[] = {slot.rotary_position(row.position, 0), slot.rotary_position(row.position, 1),
                              slot.rotary_position(row.position, 2)};
      for (int i = 0; i < half; i++) {
        const exact::Angle angle = exact::cos_sin((float)position[part_of_[i]] * inverse[i]);
        table_->cosine[(size_t)r * half + i] = (float)angle.cosine * attention_factor_;
        table_->sine[(size_t)r * half + i] = (float)angle.sine * attention_factor_;
      }
    }
  }

 private:
  // Says which part of a position turns each pair: the time, or, with sections, also height and width, which take turns
  // with it if they are interleaved.
  void divide_pairs(const OpNode& op) {
    part_of_.assign(table_->half, 0);
    const int sections[] = {op.integer("temporal"), op.integer("height"), op.integer("width")};
    for (int part = 0, i = 0; part < 3; i += sections[part++])
      for (int j = 0; j < sections[part]; j++)
        if (!op.flag("interleaved_sections")) part_of_[i + j] = (char)part;
        else if (part && part + 3 * j < table_->half) part_of_[part + 3 * j] = (char)part;
  }

  void grow(int length, float* inverse) const {
    double growth = factor_ * length / original_max_ - (factor_ - 1);
    if (powers_) {  // 2^(ceil(log2 of the ratio) + 1) - 1
      growth = 2;
      while (growth * original_max_ < 2.0 * length) growth *= 2;
      growth -= 1;
    }
    const double base = base_ * exact::pow(growth, (double)dim_ / (dim_ - 2));
    for (int i = 0; i < table_->half; i++)
      inverse[i] = 1.0f / (float)exact::pow(base, (double)((float)(2 * i) / (float)dim_));
  }

  const Core& core_;
  const std::vector<float>& inverse_;
  const std::vector<float>* const long_;  // may be null
  const float attention_factor_;
  const bool dynamic_, powers_;
  const double base_, factor_, original_max_;
  const int dim_;
  const std::shared_ptr<RotaryTable> table_;
  std::vector<char> part_of_;  // of each pair
};

}  // namespace

void RotaryTable::angles(int position, float* cosines, float* sines) const {
  for (int i = 0; i < half; i++) {
    const exact::Angle angle = exact::cos_sin((float)position * inverse[i]);
    cosines[i] = (float)angle.cosine * attention_factor, sines[i] = (float)angle.sine * attention_factor;
  }
}

std::shared_ptr<RotaryTable> rotary_table(const Binding& b, int number) {
  for (const auto& table : b.rotary)
    if (table->number == number) return table;
  throw std::invalid_argument("no rotary table " + std::to_string(number));
}

const RegisterCpuOp kRotaryTable({{Op::rotary_table}}, bind_op<RotaryTableOp>);

}  // namespace as
