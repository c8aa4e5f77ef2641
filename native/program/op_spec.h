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

// Who sets an attribute. model: the model, with the same value on every rank. rank: lowering, for each rank, in the
// rank's own columns and heads. graph: the whole model's graph; lowering replaces it.
enum class Scope { model, rank, graph };

// How lowering computes an attribute of Scope::rank. It counts the columns that the rank holds of the first input's
// blocks [block, block + blocks). If the op has attributes `block` and `blocks`, these replace the spec's.
enum class RankRule {
  none,
  offset,      // columns before the blocks
  width,       // columns of the blocks
  heads,       // width / head_dim
  begin,       // of the block, in columns of the whole model
  head_begin,  // begin / head_dim
  own_offset,  // offset and width, without the heads that the previous rank holds too
  own_width,
  weight_begin,  // the first row of the first weight that the rank holds
  experts,       // how many of the stack's experts the rank holds
  expert_begin,  // the first of them
};

constexpr int kLargestCount = 1 << 24;  // limit of counts, widths and positions; the product of two fits 64 bits

struct AttributeSpec {
  const char* name;
  AttributeType type;
  Scope scope;
  bool required;
  double otherwise;          // default; for a choice, its index
  const char* otherwise_as;  // or the attribute of the same op that gives the default, or null
  double least, most;        // of integers and numbers
  std::vector<const char*> choices;
  RankRule rule = RankRule::none;
  int block = 0, blocks = 1;
};

// Which rows an op's outputs have.
enum class RowRule {
  none,      // no outputs
  as_input,  // those of the first input
  all,       // all rows of the step
  plain,     // those, or rows with outputs
  selected,  // rows with outputs, of an input with all rows
  routed,    // a row set that the op forms: several entries for each input row
  expanded,  // a row set formed from the input's rows, or the input's own rows
  combined,  // the rows from which the first input's row set was formed
};

// The size of a step, for costs. Attention's counts are those of one op, because they depend on its window.
struct StepSize {
  double rows = 0, outputs = 0;      // rows of the step; rows with outputs
  double seen = 0, context = 0;      // pairs of query row and visible position; cache positions read
  double position_bytes = 0;         // keys and values of one position in one KV head
  double world = 1;                  // ranks
  std::vector<double> weight_bytes;  // as the backend stores them, by weight; empty: as the format stores them
};

struct Cost {
  double bytes = 0;       // read or written at least once
  double operations = 0;  // additions, multiplications, divisions and exponentials
};

struct Arity {
  int least, most;
};

struct OpSpec {
  Op op;
  const char* name;
  Arity inputs, outputs, weights;
  bool in_place;  // the output is the first input and may be left out
  RowRule rows;
  std::vector<AttributeSpec> attributes;
  // Checks shapes, after arity, rows and attributes. Throws std::invalid_argument.
  void (*check)(const Program& program, const OpNode& op);
  Cost (*cost)(const Program& program, const OpNode& op, const StepSize& size);

  int attribute(const std::string& name) const;  // index, or -1
};

// Of every op, in the order of the enumeration.
const std::vector<OpSpec>& op_specs();
// Throws std::invalid_argument for an unknown name.
const OpSpec& op_spec(const std::string& name);

const char* name_of(AttributeType type);
const char* name_of(Scope scope);
const char* name_of(RowRule rule);
const char* name_of(RankRule rule);

}  // namespace as
