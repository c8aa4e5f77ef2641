// Quantized rows: those of a serialized model (plain row-major arrays, independent of instruction set and number of
// ranks), and those of other tools' checkpoints, which are moved into panels in one pass.
#pragma once
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "cpu/kernels/kernels.h"

namespace as {

using QuantizedScale = std::remove_pointer_t<decltype(std::declval<Packed>().scales(0, 0))>;  // of format.h's panels

struct RowShape {
  int bits;                // of a weight; 4-bit weights share a byte, with the even k in the lower half
  int64_t columns, group;  // k of a row and of its groups; the last group may be shorter

  int64_t row_bytes() const { return bits == 8 ? columns : (columns + 1) / 2; }
  int64_t groups() const { return (columns + group - 1) / group; }
};

// What quantize_rows() writes.
struct QuantizedRows : RowShape {
  uint8_t* q;               // [rows, row_bytes()]
  QuantizedScale* scales;   // [rows, groups()]
  QuantizedScale* offsets;  // [rows, groups()]
};

// How quantized values are packed in a file.
enum class Packing {
  rows,          // as in RowShape
  signed_rows,   // 8 bits, as signed integers
  swapped_rows,  // 4 bits, the even k in the upper half
  words,         // 32-bit words of adjacent k from the lowest bits on: [words of k][rows] (GPTQ)
  octets,        // 32-bit words: 4-bit values of eight adjacent rows in kOctet's order, [k][rows / 8] (AWQ)
  q4_0,          // GGUF's blocks, which include scales (blocks.h)
  q4_1,
  q8_0,
  q4_k,
  q5_k,
  q6_k,
};
constexpr int kOctet[8] = {0, 2, 4, 6, 1, 3, 5, 7};
// Rows of words, and of octets, that are hashed together: enough to read 4 KB at a time, few enough to stay in a cache.
constexpr int64_t kHashedWords = 1024, kHashedOctets = 8192;

// "rows", "signed", "swapped", "words", "octets" or GGUF's name. Throws std::invalid_argument for another name.
Packing packing_of(const std::string& name);
inline bool is_transposed(Packing p) { return p == Packing::words || p == Packing::octets; }
inline bool is_block(Packing p) { return p >= Packing::q4_0; }

// A value for each `shared` rows and each step along k, with strides in bytes. The first row is row `skipped` of those
// that share the first value.
struct Strided {
  const char* data = nullptr;
  int64_t row = 0, step = 0, shared = 1, skipped = 0;

  const char* at(int64_t r, int64_t s) const {
    return data + (shared == 1 ? r : (r + skipped) / shared) * row + s * step;
  }
  // How many of the rows from `r` on have the same values.
  int64_t alike(int64_t r) const { return shared - (r + skipped) % shared; }
  void advance(int64_t rows) {
    data += (rows + skipped) / shared * row;
    skipped = (rows + skipped) % shared;
  }
};

// Stored rows, with scales of the types that the destination's ScaleLayout has.
struct StoredRows : RowShape {
  Packing packing = Packing::rows;
  const uint8_t* q = nullptr;
  int64_t stride = 0;       // bytes from a row of q, or of words, to the next
  int skipped = 0;          // of octets: rows of the first word that come before the first row
  Strided scales;           // [rows, groups()] of the layout's type, or e8m0 instead, or int8 if nested; of q4_k, q5_k,
                            // q6_k: in the blocks. Only these may be shared by several rows
  Strided zeros;            // the same for offsets, or uint8 points; null if there are none
  int64_t super_group = 0;  // of nested scales
  Strided super_scales;     // float16 [rows, super_groups()]
  Strided super_offsets;    // null if there are no offsets
  ScaleType scale_type = ScaleType::float32;  // of `scales`: e8m0, or what recover_row() reads

  int64_t super_groups() const { return super_group ? (columns + super_group - 1) / super_group : 0; }
  // The rows from `row` on.
  StoredRows from(int64_t row) const;
  // Bytes of a row whose packing is not transposed.
  int64_t bytes() const;
  // How many rows are hashed together for Weights::source_hash().
  int64_t hashed_together() const {
    return packing == Packing::words ? kHashedWords : packing == Packing::octets ? kHashedOctets : 1;
  }
};

// Quantizes rows [r0, r1) of `source` into the same rows of `out`, which has the same columns and groups. Returns the
// number of NaN and infinite values.
int64_t quantize_rows(const Kernels& kernels, const SourceRows& source, const QuantizedRows& out, int64_t r0,
                      int64_t r1);

struct Placed {
  int64_t bad = 0;    // e4m3 NaN, and block scales that are NaN or infinite
  uint64_t hash = 0;  // of all arrays, for Weights::source_hash()
};

// Moves columns [column, column + w.k) of `count` stored rows into rows [r0, r1) of w, after hashing whole rows. The
// first stored row is w's row `row_offset`. Every group of w must be part of one stored group. Of rows that are hashed
// together, hashes the blocks that begin here; the i-th block has the key `key` + i.
Placed place_rows(const Packed& w, const StoredRows& stored, int64_t count, int64_t row_offset, int64_t column,
                  int64_t r0, int64_t r1, uint64_t key);

// Dequantizes columns [column, column + k) of a stored row of e4m3 with scales of stored.scale_type: the same values as
// those of a matrix of e4m3; and rounded to bfloat16. Returns the number of e4m3 NaN.
int64_t recover_row(const StoredRows& stored, int64_t row, int64_t column, int64_t k, float* out, uint16_t* rounded);

// Unpacks `rows` stored rows into the layout of RowShape: [rows, row_bytes()].
void unpack_quantized(const StoredRows& stored, int64_t rows, uint8_t* out);

}  // namespace as
