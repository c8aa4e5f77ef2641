// The Python module allspark_server._cuda. It is loaded when a GPU is requested, after allspark_server._native, whose
// types it shares.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/model.h"
#include "cuda/chip_bindings.h"
#include "cuda/exact_bindings.h"
#include "cuda/executor.h"
#include "cuda/expert_bindings.h"
#include "cuda/kernels/attention/indexer.h"
#include "cuda/memory/roofline.h"
#include "cuda/weights/dtype16.h"
#include "program/weight_spec.h"

namespace py = pybind11;

namespace as::cuda {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

HostRows host_rows(const py::array& a, const std::string& source, int64_t column) {
  const ArrayRows rows = array_rows(a, source);
  return {rows.data, rows.type, rows.rows, rows.stride, rows.columns, column, rows.step};
}

std::vector<int64_t> fill_rows(CudaExecutor& e, int id, const std::vector<py::array>& arrays, const std::string& source,
                               int64_t row_offset, int64_t column, std::optional<int64_t> group_size) {
  std::vector<HostRows> rows;
  const Matrix& m = e.weights().matrix(id);
  const int64_t group = group_size.value_or(m.quants.bits ? m.quants.group : 0);
  for (const py::array& a : arrays) {
    rows.push_back(host_rows(a, source, column));
    if (m.quants.bits && !group_size && a.shape(1) != m.k)
      throw std::invalid_argument("fill_matrix: " + std::to_string(a.shape(1)) + " columns do not fit a matrix of " +
                                  std::to_string(m.k));
  }
  py::gil_scoped_release release;
  return e.weights().fill_rows(id, rows, row_offset, group);
}

using Integers = py::array_t<int, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Words16 = py::array_t<uint16_t, py::array::c_style>;

int64_t fill_quantized(CudaExecutor& e, int id, const Bytes& q, const Words16& scales,
                       const std::optional<Words16>& offsets, int bits, int64_t columns, int64_t group_size,
                       int64_t row_offset, int64_t column, const py::kwargs& more) {
  if (more.contains("packing") && py::str(more["packing"]).cast<std::string>() != "rows")
    throw std::invalid_argument("quantized rows packed as " + py::str(more["packing"]).cast<std::string>() +
                                " are not available on CUDA yet");
  if ((bits != 8 && bits != 4) || columns < 1 || group_size < 0)
    throw std::invalid_argument(
        "fill_quantized: bits must be 4 or 8, columns at least 1 and group_size at least 0, got " +
        std::to_string(bits) + ", " + std::to_string(columns) + " and " + std::to_string(group_size));
  const int64_t group = group_size ? group_size : columns, groups = (columns + group - 1) / group,
                width = bits == 8 ? columns : (columns + 1) / 2;
  if (q.ndim() != 2 || q.shape(1) != width)
    throw std::invalid_argument("quantized rows must be [rows, " + std::to_string(width) + "] of a byte each");
  for (const Words16* a : {&scales, offsets ? &*offsets : &scales})
    if (a->ndim() != 2 || a->shape(0) != q.shape(0) || a->shape(1) != groups)
      throw std::invalid_argument("fill_quantized: scales and offsets must be [rows, " + std::to_string(groups) +
                                  "] of 2 bytes each");
  const HostQuants rows{bits,       q.data(), scales.data(), offsets ? offsets->data() : nullptr,
                        q.shape(0), columns,  column,        group};
  py::gil_scoped_release release;
  return e.weights().fill_quantized(id, rows, row_offset);
}

// Rows of views with any distance between rows.
const uint8_t* byte_rows(const py::array& a, int64_t width, int64_t rows, const char* what) {
  if (a.ndim() != 2 || a.itemsize() != 1 || a.shape(0) != rows || a.shape(1) != width || a.strides(1) != 1)
    throw std::invalid_argument(std::string("fill_mx: ") + what + " must be [" + std::to_string(rows) + ", " +
                                std::to_string(width) + "] of a byte each, those of a row adjacent");
  return static_cast<const uint8_t*>(a.data());
}

int64_t fill_mx(CudaExecutor& e, int id, const py::array& values, const py::array& scales, int64_t row_offset,
                int64_t column) {
  const int64_t columns = values.ndim() == 2 ? values.shape(1) * 2 : 0,
                count = values.ndim() == 2 ? values.shape(0) : 0;
  const HostMxRows rows{byte_rows(values, columns / 2, count, "values"),
                        byte_rows(scales, columns / kMxGroup, count, "scales"),
                        count,
                        columns,
                        column,
                        values.strides(0),
                        scales.strides(0)};
  py::gil_scoped_release release;
  return e.weights().fill_mx(id, rows, row_offset);
}

// The group size of a matrix of quantized values. Refuses scale layouts other than the default; small floats have no
// offsets.
int group_of(const std::string& dtype, int group_size, const py::kwargs& layout) {
  const bool small = dtype == "e2m1" || dtype == "nf4";
  const bool no_offsets = layout.contains("zeros") && py::str(layout["zeros"]).cast<std::string>() == "none";
  if (layout.size() > (small && no_offsets ? 1 : 0))
    throw std::invalid_argument("scales of weights of type " + dtype + " with " +
                                py::str(layout.begin()->first).cast<std::string>() + "=" +
                                py::str(layout.begin()->second).cast<std::string>() + " are not available on CUDA yet");
  return group_size;
}

constexpr double kWaitSeconds = 30;  // shared memory and the supervisor notice dead and stopped ranks earlier

CacheType cache_type_of(const std::string& name) {
  if (name == "float32") return CacheType::f32;
  if (name == "bfloat16" || name == "float16") return CacheType::dtype16;
  if (name == "int8") return CacheType::int8;
  if (name == "uint4") return CacheType::uint4;
  if (name == "float8") return CacheType::float8;
  throw std::invalid_argument("caches of type " + name +
                              " are not available on CUDA yet: float32, bfloat16, float16, int8, uint4 and float8 are");
}

ShortChunks short_chunks_of(const std::string& name) {
  if (name == "fastest") return ShortChunks::fastest;
  if (name == "decode") return ShortChunks::decode;
  if (name == "prefill") return ShortChunks::prefill;
  throw std::invalid_argument("short_chunks must be fastest, decode or prefill, got " + name);
}

py::list to_list(const std::vector<KernelTable::Row>& rows) {
  py::list all;
  for (const KernelTable::Row& row : rows)
    all.append(py::dict(py::arg("op") = row.op, py::arg("shape") = row.shape, py::arg("first") = row.first,
                        py::arg("last") = row.last ? py::object(py::int_(row.last)) : py::none(),
                        py::arg("kernel") = row.kernel));
  return all;
}

void bind_kernel_choice(py::module_& m) {
  bind_chips(m);
  m.def(
      "gemm_kernels",
      [](const Chip& chip, int n, int k, const std::string& dtype, int group_size, bool gated, bool normed, bool pushed,
         bool floats) {
        Gemm gemm;
        gemm.w = matrix_of(n, k, dtype, group_size);
        if (gated) gemm.w.n = paired_rows(n);
        gemm.gated = gated, gemm.writes_16_bytes = gated ? !floats : n % 4 == 0;
        gemm.normed = normed, gemm.pushed = pushed;
        gemm.fuses = normed || gemm.w.takes_bytes();
        return to_list(rows_of(gemm, gemm_table(chip, gemm)));
      },
      py::arg("chip"), py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
      py::arg("gated") = false, py::arg("normed") = false, py::arg("pushed") = false, py::arg("floats") = false,
      "Which kernels compute a linear on a chip, as Executor.kernels() lists them; needs no GPU. gated: gate and up "
      "columns, which silu_mul multiplies; normed: an rms_norm comes before; pushed: partial sums go to another GPU; "
      "floats: "
      "the gated result is float32.");
  m.def(
      "attention_kernels",
      [](const Chip& chip, const std::string& cache_dtype, int head_dim, int group, bool biased) {
        KernelTable table(chip);
        LayerCache cache;
        cache.type = cache_type_of(cache_dtype), cache.head_dim = head_dim;
        table.attention(cache, group, biased);
        return to_list(table.rows());
      },
      py::arg("chip"), py::arg("cache_dtype"), py::arg("head_dim"), py::arg("group"), py::arg("biased") = false,
      "Which kernels compute an attention. group: query heads of a KV head; biased: with ALiBi slopes.");
  m.def(
      "latent_kernels",
      [](const Chip& chip, const std::string& cache_dtype, int latent_dim, int rope_dim, int heads) {
        KernelTable table(chip);
        LayerCache cache;
        cache.type = cache_type_of(cache_dtype), cache.head_dim = latent_dim, cache.rope_dim = rope_dim;
        table.latent_attention(cache, LatentHeads(heads).group);
        return to_list(table.rows());
      },
      py::arg("chip"), py::arg("cache_dtype"), py::arg("latent_dim"), py::arg("rope_dim"), py::arg("heads"),
      "Which kernels compute a latent attention.");
  m.def(
      "expert_kernels",
      [](const Chip& chip, int n, int k, const std::string& dtype, int group_size, int experts) {
        KernelTable table(chip);
        table.experts(matrix_of(n * experts, k, dtype, group_size, experts));
        return to_list(table.rows());
      },
      py::arg("chip"), py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
      py::arg("experts") = 1, "Which kernels compute a linear of a stack of experts, by visits of rows to experts.");
}

// Whether adapters have 16-bit matrices.
bool is_dtype16(const std::string& dtype) {
  if (dtype != "bfloat16" && dtype != "float16" && dtype != "float32")
    throw std::invalid_argument("adapters are float32, bfloat16 or float16, not " + dtype);
  return dtype != "float32";
}

py::list profile_of(CudaExecutor& e) {
  py::list all;
  for (const OpTime& launch : e.profile()) all.append(profile_row(e.program(), launch.op, launch));
  return all;
}

void bind_adapters(py::module_& m) {
  m.def(
      "adapter_bytes",
      [](int rank, int inputs, int columns, const std::string& dtype) {
        return adapter_bytes(rank, inputs, columns, is_dtype16(dtype));
      },
      py::arg("rank"), py::arg("inputs"), py::arg("columns"), py::arg("dtype"), "Bytes of a target's two matrices.");
  m.def(
      "lora_bytes",
      [](int rows, int max_rank) {
        return (size_t)rows * kMaxTargets * kMaxLoraKParts * whole_ranks(max_rank) * sizeof(float);
      },
      py::arg("rows"), py::arg("max_rank"), "Bytes of scratch memory that adapters' GEMMs take for so many rows.");
  py::class_<Adapter, std::shared_ptr<Adapter>>(m, "Adapter", "A LoRA adapter's matrices, of Executor.new_adapter().")
      .def(
          "set",
          [](Adapter& adapter, int target, const py::array& a, const std::string& a_source, const py::array& b,
             const std::string& b_source, float scale) {
            const HostRows first = host_rows(a, a_source, 0), second = host_rows(b, b_source, 0);
            py::gil_scoped_release release;
            return adapter.set(target, first, second, scale);
          },
          py::arg("target"), py::arg("a"), py::arg("a_source"), py::arg("b"), py::arg("b_source"), py::arg("scale"),
          "As the CPU backend's.");
}

void bind_weights(py::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>>& executor) {
  executor
      .def(
          "share_matrix", [](CudaExecutor& e, const CudaExecutor& other, int id) { return e.share_matrix(other, id); },
          py::arg("other"), py::arg("id"), py::keep_alive<1, 2>(),
          "Adds the matrix `id` of an executor from which this one was made by beside(), and returns its id here.")
      .def(
          "add_matrix",
          [](CudaExecutor& e, int n, int k, const std::string& dtype, int group_size, int experts,
             const std::vector<int>& order, const py::kwargs& layout) {
            matrix_of(n, k, dtype, group_size, experts);  // refuses an unknown type before its layout
            return e.add_matrix(n, k, dtype, group_of(dtype, group_size, layout), experts, order);
          },
          py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
          py::arg("experts") = 1, py::arg("order") = std::vector<int>{},
          "order: the input feature of each column, if columns are permuted. Keywords describe the layout of scales of "
          "quantized types.")
      .def("fill_rows", fill_rows, py::arg("id"), py::arg("arrays"), py::arg("source"), py::arg("row_offset") = 0,
           py::arg("column") = 0, py::arg("group_size") = py::none(),
           "Columns `column`... of the arrays' rows, one array after the other, become rows of a matrix. "
           "Returns for each array how many values are NaN or infinite, or too large for a matrix of "
           "float16.")
      .def(
          "fill_matrix",
          [](CudaExecutor& e, int id, const py::array& a, const std::string& source, int64_t row_offset, int64_t column,
             std::optional<int64_t> group_size) {
            return fill_rows(e, id, {a}, source, row_offset, column, group_size)[0];
          },
          py::arg("id"), py::arg("array"), py::arg("source"), py::arg("row_offset") = 0, py::arg("column") = 0,
          py::arg("group_size") = py::none())
      .def(
          "fill_noise", [](CudaExecutor& e, int id, float size) { e.weights().fill_noise(id, size); }, py::arg("id"),
          py::arg("size"), "Fills a matrix with random values between -size and size on the GPU: for benchmarks.")
      .def("fill_quantized", fill_quantized, py::arg("id"), py::arg("q").noconvert(), py::arg("scales").noconvert(),
           py::arg("zeros").noconvert(), py::arg("bits"), py::arg("columns"), py::arg("group_size"),
           py::arg("row_offset") = 0, py::arg("column") = 0,
           "As the CPU backend's, for rows that quantize_rows made. For float8, scales and zeros are the "
           "two halves of a float32 (cuda/weights/weights.h).")
      .def("fill_mx", fill_mx, py::arg("id"), py::arg("values"), py::arg("scales"), py::arg("row_offset") = 0,
           py::arg("column") = 0,
           "Rows of MXFP4 for a matrix of type mxfp4: values uint8 [rows, columns / 2], the even column in the lower "
           "half, and scales as e8m0, uint8 [rows, columns / 32]. The columns from `column` on are taken. Returns how "
           "many scales are NaN or above 2.")
      .def(
          "read_row",
          [](const CudaExecutor& e, int id, int64_t row) {
            const std::vector<float> values = e.weights().read_rows(id, row, 1);
            return py::array_t<float>((py::ssize_t)values.size(), values.data());
          },
          py::arg("id"), py::arg("row"))
      .def(
          "read_rows",
          [](const CudaExecutor& e, int id) {
            const Matrix& m = e.weights().matrix(id);
            const int64_t rows = (int64_t)m.n * m.experts;
            const std::vector<float> values = e.weights().read_rows(id, 0, rows);
            return py::array_t<float>({(py::ssize_t)rows, (py::ssize_t)m.k}, values.data());
          },
          py::arg("id"), "All rows of a matrix as it stores them.")
      .def(
          "multiply",
          [](CudaExecutor& e, int id, const Floats& x, int out_features, const std::optional<Floats>& bias,
             const std::string& algo, bool rounded) {
            const Matrix& m = e.weights().matrix(id);
            if (x.ndim() != 2 || x.shape(1) != m.k || out_features != m.n ||
                (bias && (bias->ndim() != 1 || bias->shape(0) != m.n)))
              throw std::invalid_argument("multiply: a matrix of " + std::to_string(m.n) + " x " + std::to_string(m.k) +
                                          " takes x [rows, " + std::to_string(m.k) + "], out_features " +
                                          std::to_string(m.n) + " and no bias or one of " + std::to_string(m.n));
            const std::vector<float> y =
                e.multiply(id, x.data(), bias ? bias->data() : nullptr, (int)x.shape(0), gemm_algo_of(algo), rounded);
            return py::array_t<float>({x.shape(0), (py::ssize_t)m.n}, y.data());
          },
          py::arg("id"), py::arg("x"), py::arg("out_features"), py::arg("bias") = py::none(), py::arg("algo") = "any",
          py::arg("rounded") = false,
          "x w^T (+ bias) with one matrix, for tests. algo: any, mma, split_k, stream_k or prefill. "
          "rounded: the result is rounded to the matrix' 16-bit type, as ranks' partial sums are.")
      .def("stall", &CudaExecutor::stall, py::call_guard<py::gil_scoped_release>(),
           "Raises DeviceLost, as if a kernel's CTAs had waited in vain for each other: for tests.")
      .def(
          "multiply_experts",
          [](CudaExecutor& e, int id, const Floats& x, const Integers& chosen, const std::string& algo, int tile_rows,
             bool rounded) {
            const Matrix& m = e.weights().matrix(id);
            if (x.ndim() != 2 || x.shape(1) != m.k || chosen.ndim() != 2 || chosen.shape(0) != x.shape(0) ||
                chosen.shape(1) > kMaxTop)
              throw std::invalid_argument("multiply_experts: x [rows, " + std::to_string(m.k) +
                                          "] and chosen [rows, experts of each]");
            for (py::ssize_t i = 0; i < chosen.size(); i++)
              if (chosen.data()[i] < 0 || chosen.data()[i] >= m.experts)
                throw std::invalid_argument("multiply_experts: there are " + std::to_string(m.experts) + " experts");
            const int top = (int)chosen.shape(1);
            const std::vector<float> y = e.multiply_experts(id, x.data(), chosen.data(), (int)x.shape(0), top,
                                                            gemm_algo_of(algo), tile_rows, rounded);
            return py::array_t<float>({x.shape(0), (py::ssize_t)top, (py::ssize_t)m.n}, y.data());
          },
          py::arg("id"), py::arg("x"), py::arg("chosen"), py::arg("algo") = "any", py::arg("tile_rows") = 0,
          py::arg("rounded") = false,
          "[rows, experts of a row, n]: x times the matrices of a stack that are chosen for each row, for "
          "tests. rounded: to 16 bits, as entries of experts are.")
      .def(
          "sum_ranks",
          [](CudaExecutor& e, const Floats& parts, const Floats& y, const Floats& norm, const std::string& dtype,
             bool adds, const std::string& way) {
            if (parts.ndim() != 3 || y.ndim() != 2 || norm.ndim() != 1 || parts.shape(1) != y.shape(0) ||
                parts.shape(2) != y.shape(1) || norm.shape(0) != y.shape(1))
              throw std::invalid_argument("sum_ranks: parts [ranks, rows, width], y [rows, width], norm [width]");
            py::array_t<float> total({y.shape(0), y.shape(1)}), normed({y.shape(0), y.shape(1)});
            std::copy_n(y.data(), y.size(), total.mutable_data());
            e.sum_ranks(parts.data(), (int)parts.shape(0), (int)y.shape(0), (int)y.shape(1), norm.data(), dtype, adds,
                        way, total.mutable_data(), normed.mutable_data());
            return py::make_tuple(total, normed);
          },
          py::arg("parts"), py::arg("y"), py::arg("norm"), py::arg("dtype"), py::arg("adds"), py::arg("way") = "read",
          "(The sum of the ranks' parts, or that added to y; its norm, eps 1e-6), with all parts on this "
          "GPU, for tests. way: how ranks reach each other's parts: read, pushed, or host (by host memory).");
}

}  // namespace
}  // namespace as::cuda

PYBIND11_MODULE(_cuda, m) {
  using namespace as;
  using namespace as::cuda;
  m.doc() = "The CUDA backend.";
  py::module_::import("allspark_server._native");
  static PyObject* const device_lost =
      py::object(py::module_::import("allspark_server.runtime.native").attr("DeviceLost")).release().ptr();
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const DeviceLost& lost) { PyErr_SetString(device_lost, lost.what()); }
  });
  m.def(
      "check", [](int error) { check((cudaError_t)error, "a call"); }, py::arg("error"),
      "Raises what a call raises that has failed with a CUDA error of this number: for tests.");
  m.def("device_count", device_count, "Number of GPUs. Raises ValueError that says what to do if none can be used.");
  m.def(
      "matrix_bytes",
      [](int n, int k, const std::string& dtype, int group_size, int experts, const py::kwargs& layout) {
        const Matrix matrix = matrix_of(n, k, dtype, group_size, experts);
        group_of(dtype, group_size, layout);
        return matrix_bytes(matrix);
      },
      py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
      py::arg("experts") = 1);
  m.def(
      "widened_bytes",
      [](int n, int k, bool gated, int rows) { return widened_bytes(gated ? paired_rows(n) : n, k, gated, rows); },
      py::arg("out_features"), py::arg("in_features"), py::arg("gated"), py::arg("rows"),
      "Bytes of scratch memory that GEMMs of a quantized matrix take for so many rows. gated: it has "
      "gate and up rows.");
  m.def(
      "gated_delta_bytes",
      [](int key_heads, int group, int key_dim, int value_dim, int decays) {
        const PageBytes page = gated_delta_bytes({key_dim, value_dim, key_heads, key_heads * group, decays > 1});
        return std::make_pair(page.state, page.recent);
      },
      py::arg("key_heads"), py::arg("group"), py::arg("key_dim"), py::arg("value_dim"), py::arg("decays"),
      "As the CPU backend's.");
  m.def(
      "ssd_bytes",
      [](int heads, int groups, int state_dim, int head_dim) {
        const PageBytes page = gated_delta_bytes({state_dim, head_dim, groups, heads});
        return std::make_pair(page.state, page.recent);
      },
      py::arg("heads"), py::arg("groups"), py::arg("state_dim"), py::arg("head_dim"), "As the CPU backend's.");
  m.def(
      "causal_conv_bytes",
      [](int channels, int taps) {
        const PageBytes page = causal_conv_bytes(channels, taps);
        return std::make_pair(page.state, page.recent);
      },
      py::arg("channels"), py::arg("taps"), "As the CPU backend's.");
  m.def(
      "gated_delta_scratch",
      [](int key_heads, int heads, int key_dim, int decays, int rows, int slots) {
        return gated_delta_scratch({key_dim, 0, key_heads, heads, decays > 1}, rows, slots);
      },
      py::arg("key_heads"), py::arg("heads"), py::arg("key_dim"), py::arg("decays"), py::arg("rows"), py::arg("slots"),
      "Bytes that a gated_delta or ssd op takes for steps of so many rows of up to `slots` sequences. decays: of a "
      "value head.");
  m.def("padded_rows", padded_rows, py::arg("rows"), py::arg("most"),
        "The rows that a decode step of `rows` rows is padded to, if no step has more than `most`.");
  m.def(
      "span_bytes",
      [](int size, int dim, const std::string& dtype, bool whole) {
        return span_bytes(size, dim, cache_type_of(dtype), whole);
      },
      py::arg("span_size"), py::arg("head_dim"), py::arg("dtype"), py::arg("whole") = false,
      "As the CPU backend's. whole: of a program with attention in both directions.");
  m.def(
      "latent_span_bytes",
      [](int size, int latent_dim, int rope_dim, const std::string& dtype) {
        return latent_span_bytes(size, latent_dim, rope_dim, cache_type_of(dtype));
      },
      py::arg("span_size"), py::arg("latent_dim"), py::arg("rope_dim"), py::arg("dtype"), "As the CPU backend's.");
  m.def(
      "index_span_bytes",
      [](int size, int dim, const std::string& dtype) { return index_span_bytes(size, dim, cache_type_of(dtype)); },
      py::arg("span_size"), py::arg("dim"), py::arg("dtype"), "Bytes of a span of an indexer's keys, for one layer.");
  m.def(
      "indexer_bytes", [](int max_rows, int max_length) { return indexer_bytes(max_rows, max_length); },
      py::arg("max_rows"), py::arg("max_length"), "Bytes that indexers use for scores.");
  m.def(
      "latent_head_tiles", [](int heads) { return LatentHeads(heads).tiles; },
      "In latent attention, so many heads have partial results like this number of KV heads.");
  m.def(
      "partial_bytes", [](int head_dim) { return partial_floats(head_dim) * sizeof(float); },
      "Bytes that attention takes for partial results of a sequence, KV head and KV split.");
  m.def(
      "most_kv_splits",
      [](int sequences, int max_length, size_t split_bytes) {
        return most_kv_splits(sequences, max_length, split_bytes);
      },
      py::arg("sequences"), py::arg("max_length"), py::arg("split_bytes"),
      "The most KV splits of a step for whose partial results there is memory. split_bytes: of all KV heads.");
  m.attr("MOST_RANKS") = as::cuda::kMaxRanks;
  m.attr("MOST_DRAFTS") = as::kMostDrafts;
  m.def(
      "measure_roofline",
      [](int device) {
        const Roofline found = measure_roofline(device);
        return std::make_pair(found.read, found.bf16);
      },
      py::arg("device"), py::call_guard<py::gil_scoped_release>(),
      "(bytes/s that a GPU reads of its memory, multiplications and additions/s of a large product of bfloat16); takes "
      "40 ms and half a gigabyte.");
  m.attr("CUDA_VERSION") = CUDART_VERSION;
  m.def(
      "driver_version",
      [] {
        int version = 0;
        cudaDriverGetVersion(&version);
        return version;
      },
      "The CUDA version of the driver, as 13020 for 13.2; 0: there is no driver.");
  m.def(
      "memory_info",
      [](int device) {
        size_t free = 0, total = 0;
        check(cudaSetDevice(device), "choosing the GPU");
        check(cudaMemGetInfo(&free, &total), "asking for free memory");
        return std::make_pair(free, total);
      },
      py::arg("device"), py::call_guard<py::gil_scoped_release>(), "(free, all) bytes of a GPU's memory.");
  m.def("reaches_peer", reaches_peer, py::arg("device"), py::arg("other"),
        "Whether GPU `device` reaches the memory of GPU `other`. Raises ValueError if there is no such GPU.");
  m.def(
      "exchange_bytes",
      [](int world, int rows, int width, const std::string& dtype, int outputs, int vocab, bool by_host) {
        const auto bytes = [&](int rows) { return partial_bytes(rows, width, dtype != "float32"); };
        return exchange_bytes(world, bytes(rows), bytes(std::min(rows, kPushedRows)), outputs, vocab,
                              by_host || !may_reach_peers());
      },
      py::arg("world"), py::arg("rows"), py::arg("width"), py::arg("dtype"), py::arg("outputs") = 0,
      py::arg("vocab") = 0, py::arg("by_host") = false,
      "Bytes of a GPU's memory that a rank of `world` takes to exchange with the others, for sums of so many rows of "
      "this width "
      "with weights of this type, and to sample so many outputs from a vocabulary of this size.");
  py::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>> executor(
      m, "Executor", "A model's op list, weights and KV cache on one GPU.");
  executor.def(
      py::init([](int device, std::shared_ptr<LogitSampler> sampler, std::shared_ptr<Communicator> communicator,
                  const py::dict& costs) {
        return std::shared_ptr<CudaExecutor>(
            new CudaExecutor(device, std::move(sampler), std::move(communicator), costs_of(costs)), WithoutGil{});
      }),
      py::arg("device"), py::arg("sampler"), py::arg("communicator") = nullptr, py::arg("costs") = py::dict(),
      "communicator: of the other ranks of a group; the sampler must have it, too. costs: of measure_costs().");
  executor.def(
      "beside",
      [](const CudaExecutor& e, std::shared_ptr<LogitSampler> sampler, std::shared_ptr<Communicator> communicator) {
        return std::shared_ptr<CudaExecutor>(new CudaExecutor(e, std::move(sampler), std::move(communicator)),
                                             WithoutGil{});
      },
      py::arg("sampler"), py::arg("communicator") = nullptr,
      "An executor of another model on the same GPU; the two run in turn. communicator: of the other ranks, if it is "
      "divided; without it the model is whole.");
  executor.def("set_exchange", &CudaExecutor::set_exchange, py::arg("exchange"),
               "Sets the connected ExpertExchange of a mixed group, before allocate().");
  bind_kernel_choice(m);
  bind_adapters(m);
  bind_model<CudaExecutor>(executor);
  bind_weights(executor);
  bind_exact(executor);
  bind_expert_stream(executor);
  executor
      .def(
          "share",
          [](CudaExecutor& e, int max_rows, int max_outputs, double seconds, bool by_host) {
            std::string address;
            {
              py::gil_scoped_release release;
              address = e.share(max_rows, max_outputs ? max_outputs : max_rows, seconds, by_host);
            }
            return py::bytes(address);
          },
          py::arg("max_rows"), py::arg("max_outputs") = 0, py::arg("seconds") = kWaitSeconds,
          py::arg("by_host") = false,
          "After all ops are added: the address that other ranks connect() to, for steps of up to max_rows "
          "rows, of which max_outputs (0: all) have outputs; b'' with one rank. seconds: how long the GPU waits for "
          "another rank. by_host: by host memory, because GPUs do not reach each other's; the same for all ranks.")
      .def("connect", &CudaExecutor::connect, py::arg("addresses"), py::call_guard<py::gil_scoped_release>(),
           "Takes every rank's address, in rank order; before allocate().")
      .def(
          "allocate",
          [](CudaExecutor& e, int max_rows, int max_slots, int max_length, int span_size, int num_spans,
             const std::string& dtype, int max_outputs, int masks, bool graphs, int adapters, int adapter_rank,
             const std::string& adapter_dtype, std::vector<std::shared_ptr<CudaExecutor>> drafts, size_t partial_bytes,
             const std::string& short_chunks, bool given_rows) {
            py::gil_scoped_release release;
            Limits limits{max_rows,
                          max_outputs ? max_outputs : max_slots,
                          max_slots,
                          max_length,
                          span_size,
                          num_spans,
                          cache_type_of(dtype),
                          dtype16_of(dtype),
                          graphs,
                          partial_bytes,
                          short_chunks_of(short_chunks)};
            limits.given = given_rows;
            e.allocate(limits, masks, {adapters, adapter_rank, is_dtype16(adapter_dtype), dtype16_of(adapter_dtype)},
                       std::move(drafts));
          },
          py::arg("max_rows"), py::arg("max_slots"), py::arg("max_length"), py::arg("span_size"), py::arg("num_spans"),
          py::arg("cache_dtype"), py::arg("max_outputs") = 0, py::arg("masks") = 0, py::arg("graphs") = true,
          py::arg("adapters") = 0, py::arg("adapter_rank") = 0, py::arg("adapter_dtype") = "float32",
          py::arg("drafts") = py::list(), py::arg("partial_bytes") = kPartialBytes, py::arg("short_chunks") = "fastest",
          py::arg("given_rows") = false,
          "Compiles the program; then steps can run. graphs: replay decode steps as CUDA graphs; the bits "
          "are the same. adapters, adapter_rank, adapter_dtype: number, largest rank and type of adapters, "
          "if the program has ops for them. drafts: the executor of a draft model, or those of a draft head's "
          "layers, made by beside() and allocated with the same spans. partial_bytes: most memory for attention's "
          "partial results, smaller in tests. "
          "short_chunks: "
          "'fastest', or, for tests and benchmarks, the kernel that attends for chunks of a few dozen rows: 'decode' "
          "or "
          "'prefill'. given_rows: plans may give rows in place of embeddings, as they do for images.")
      .def("warm_up", &CudaExecutor::warm_up, py::arg("count"), py::call_guard<py::gil_scoped_release>(),
           "Between steps: runs up to `count` more of the steps that load all kernels and record the graphs of all "
           "sizes. Returns how many of them have run, of how many. Ranks call it together.")
      .def("unload", &CudaExecutor::unload, py::call_guard<py::gil_scoped_release>(),
           "Between steps: moves the weights to pinned host memory and frees the GPU's memory; the cache's "
           "content is lost.")
      .def("load", &CudaExecutor::load, py::call_guard<py::gil_scoped_release>(), "Undoes unload().")
      .def(
          "kernels", [](const CudaExecutor& e) { return to_list(e.kernels()); },
          "After allocate(): which kernels the program runs: dicts of op, shape, first and last row (None: no limit), "
          "kernel.")
      .def("expert_tiles", &CudaExecutor::expert_tiles, py::arg("row_set"),
           "(expert, entries) of each tile of a row set of experts in the last step, for benchmarks.")
      .def("profile", profile_of, "As the CPU backend's, over the few steps that are timed.")
      .def_property_readonly("device_name", [](const CudaExecutor& e) { return e.device().name(); })
      .def_property_readonly(
          "capability", [](const CudaExecutor& e) { return e.device().capability(); }, "90 is 9.0.")
      .def(
          "free_bytes", [](const CudaExecutor& e) { return e.device().free_bytes(); },
          "Free bytes of the GPU's memory.");
}
