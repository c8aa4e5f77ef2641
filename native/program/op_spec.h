// The ops of programs: an enumeration and a table of specs, both made from the rows of op_table.h. The checks of
// programs, Python's graphs, .asgraph files and the profiler's costs read the specs. A backend binds each op to its
// kernels, or rejects it by name. A new op is one row of op_table.h.
#pragma once
#include <string>
#include <vector>

namespace as {

class Program;
struct OpNode;

enum class Op {
#define OP(name, ...) name,
#include "program/op_table.h"
#undef OP
};

enum class AttributeType { integer, number, flag, choice };

// Who gives an attribute: the model (the same on every rank), lowering for each rank (heads and columns counted in the
// rank's own buffers), or a graph of the whole model alone, for lowering to replace.
enum class Scope { model, rank, graph };

// How lowering computes an attribute of Scope::rank. Columns are those that the rank holds of the first input's blocks
// [block, block + blocks); attributes `block` and `blocks` of the op, where it has them, replace the spec's.
enum class RankRule {
  none,
  offset,      // columns before the blocks
  width,       // columns of the blocks
  heads,       // width / head_dim
  begin,       // of the block, counted in the whole model's columns
  head_begin,  // begin / head_dim
  own_offset,  // as offset and width, without the heads that the rank before holds too
  own_width,
  weight_begin,  // the first row of the first weight that the rank holds
  experts,       // how many of a stack's experts the rank holds
  expert_begin,  // and the first of them
};

constexpr int kLargestCount = 1 << 24;  // counts, widths and positions of any model; products of two fit 64 bits

struct AttributeSpec {
  const char* name;
  AttributeType type;
  Scope scope;
  bool required;
  double otherwise;          // default; of a choice, its index
  const char* otherwise_as;  // or the attribute of the same op that gives the default, null: none
  double least, most;        // of integers and numbers
  std::vector<const char*> choices;
  RankRule rule = RankRule::none;
  int block = 0, blocks = 1;
};

// Rows of an op's outputs.
enum class RowRule {
  none,      // it has no outputs
  as_input,  // the first input's
  all,       // all rows of the step
  selected,  // rows with outputs, of an input with all rows
  routed,    // a row set that the op forms: so many entries for each row of the input
  expanded,  // a row set that was formed of the input's rows, or is the input's
  combined,  // the rows that the first input's row set was formed of
};

// What a step works on, for costs. Attention's counts are those of one op: they depend on its window.
struct StepSize {
  double rows = 0, outputs = 0;      // of the step; with outputs
  double seen = 0, context = 0;      // pairs of a query row and a position that it sees; positions in the cache seen
  double position_bytes = 0;         // of the cache: a position's keys and values in one KV head
  double world = 1;                  // ranks
  std::vector<double> weight_bytes;  // as the backend holds them, by weight; empty: as the encoding has them
};

struct Cost {
  double bytes = 0;       // read or written at least once, wherever they are
  double operations = 0;  // additions, multiplications, divisions and exponentials
};

struct Arity {
  int least, most;
};

struct OpSpec {
  Op op;
  const char* name;
  Arity inputs, outputs, weights;
  bool in_place;  // the output is the first input, and may be left out
  RowRule rows;
  std::vector<AttributeSpec> attributes;
  // The shape rule; throws std::invalid_argument. Arity, rows and attributes are checked before.
  void (*check)(const Program& program, const OpNode& op);
  Cost (*cost)(const Program& program, const OpNode& op, const StepSize& size);

  int attribute(const std::string& name) const;  // index, or -1
};

// Of every op, in the order of the enumeration.
const std::vector<OpSpec>& op_specs();
// Throws std::invalid_argument for an op that there is not.
const OpSpec& op_spec(const std::string& name);

const char* name_of(AttributeType type);
const char* name_of(Scope scope);
const char* name_of(RowRule rule);
const char* name_of(RankRule rule);

}  // namespace as
