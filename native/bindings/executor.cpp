// Python bindings of a rank's model and of the thread that runs its steps.
#include "cpu/executor.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <cmath>
#include <optional>
#include <tuple>

#include "batch/draft_head.h"
#include "batch/stepper.h"
#include "bindings/bindings.h"
#include "bindings/model.h"
#include "bindings/panels.h"
#include "comm/expert_exchange.h"
#include "cpu/blocks.h"
#include "cpu/host_sampler.h"

namespace py = pybind11;

namespace as {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Scales = py::array_t<QuantizedScale, py::array::c_style>;

// The rows of a two-dimensional array, with all of its columns.
SourceRows source_rows(const py::array& a, const std::string& source) {
  const ArrayRows rows = array_rows(a, source);
  return {rows.data, rows.type, rows.stride, 0, 0, rows.columns, rows.columns, rows.step};
}

// Rows of quantized values with this packing. Only packed blocks include scales. rows: how many, if q has octets.
StoredRows stored_rows(const py::array& q, int bits, int64_t columns, const std::string& packing, int skipped,
                       int64_t rows, int64_t& count) {
  const Packing kind = packing_of(packing);
  const bool transposed = is_transposed(kind), octets = kind == Packing::octets;
  if ((bits != 8 && bits != 4) || columns < 1 || (octets && (bits != 4 || skipped < 0 || skipped > 7)))
    throw std::invalid_argument("quantized rows: bits, columns or skipped");
  if (is_block(kind) && (block_kind(kind).bits != bits || columns % block_kind(kind).values))
    throw std::invalid_argument("quantized rows: " + std::to_string(columns) + " values of " + std::to_string(bits) +
                                " bits are no whole blocks of " + packing);
  StoredRows stored;
  stored.bits = bits, stored.columns = columns, stored.group = columns;
  const auto* data = static_cast<const uint8_t*>(q.data());
  const int64_t stride = q.ndim() == 2 ? q.strides(0) : 0;
  if (is_block(kind)) stored = block_rows(kind, data, stride, columns);
  stored.packing = kind, stored.q = data, stored.stride = stride, stored.skipped = octets ? skipped : 0;
  int64_t height = -1, width = stored.row_bytes();  // of q
  if (octets) height = columns, width = (skipped + rows + 7) / 8;
  else if (transposed) height = (columns * bits + 31) / 32, width = -1;
  else if (is_block(kind)) width = columns / block_kind(kind).values * block_kind(kind).bytes;
  if (q.ndim() != 2 || q.itemsize() != (transposed ? 4 : 1) || (height >= 0 && q.shape(0) != height) ||
      (width >= 0 && q.shape(1) != width) || (q.shape(1) > 1 && q.strides(1) != q.itemsize()) || (octets && rows < 0))
    throw std::invalid_argument("quantized rows packed as " + packing + " must be [" +
                                (height < 0 ? "rows" : std::to_string(height)) + ", " +
                                (width < 0 ? "rows" : std::to_string(width)) + "] of " +
                                (transposed ? "4 bytes" : "a byte") + " each, of adjacent columns");
  check_aligned(q);
  count = octets ? rows : transposed ? q.shape(1) : q.shape(0);
  return stored;
}

// Packs the rows of several arrays into consecutive rows of a matrix. Returns the number of NaN and infinite values of
// each.
std::vector<int64_t> fill(Executor& e, int id, const std::vector<py::array>& arrays, const std::string& source,
                          int64_t row_offset, int64_t column, std::optional<int64_t> group_size) {
  const Packed& m = e.weights().matrix(id);
  const int64_t group = group_size.value_or(m.group);
  std::vector<SourceRows> sources;
  std::vector<int64_t> counts;
  for (const py::array& a : arrays) {
    SourceRows rows = source_rows(a, source);
    if (!group_size && rows.columns != m.k)
      throw std::invalid_argument("fill_matrix: " + std::to_string(rows.columns) + " columns do not fit a matrix of " +
                                  std::to_string(m.k));
    rows.row_offset = row_offset, rows.column = column, rows.group = group ? group : rows.columns;
    sources.push_back(rows), counts.push_back(a.shape(0));
    row_offset += counts.back();
  }
  py::gil_scoped_release release;
  return e.weights().fill_matrix(id, sources, counts);
}

// A scale for each row and group, or an offset, of rows that `count` counts.
Strided strided_of(const py::array& a, int64_t count, int64_t width, int bytes, const char* what) {
  if (a.ndim() != 2 || a.shape(0) != count || a.shape(1) != width || a.itemsize() != bytes)
    throw std::invalid_argument(std::string(what) + " must be [rows, " + std::to_string(width) + "] of " +
                                std::to_string(bytes) + " bytes each");
  return {static_cast<const char*>(a.data()), (int64_t)a.strides(0), (int64_t)a.strides(1)};
}

// fill_quantized for several arrays, one after the other.
std::vector<int64_t> fill_quantized_rows(Executor& e, int id, const std::vector<py::array>& quants,
                                         const std::vector<py::array>& scales, int bits, int64_t columns,
                                         int64_t group_size, const std::string& scale_type, int64_t row_offset,
                                         int64_t column, const std::vector<std::pair<int64_t, int64_t>>& shared,
                                         const std::vector<py::array>& zeros, const std::string& packing,
                                         const std::vector<int>& skipped_rows) {
  const size_t size = quants.size();
  const auto fits = [&](const auto& all) { return all.empty() || all.size() == size; };
  if ((scales.size() != size && !is_block(packing_of(packing))) || !fits(scales) || group_size < 0 || !fits(shared) ||
      !fits(zeros) || !fits(skipped_rows))
    throw std::invalid_argument("fill_quantized_rows: as many scales as arrays of values, and a group_size");
  const Packed& m = e.weights().matrix(id);
  const ScaleType type = scale_type_of(scale_type);
  std::vector<StoredRows> sources;
  std::vector<int64_t> counts;
  for (size_t i = 0; i < quants.size(); i++) {
    int64_t count;
    StoredRows rows = stored_rows(quants[i], bits, columns, packing, skipped_rows.empty() ? 0 : skipped_rows[i],
                                  scales.empty() ? -1 : scales[i].shape(0), count);
    counts.push_back(count);
    if (is_block(rows.packing)) {
      sources.push_back(rows);
      continue;
    }
    rows.group = group_size ? group_size : columns, rows.scale_type = type;
    if (type == ScaleType::e8m0 && (!is_coded(m.format) || m.scaling.scales == ScaleType::float16))
      throw std::invalid_argument(
          "fill_quantized_rows: scales of e8m0 need a matrix of small floats with scales of "
          "float32 or bfloat16");
    const int bytes = type == ScaleType::e8m0      ? 1
                      : is_quantized(m.format)     ? m.scale_bytes()
                      : type == ScaleType::float32 ? 4
                                                   : 2;
    const auto [height, skipped] = shared.empty() ? std::pair<int64_t, int64_t>(1, 0) : shared[i];
    if (height < 1 || skipped < 0 || skipped >= height ||
        (height > 1 && (type == ScaleType::e8m0 || is_transposed(rows.packing))))
      throw std::invalid_argument("fill_quantized_rows: shared must be (rows of a scale, rows before the first one)");
    const int64_t blocks = (skipped + count + height - 1) / height;
    rows.scales = strided_of(scales[i], blocks, rows.groups(), bytes, "fill_quantized_rows: scales");
    rows.scales.shared = height, rows.scales.skipped = skipped;
    if (!zeros.empty())
      rows.zeros = strided_of(zeros[i], count, rows.groups(), m.zero_bytes(), "fill_quantized_rows: zeros");
    sources.push_back(rows);
  }
  py::gil_scoped_release release;
  return e.weights().fill_quantized(id, sources, counts, row_offset, column);
}

Format float_format_of(const std::string& dtype) {
  const Format format = format_of(dtype);
  if (is_quantized(format)) throw std::invalid_argument("adapters are float32 or bfloat16, not " + dtype);
  return format;
}

void bind_slot_pages(py::module_& m) {
  const auto pair = [](PageBytes bytes) {
    return std::make_pair(SlotPages::rounded(bytes.state), SlotPages::rounded(bytes.recent));
  };
  m.def(
      "gated_delta_bytes",
      [pair](int key_heads, int group, int key_dim, int value_dim, int decays) {
        const PageBytes head = deferred_state_bytes(group, key_dim, value_dim, decays);
        return pair({key_heads * head.state, key_heads * head.recent});
      },
      py::arg("key_heads"), py::arg("group"), py::arg("key_dim"), py::arg("value_dim"), py::arg("decays"),
      "Bytes of a sequence's state, and of its recent rows, in a gated_delta op. decays: of a row and value head.");
  m.def(
      "ssd_bytes",
      [pair](int heads, int groups, int state_dim, int head_dim) {
        return pair(ssd_bytes(heads, groups, state_dim, head_dim));
      },
      py::arg("heads"), py::arg("groups"), py::arg("state_dim"), py::arg("head_dim"), "The same of an ssd op.");
  m.def(
      "causal_conv_bytes", [pair](int channels, int taps) { return pair(causal_conv_bytes(channels, taps)); },
      py::arg("channels"), py::arg("taps"), "The same of a causal_conv op.");
}

void bind_adapters(py::module_& m) {
  m.def(
      "lora_bytes",
      [](int rows, int targets, int max_rank) { return lora_bytes({1, max_rank, Format::f32}, rows, targets); },
      py::arg("rows"), py::arg("targets"), py::arg("max_rank"),
      "Bytes of scratch memory of lora ops with `rows` rows and `targets` targets of one linear.");
  m.def(
      "adapter_bytes",
      [](int rank, int inputs, int columns, const std::string& dtype) {
        return adapter_bytes(rank, inputs, columns, float_format_of(dtype));
      },
      py::arg("rank"), py::arg("inputs"), py::arg("columns"), py::arg("dtype"), "Bytes of one target's two matrices.");
  py::class_<Adapter, std::shared_ptr<Adapter>>(m, "Adapter",
                                                "A LoRA adapter's matrices, made by Executor.new_adapter().")
      .def(
          "set",
          [](Adapter& adapter, int target, const py::array& a, const std::string& a_source, const py::array& b,
             const std::string& b_source, float scale) {
            const SourceRows first = source_rows(a, a_source), second = source_rows(b, b_source);
            const int rank = (int)a.shape(0), columns = (int)b.shape(0);
            py::gil_scoped_release release;
            return adapter.set(target, first, rank, second, columns, scale);
          },
          py::arg("target"), py::arg("a"), py::arg("a_source"), py::arg("b"), py::arg("b_source"), py::arg("scale"),
          "Copies the matrices a [rank, in features] and b [columns, rank] of a target, to whose columns scale * b (a "
          "x)\n"
          "is added. Returns the number of NaN and infinite values. Raises ValueError for an invalid target or rank.");
}

py::list profile_of(const Executor& e) {
  py::list all;
  for (const CpuRunner::Step& step : e.steps()) all.append(profile_row(e.program(), step.parts, step.counters));
  return all;
}

void bind_panels(py::module_& m) {
  py::class_<Panels>(m, "Panels", "A copy of a stack of experts' matrices in panels (cpu/kernels/format.h).")
      .def_property_readonly(
          "rows", [](const Panels& p) { return p.layout.panel; }, "Rows of a panel.")
      .def("__len__", [](const Panels& p) { return p.experts.size(); })
      .def(
          "bytes",
          [](const Panels& p, size_t expert) {
            const std::vector<uint8_t>& bytes = p.experts.at(expert);
            return py::array_t<uint8_t>((py::ssize_t)bytes.size(), bytes.data());
          },
          py::arg("expert") = 0, "An expert's panels, one after the other: uint8 [bytes].");
}

void bind_weights(py::class_<Executor, StepModel, std::shared_ptr<Executor>>& executor) {
  executor
      .def(
          "add_matrix",
          [](Executor& e, int n, int k, const std::string& dtype, int group_size, int experts, std::vector<int> order,
             const py::kwargs& layout) {
            return e.add_matrix(n, k, dtype, group_size, experts, scale_layout_of(layout), std::move(order));
          },
          py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
          py::arg("experts") = 1, py::arg("order") = std::vector<int>{},
          "Adds a matrix and returns its id. experts: a stack of this many experts' matrices, for expert_linear. "
          "order:\n"
          "the input feature of each column, -1 for none; empty: all in order. Keywords: the layout of its scales.")
      .def(
          "panels",
          [](Executor& e, int id) {
            Panels found{e.weights().matrix(id), {}, {}};
            for (int i = 0; i < e.weights().experts(id); i++) {
              const Packed m = e.weights().matrix(id, i);
              found.experts.emplace_back(m.data, m.data + m.panels() * m.panel_bytes);
            }
            Packed& m = found.layout;
            if (m.order) found.order.assign(m.order, m.order + m.k);
            m.data = nullptr, m.order = nullptr;
            return found;
          },
          py::arg("id"), "A copy of a matrix as the kernels have it: Panels.")
      .def(
          "share_matrix", [](Executor& e, const Executor& other, int id) { return e.share_matrix(other, id); },
          py::arg("other"), py::arg("id"), py::keep_alive<1, 2>(),
          "Adds the matrix `id` of an executor from which this one was made by beside(), and returns its id here.")
      .def(
          "fill_matrix",
          [](Executor& e, int id, const py::array& a, const std::string& source, int64_t row_offset, int64_t column,
             std::optional<int64_t> group_size) { return fill(e, id, {a}, source, row_offset, column, group_size)[0]; },
          py::arg("id"), py::arg("array"), py::arg("source"), py::arg("row_offset") = 0, py::arg("column") = 0,
          py::arg("group_size") = py::none(),
          "Packs rows of an array, from column `column` on, into a matrix and converts them to its type. Returns the\n"
          "number of NaN and infinite values. group_size: of the rows' quantization, 0 for whole rows; without it, "
          "the\n"
          "rows must not be longer than the matrix'.")
      .def(
          "fill_quantized",
          [](Executor& e, int id, const py::array& q, const std::optional<py::array>& scales,
             const std::optional<py::array>& zeros, int bits, int64_t columns, int64_t group_size, int64_t row_offset,
             int64_t column, int64_t super_group, const std::optional<py::array>& super_scales,
             const std::optional<py::array>& super_offsets, const std::string& packing, int skipped) {
            int64_t count;
            StoredRows rows = stored_rows(q, bits, columns, packing, skipped, scales ? scales->shape(0) : -1, count);
            if (group_size < 0 || super_group < 0)
              throw std::invalid_argument("fill_quantized: group_size or super_group");
            const Packed& m = e.weights().matrix(id);
            if (!is_quantized(m.format))
              throw std::invalid_argument("fill_quantized: the matrix is not quantized; see fill_quantized_rows");
            if (!is_block(rows.packing)) {
              rows.group = group_size ? group_size : columns, rows.super_group = super_group;
              if (!scales) throw std::invalid_argument("fill_quantized: scales are missing");
              auto take = [&](const std::optional<py::array>& a, int64_t width, int bytes, const char* what) {
                return a ? strided_of(*a, count, width, bytes, what) : Strided{};
              };
              rows.scales = take(scales, rows.groups(), m.scale_bytes(), "fill_quantized: scales");
              rows.zeros = take(zeros, rows.groups(), m.zero_bytes(), "fill_quantized: zeros");
              rows.super_scales = take(super_scales, rows.super_groups(), 2, "fill_quantized: super_scales");
              rows.super_offsets = take(super_offsets, rows.super_groups(), 2, "fill_quantized: super_offsets");
            }
            py::gil_scoped_release release;
            return e.weights().fill_quantized(id, {rows}, {count}, row_offset, column)[0];
          },
          py::arg("id"), py::arg("q").noconvert(), py::arg("scales").noconvert(), py::arg("zeros").noconvert(),
          py::arg("bits"), py::arg("columns"), py::arg("group_size"), py::arg("row_offset") = 0, py::arg("column") = 0,
          py::arg("super_group") = 0, py::arg("super_scales").noconvert() = py::none(),
          py::arg("super_offsets").noconvert() = py::none(), py::arg("packing") = "rows", py::arg("skipped") = 0,
          "Packs rows of `columns` quantized values, from column `column` on, into a matrix: those of quantize_rows, "
          "or\n"
          "others that match the matrix' layout of scales. zeros: offsets or zero points. Nested scales: int8, times\n"
          "super_scales (float16) of each super_group values. packing of q: \"rows\" uint8 [rows, bytes]; \"signed\" "
          "and\n"
          "\"swapped\": the same with signed bytes, or with halves in the other order; \"words\" int32 [words of k, "
          "rows]\n"
          "(GPTQ); \"octets\" int32 [k, words of eight rows] (AWQ), with `skipped` rows of the first word before the\n"
          "first row; or GGUF's \"Q4_0\", ... uint8 [rows, bytes of blocks], which include scales. Arrays may have "
          "any\n"
          "strides, but q's columns must be adjacent. Returns the number of e4m3 NaN plus that of block scales that "
          "are\n"
          "NaN or infinite.")
      .def("fill_quantized_rows", fill_quantized_rows, py::arg("id"), py::arg("quants"), py::arg("scales"),
           py::arg("bits"), py::arg("columns"), py::arg("group_size"), py::arg("scale_type"), py::arg("row_offset") = 0,
           py::arg("column") = 0, py::arg("shared") = std::vector<std::pair<int64_t, int64_t>>(),
           py::arg("zeros") = std::vector<py::array>(), py::arg("packing") = "rows",
           py::arg("skipped") = std::vector<int>(),
           "fill_quantized for several arrays with their scales of a type (e8m0 for small floats, too, whose scales "
           "are then\n"
           "converted), but without nested ones, one after "
           "the other. shared: for each array how many rows have a scale in common, and how many of the first scale's "
           "rows\n"
           "come before the array; by default each row has scales of its own. A matrix of floats takes e4m3, which is "
           "dequantized; its source_hash is that of the values as "
           "float32.\n"
           "Returns the number of e4m3 NaN of each.")
      .def(
          "fill_rows", fill, py::arg("id"), py::arg("arrays"), py::arg("source"), py::arg("row_offset") = 0,
          py::arg("column") = 0, py::arg("group_size") = py::none(),
          "fill_matrix for several arrays, one after the other. Returns the number of NaN and infinite values of each.")
      .def(
          "quantize_rows",
          [](Executor& e, const py::array& a, const std::string& source, int bits, int64_t group_size) {
            SourceRows rows = source_rows(a, source);
            if (rows.step != 1) throw std::invalid_argument("quantize_rows: columns must be adjacent in memory");
            if ((bits != 8 && bits != 4) || group_size < 0 || group_size % 2)
              throw std::invalid_argument("quantize_rows: bits or group_size");
            rows.group = group_size ? group_size : rows.columns;
            QuantizedRows out{};
            out.bits = bits, out.columns = rows.columns, out.group = rows.group;
            Bytes q({(py::ssize_t)a.shape(0), (py::ssize_t)out.row_bytes()});
            Scales scales({(py::ssize_t)a.shape(0), (py::ssize_t)out.groups()}),
                offsets({(py::ssize_t)a.shape(0), (py::ssize_t)out.groups()});
            out.q = q.mutable_data(), out.scales = scales.mutable_data(), out.offsets = offsets.mutable_data();
            const int64_t count = a.shape(0);
            int64_t bad;
            {
              py::gil_scoped_release release;
              bad = e.weights().quantize(rows, out, count);
            }
            return py::make_tuple(q, scales, offsets, bad);
          },
          py::arg("array"), py::arg("source"), py::arg("bits"), py::arg("group_size"),
          "Quantizes rows by InstantQuant. Returns q (uint8 [rows, columns]; 4-bit values share a byte, with the even\n"
          "column in the lower half), scales and offsets [rows, groups], and the number of NaN and infinite values. A\n"
          "weight is scale * (q - 2^(bits - 1)) + offset.");
}

void bind_unpacking(py::module_& m) {
  m.def(
      "unpack_quantized",
      [](const py::array& q, int bits, int64_t columns, const std::string& packing, int skipped, int64_t rows) {
        int64_t count;
        const StoredRows stored = stored_rows(q, bits, columns, packing, skipped, rows, count);
        Bytes quantized({(py::ssize_t)count, (py::ssize_t)stored.row_bytes()});
        uint8_t* to = quantized.mutable_data();
        {
          py::gil_scoped_release release;
          unpack_quantized(stored, count, to);
        }
        return quantized;
      },
      py::arg("q").noconvert(), py::arg("bits"), py::arg("columns"), py::arg("packing"), py::arg("skipped") = 0,
      py::arg("rows") = -1, "Unpacks quantized values (packing: see fill_quantized) into plain rows. rows: of octets.");
  m.def(
      "unpack_scales",
      [](const py::array& q, int64_t columns, const std::string& packing) {
        int64_t count;
        const Packing kind = packing_of(packing);
        if (!is_block(kind) || !block_kind(kind).nested)
          throw std::invalid_argument("unpack_scales: " + packing + " has no nested scales");
        const StoredRows stored = stored_rows(q, block_kind(kind).bits, columns, packing, 0, -1, count);
        const int each = block_kind(kind).values / block_kind(kind).group;
        const bool minimums = stored.super_offsets.data;
        py::array_t<int8_t> first({(py::ssize_t)count, (py::ssize_t)stored.groups()}),
            second({(py::ssize_t)count, (py::ssize_t)(minimums ? stored.groups() : 0)});
        int8_t *to = first.mutable_data(), *and_to = second.mutable_data();
        {
          py::gil_scoped_release release;
          for (int64_t r = 0; r < count; r++)
            for (int64_t b = 0; b < stored.super_groups(); b++, to += each, and_to += minimums ? each : 0)
              unpack_scales(kind, stored.q + r * stored.stride, b, to, and_to);
        }
        return py::make_tuple(first, second);
      },
      py::arg("q").noconvert(), py::arg("columns"), py::arg("packing"),
      "Nested scales and minimums of rows of GGUF's blocks, int8 [rows, groups]. Minimums are empty if there are "
      "none.");
}

}  // namespace

void bind_executor(py::module_& m) {
  bind_unpacking(m);
  bind_slot_pages(m);
  bind_adapters(m);
  bind_panels(m);
  py::class_<StepResult>(m, "StepResult",
                         "A step's results. Arrays of tokens list the items that sample one after the other.")
      .def_readonly("counts", &StepResult::counts,
                    "int32 [items that sample]: tokens of each, in the order of the plan")
      .def_readonly("drafted", &StepResult::drafted, "int32 [items that sample]: drafts tried")
      .def_readonly("tokens", &StepResult::tokens, "int32 [n]; -1 where status is not 0")
      .def_readonly("status", &StepResult::status, "int32 [n]: 0, or why there is no token (describe_status)")
      .def_readonly("logprobs", &StepResult::logprobs, "float32 [n]: log softmax of the unprocessed logits")
      .def_readonly("top_ids", &StepResult::top_ids, "int32 [n, 20], -1 where unused")
      .def_readonly("top_logprobs", &StepResult::top_logprobs, "float32 [n, 20]")
      .def_readonly("copy_seconds", &StepResult::copy_seconds, "time of the plan's copies")
      .def_readonly("prompt_logprobs", &StepResult::prompt_logprobs,
                    "float32 [n]: for each scored output row of items with PROMPT, the log probability of the next id; "
                    "NaN if the logits are not finite. None if there are no such rows")
      .def_readonly("prompt_top_ids", &StepResult::prompt_top_ids, "int32 [n, 20] for the same rows, or None")
      .def_readonly("prompt_top_logprobs", &StepResult::prompt_top_logprobs, "float32 [n, 20], or None")
      .def_readonly("hidden", &StepResult::hidden,
                    "float32 [n, width] on rank 0: the output rows of items with HIDDEN. None if there are none")
      .def_readonly("logits", &StepResult::logits,
                    "float32 [rows with outputs, local vocabulary] on request, else None");
  m.def("describe_status", [](int status) { return std::string(describe((SampleStatus)status)); });

  py::class_<Masks, std::shared_ptr<Masks>>(
      m, "Masks", "Token masks, computed by any thread in parallel with the step that samples under them.")
      .def(py::init<int, int>(), py::arg("rows"), py::arg("vocab_size"))
      .def_property_readonly(
          "bits",
          [](py::object self) {
            Masks& masks = self.cast<Masks&>();
            return py::array_t<uint32_t>({(py::ssize_t)masks.rows(), (py::ssize_t)masks.words()},
                                         masks.rows() ? masks.row(0) : nullptr, self);
          },
          "uint32 [rows, words]: bit i % 32 of word i / 32 allows id i. A row must be written before publish(), and "
          "not\n"
          "again until the step that samples under it was collected.")
      .def("publish", &Masks::publish, py::arg("rows"), "Marks rows as written and wakes the step that waits for them.")
      .def("clear", &Masks::clear, py::arg("rows"),
           "Marks rows as not written. To be called before the plan that names them.")
      .def("fail", &Masks::fail, py::arg("message"), "Ends all present and future waits with an error.");

  const py::class_<StepModel, std::shared_ptr<StepModel>> step_model(m, "StepModel", "A rank's model on any device.");
  const py::class_<LogitSampler, std::shared_ptr<LogitSampler>> logit_sampler(m, "LogitSampler",
                                                                              "Samples from logits of another device.");
  py::class_<HostSampler, LogitSampler, std::shared_ptr<HostSampler>>(m, "HostSampler",
                                                                      "The CPU's sampling op with its own threads.")
      .def(py::init<int, std::vector<int>, std::shared_ptr<Communicator>>(), py::arg("threads"),
           py::arg("cpus") = std::vector<int>{}, py::arg("shared_memory") = nullptr,
           "shared_memory: to the group's other ranks, each of which has a shard of the vocabulary.");
  m.attr("MOST_DRAFT_LAYERS") = DraftHead::kMostLayers;
  m.def("draft_rows", &DraftHead::run_rows, py::arg("max_rows"), py::arg("max_slots"), py::arg("layers"),
        "The most rows of a run of a draft head's layers.");
  m.def("state_places", &DraftHead::places, py::arg("max_rows"), py::arg("max_slots"), py::arg("layers"),
        "Places of hidden states that a model keeps for a draft head.");
  py::class_<Executor, StepModel, std::shared_ptr<Executor>> executor(
      m, "Executor", "One rank's ops, weights and KV cache of a model.");
  executor.def(py::init([](int rank, int world, std::shared_ptr<SharedMemory> shared_memory, std::vector<int> cpus,
                           int threads) {
                 return std::shared_ptr<Executor>(
                     new Executor(rank, world, std::move(shared_memory), std::move(cpus), threads), WithoutGil{});
               }),
               py::arg("rank") = 0, py::arg("world") = 1, py::arg("shared_memory") = nullptr,
               py::arg("cpus") = std::vector<int>{}, py::arg("num_threads") = 1);
  executor.def(
      "beside", [](const Executor& e) { return std::shared_ptr<Executor>(new Executor(Sibling{}, e), WithoutGil{}); },
      "A new executor, for another model, that shares this one's threads.");
  executor.def("set_exchange", &Executor::set_exchange, py::arg("exchange"),
               "Sets the ExpertExchange of a mixed group, before allocate().");
  executor.def("share_matrices", &Executor::share_matrices, py::arg("bytes"),
               "Before add_matrix(): other processes can map the matrices, as far as so many bytes suffice.");
  executor.def_property_readonly(
      "small_bytes", [](const Executor& e) { return e.weights().small_bytes(); },
      "After share_matrices(): bytes of matrices in parts of the memory that are not all in huge pages.");
  executor.def(
      "describe_experts",
      [](Executor& e) {
        std::string address;
        {
          py::gil_scoped_release release;
          address = e.describe_experts();
        }
        return py::bytes(address);
      },
      "The address by which the model's rank of a mixed group finds the experts, after the program is built. Raises "
      "ValueError that says why a GPU cannot compute them.");
  executor.def("use_exact_activations", &Executor::use_exact_activations,
               "Before allocate(): silu and other activations have the bits that they have on every device.");
  bind_model<Executor>(executor);
  bind_weights(executor);
  executor
      .def(
          "allocate",
          [](Executor& e, int max_rows, int max_slots, int max_length, int span_size, int num_spans,
             const std::string& dtype, int max_outputs, bool fused, std::vector<std::shared_ptr<Executor>> drafts,
             int masks, int adapters, int adapter_rank, const std::string& adapter_dtype, bool queued) {
            py::gil_scoped_release release;
            e.allocate({max_rows, max_outputs ? max_outputs : max_slots, max_slots, max_length},
                       {span_size, num_spans, cache_dtype_of(dtype)}, fused, std::move(drafts), masks,
                       {adapters, adapter_rank, float_format_of(adapter_dtype)}, queued);
          },
          py::arg("max_rows"), py::arg("max_slots"), py::arg("max_length"), py::arg("span_size"), py::arg("num_spans"),
          py::arg("cache_dtype"), py::arg("max_outputs") = 0, py::arg("fused") = true, py::arg("drafts") = py::list(),
          py::arg("masks") = 0, py::arg("adapters") = 0, py::arg("adapter_rank") = 0,
          py::arg("adapter_dtype") = "float32", py::arg("queued") = false,
          "Compiles the program and allocates memory for steps. max_outputs: output rows of a step, 0 for max_slots.\n"
          "fused: fuse ops (the bits are equal). drafts: the executor of a draft model, or those of a draft head's\n"
          "layers, made by beside() and allocated with the same spans. masks: how many plans may name. adapters, "
          "adapter_rank, adapter_dtype: limits of adapters.\n"
          "queued: begin() queues steps, as on GPUs, for tests.")
      .def(
          "multiply",
          [](Executor& e, int id, py::array_t<float, py::array::c_style | py::array::forcecast> x, int out_features,
             std::optional<py::array_t<float, py::array::c_style | py::array::forcecast>> bias) {
            const int n = e.weights().matrix(id).n, k = e.weights().matrix(id).inputs;
            if (x.ndim() != 2 || x.shape(1) != k || out_features != n ||
                (bias && (bias->ndim() != 1 || bias->shape(0) != n)))
              throw std::invalid_argument("multiply: a matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                          " takes x [rows, " + std::to_string(k) + "], out_features " +
                                          std::to_string(n) + " and no bias or one of " + std::to_string(n));
            if (x.shape(0) > INT_MAX / 2) throw std::invalid_argument("multiply: too many rows");
            py::array_t<float> y({x.shape(0), (py::ssize_t)out_features});
            const float *xp = x.data(), *bp = bias ? bias->data() : nullptr;
            float* yp = y.mutable_data();
            py::gil_scoped_release release;
            e.multiply(id, xp, bp, yp, (int)x.shape(0));
            return y;
          },
          py::arg("id"), py::arg("x"), py::arg("out_features"), py::arg("bias") = py::none(),
          "x w^T (+ bias) with one matrix, for tests and microbenchmarks.")
      .def(
          "read_row",
          [](const Executor& e, int id, int64_t row) {
            py::array_t<float> out(e.weights().matrix(id).inputs);
            e.weights().read_row(id, row, out.mutable_data());
            return out;
          },
          py::arg("id"), py::arg("row"), "A row of a matrix, dequantized; for tests.")
      .def(
          "read_rows",
          [](const Executor& e, int id) {
            const Weights& w = e.weights();
            const int64_t k = w.matrix(id).inputs, rows = (int64_t)w.matrix(id).n * w.experts(id);
            py::array_t<float> out({(py::ssize_t)rows, (py::ssize_t)k});
            float* to = out.mutable_data();
            py::gil_scoped_release release;
            for (int64_t row = 0; row < rows; row++, to += k) w.read_row(id, row, to);
            return out;
          },
          py::arg("id"), "A matrix, dequantized.")
      .def("profile", profile_of,
           "For each op that runs (\"rms_norm+linear\": two fused ops): index in the program (of the linear or the "
           "first\n"
           "op), name, count, least, most and total seconds on thread 0, total bytes and operations "
           "(program/op_spec.h).")
      .def_property_readonly("barriers", &Executor::barriers, "How many barriers its threads have passed.")
      .def(
          "memory",
          [](const Executor& e) {
            py::list all;
            for (const auto& [p, n] : e.memory()) all.append(py::make_tuple((uintptr_t)p, n));
            return all;
          },
          "(address, bytes) of weights and cache.");

  py::class_<Stepper>(m, "Stepper", "Runs steps in order on its own thread, without Python in between.")
      .def(py::init<>())
      .def(
          "submit",
          [](Stepper& s, std::shared_ptr<StepModel> executor, const py::bytes& plan,
             std::shared_ptr<SharedMemory> shared_memory, int kind, const py::bytes& prefix, int profiling) {
            s.submit(
                {executor, plan,
                 [executor, shared_memory, kind, prefix = std::string(prefix), profiling](const std::string& plan) {
                   if (shared_memory) shared_memory->publish(kind, prefix + plan);
                   if (profiling >= 0) executor->set_profiling(profiling);
                 }});
          },
          py::arg("executor"), py::arg("plan"), py::arg("shared_memory") = nullptr, py::arg("kind") = 0,
          py::arg("prefix") = py::bytes(), py::arg("profiling") = -1,
          "Queues a step. shared_memory: first publishes prefix + plan there as a command of this kind. profiling: 1 "
          "on,\n"
          "0 off, -1 unchanged.")
      .def(
          "collect",
          [](Stepper& s) {
            StepOutput out;
            {
              py::gil_scoped_release release;
              out = s.collect();
            }
            return to_result(std::move(out), false);
          },
          "Waits for the oldest step and returns its StepResult, or raises its exception.")
      .def("drain", &Stepper::drain, py::call_guard<py::gil_scoped_release>(),
           "Waits until all submitted steps have run.")
      .def_property_readonly("idle", &Stepper::idle, "Whether all submitted steps have run.")
      .def_property_readonly("busy_seconds", &Stepper::busy_seconds,
                             "Seconds since the running step began; 0: none is running.");
}

}  // namespace as
