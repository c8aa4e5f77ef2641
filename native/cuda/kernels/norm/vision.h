// Ops of vision towers, and of models that take their rows: rows that the plan gives, places of patches, merged rows.
#pragma once
#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

// Rows that the plan gives: [.., width] in the device's memory, and for each row of the step its number there; -1:
// none.
struct GivenRows {
  const float* rows = nullptr;
  const int* numbers = nullptr;
  int width = 0;
};
// Copies the given rows; others become zero. own: whether this rank's part of a sum over ranks has the values. only:
// whether rows that are not given stay as they are.
void copy_given(const GivenRows& given, bool own, bool only, int rows, const Rows& out, const Queue& queue);
// x [rows, width] += columns [offset, offset + width) of the given rows.
void add_given(const GivenRows& given, int offset, float* x, int width, int rows, const Queue& queue);

// Time, height and width of each row's rotary position: [rows] each.
struct Places {
  const int *time = nullptr, *height = nullptr, *width = nullptr;
};
// How many pairs turn with the time, height and width of a row's place, in this order or, if interleaved, in turns. All
// zeros: all turn with the time.
struct Sections {
  int time = 0, height = 0, width = 0;
  bool interleaved = false;
};
// As rotary_table(), with rows' places. positions decide the table of long prompts alone.
void rotary_table(const RotaryTable& table, const Sections& sections, const Places& places, const int* positions,
                  const int* prompts, int rows, const Queue& queue);

// Adds a table [side, side, width] of positions, interpolated bilinearly. heights, widths: of each row's image. axes:
// adds two rows of a table [2, side, width] instead, that of the row's width and that of its height.
struct GridTable {
  const float* table = nullptr;
  int side = 0;
  bool axes = false;
  const int *heights = nullptr, *widths = nullptr;
};
void add_grid(const GridTable& grid, const Places& places, float* x, int width, int rows, const Queue& queue);

// x [rows, width] += the row of a table [positions, width] for each row's position + offset, or the last one beyond it.
// segments: null, or a table [2, width], of which the row for each row's segment is added.
struct PositionTable {
  const float* table = nullptr;
  int positions = 1, offset = 0;
  const float* segments = nullptr;
};
void add_positions(const PositionTable& table, const int* positions, const int* segments, float* x, int width, int rows,
                   const Queue& queue);

// Each value, but no less than *low and no more than *high. NaN stays.
void clamp(float* x, const float* low, const float* high, size_t count, const Queue& queue);
// x [rows, width]: each row less `shift`, times `factor`, [width] each.
void standardize(float* x, int width, const float* shift, const float* factor, int rows, const Queue& queue);

// A row of `out` for each `count` adjacent rows of in [.., width]: their columns, one row's after the other or
// interleaved, or their means.
enum class Merge { concat, interleave, mean };
void merge_rows(const float* in, int width, int count, Merge how, int rows, const Rows& out, const Queue& queue);

// Each row less its mean, divided by its standard deviation; times a weight, plus a bias.
struct LayerNorm {
  const float *weight = nullptr, *bias = nullptr;
  float eps = 0;
};
void layer_norm(const float* x, const LayerNorm& norm, int rows, const Rows& out, const Queue& queue);

enum class Activation { gelu, gelu_tanh, silu, tanh, relu, quick_gelu };
// An activation of each value of x [rows, width]; `out` may be x itself.
void activate(const float* x, Activation function, int rows, const Rows& out, const Queue& queue);
// GELU of the first half of the columns, times the second; in [rows, 2 width].
void gelu_mul(const float* in, int rows, const Rows& out, const Queue& queue);

}  // namespace as::cuda
