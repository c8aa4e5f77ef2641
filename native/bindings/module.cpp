// The Python module allspark_server._native.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <optional>

#include "bindings/bindings.h"
#include "cpu/executor.h"
#include "cpu/isa.h"

namespace py = pybind11;

namespace as {

void bind_program(py::module_& m);
void bind_sampler(py::module_& m);
void bind_kernels(py::module_& m);
void bind_ceilings(py::module_& m);

DType cache_dtype_of(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "int8") return DType::i8;
  if (name == "uint4") return DType::u4;
  throw std::invalid_argument("cache dtype must be float32, bfloat16, int8 or uint4, got " + name);
}

namespace {

Format format_of(const std::string& name) {
  const std::map<std::string, Format> formats = {{"float32", Format::f32}, {"bfloat16", Format::bf16},
                                                 {"int8", Format::int8},   {"int4", Format::int4},
                                                 {"w8a8", Format::w8a8},   {"w4a8", Format::w4a8}};
  const auto found = formats.find(name);
  if (found == formats.end())
    throw std::invalid_argument("dtype must be float32, bfloat16, int8, int4, w8a8 or w4a8, got " + name);
  return found->second;
}

SourceType source_of(const std::string& name, const py::array& a) {
  const bool two_bytes = a.itemsize() == 2;
  if (name == "F32" && a.dtype().kind() == 'f' && a.itemsize() == 4) return SourceType::f32;
  if (name == "F16" && two_bytes) return SourceType::f16;
  if (name == "BF16" && two_bytes) return SourceType::bf16;
  throw std::invalid_argument(
      "source must be F32 (float32), F16 (float16 or uint16) or BF16 (uint16) and match the array, got " + name);
}

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Scales = py::array_t<QuantizedScale, py::array::c_style>;

// The rows of a two-dimensional array of which columns are adjacent; its columns are all taken.
SourceRows source_rows(const py::array& a, const std::string& source) {
  if (a.ndim() != 2) throw std::invalid_argument("a matrix must be a 2-D array");
  const SourceType type = source_of(source, a);
  if (a.shape(1) > 1 && a.strides(1) != a.itemsize())
    throw std::invalid_argument("a matrix' columns must be adjacent in memory");
  if (a.strides(0) % a.itemsize()) throw std::invalid_argument("a matrix' rows must be whole elements apart");
  return {a.data(), type, (long)(a.strides(0) / a.itemsize()), 0, 0, (long)a.shape(1), (long)a.shape(1)};
}

template <typename T>
py::array_t<T> to_array(const std::vector<T>& v) {
  return py::array_t<T>(v.size(), v.data());
}

// Gives back a model's memory, which takes seconds when it is large, while other threads run Python.
struct WithoutGil {
  void operator()(Executor* executor) const {
    py::gil_scoped_release release;
    delete executor;
  }
};

// What a step gave: arrays over the rows that sample.
struct StepResult {
  py::array_t<int32_t> tokens, status, top_ids;
  py::array_t<float> logprobs, top_logprobs;
  py::object logits;
};

StepResult to_result(const StepOutput& out, bool want_logits) {
  const py::ssize_t n = (py::ssize_t)out.samples.size();
  StepResult r;
  r.tokens = py::array_t<int32_t>(n), r.status = py::array_t<int32_t>(n), r.logprobs = py::array_t<float>(n);
  r.top_ids = py::array_t<int32_t>({n, (py::ssize_t)kMaxTopLogprobs});
  r.top_logprobs = py::array_t<float>({n, (py::ssize_t)kMaxTopLogprobs});
  for (py::ssize_t i = 0; i < n; i++) {
    const SampleOutput& s = out.samples[i];
    r.tokens.mutable_at(i) = s.token;
    r.status.mutable_at(i) = (int32_t)s.status;
    r.logprobs.mutable_at(i) = s.logprob;
    std::copy_n(s.top_ids, kMaxTopLogprobs, r.top_ids.mutable_data(i));
    std::copy_n(s.top_logprobs, kMaxTopLogprobs, r.top_logprobs.mutable_data(i));
  }
  r.logits = py::none();
  if (want_logits) {
    const py::ssize_t width = std::max(out.logit_width, 1);
    r.logits = py::array_t<float>({(py::ssize_t)out.logits.size() / width, width}, out.logits.data());
  }
  return r;
}

void bind_executor(py::module_& m) {
  py::class_<StepResult>(m, "StepResult",
                         "What rank 0 gets of a step; rows in the order of the work items that sample.")
      .def_readonly("tokens", &StepResult::tokens, "int32 [n]; -1 where status is not 0")
      .def_readonly("status", &StepResult::status, "int32 [n]: 0, or why there is no token (describe_status)")
      .def_readonly("logprobs", &StepResult::logprobs, "float32 [n]: log softmax of the model's own logits")
      .def_readonly("top_ids", &StepResult::top_ids, "int32 [n, 20], -1 where unused")
      .def_readonly("top_logprobs", &StepResult::top_logprobs, "float32 [n, 20]")
      .def_readonly("logits", &StepResult::logits, "float32 [n, local vocabulary] if wanted, else None");
  m.def("describe_status", [](int status) { return std::string(describe((SampleStatus)status)); });

  py::class_<Executor, std::unique_ptr<Executor, WithoutGil>>(m, "Executor",
                                                              "A model's op list, weights and KV cache of one rank.")
      .def(py::init<int, int, std::shared_ptr<Window>, std::vector<int>, int>(), py::arg("rank") = 0,
           py::arg("world") = 1, py::arg("window") = nullptr, py::arg("cpus") = std::vector<int>{},
           py::arg("num_threads") = 1)
      .def(
          "add_matrix",
          [](Executor& e, int n, int k, const std::string& dtype, int group_size) {
            return e.add_matrix(n, k, format_of(dtype), group_size);
          },
          py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0)
      .def(
          "fill_matrix",
          [](Executor& e, int id, const py::array& a, const std::string& source, long row_offset, long column,
             std::optional<long> group_size) {
            SourceRows rows = source_rows(a, source);
            rows.row_offset = row_offset, rows.column = column;
            if (!group_size && rows.columns != e.in_features(id))
              throw std::invalid_argument("fill_matrix: " + std::to_string(rows.columns) +
                                          " columns do not fit a matrix of " + std::to_string(e.in_features(id)));
            const long group = group_size.value_or(e.group(id));
            rows.group = group ? group : rows.columns;
            const long count = a.shape(0);
            py::gil_scoped_release release;
            return e.fill_matrix(id, rows, count);
          },
          py::arg("id"), py::arg("array"), py::arg("source"), py::arg("row_offset") = 0, py::arg("column") = 0,
          py::arg("group_size") = py::none(),
          "Packs columns `column`... of rows into a matrix, converting to its type; returns how many values are NaN or "
          "infinite.\n"
          "group_size: by which the rows are quantized, 0 for whole ones; without it, the rows must be no longer than "
          "the matrix'.")
      .def(
          "fill_quantized",
          [](Executor& e, int id, Bytes q, Scales scales, Scales offsets, int bits, long columns, long group_size,
             long row_offset, long column) {
            const StoredRows rows{q.data(), scales.data(), offsets.data(),
                                  bits,     columns,       group_size ? group_size : columns};
            if ((bits != 8 && bits != 4) || columns < 1 || group_size < 0)
              throw std::invalid_argument("fill_quantized: bits, columns or group_size");
            const py::ssize_t count = q.ndim() == 2 ? q.shape(0) : -1;
            auto is = [&](const py::array& a, long width) {
              return a.ndim() == 2 && a.shape(0) == count && a.shape(1) == width;
            };
            if (!is(q, rows.row_bytes()) || !is(scales, rows.groups()) || !is(offsets, rows.groups()))
              throw std::invalid_argument("fill_quantized: q must be [rows, " + std::to_string(rows.row_bytes()) +
                                          "], scales and offsets [rows, " + std::to_string(rows.groups()) + "]");
            py::gil_scoped_release release;
            e.fill_quantized(id, rows, count, row_offset, column);
          },
          py::arg("id"), py::arg("q").noconvert(), py::arg("scales").noconvert(), py::arg("offsets").noconvert(),
          py::arg("bits"), py::arg("columns"), py::arg("group_size"), py::arg("row_offset") = 0, py::arg("column") = 0,
          "Packs columns `column`... of rows that quantize_rows made of rows of `columns` values.")
      .def("source_hash", &Executor::source_hash, py::arg("id"),
           "A hash of all bytes that fill_matrix has read into a matrix, whatever the threads and the instruction set.")
      .def(
          "quantize_rows",
          [](Executor& e, const py::array& a, const std::string& source, int bits, long group_size) {
            SourceRows rows = source_rows(a, source);
            if ((bits != 8 && bits != 4) || group_size < 0 || group_size % 2)
              throw std::invalid_argument("quantize_rows: bits or group_size");
            rows.group = group_size ? group_size : rows.columns;
            QuantizedRows out{nullptr, nullptr, nullptr, bits, rows.columns, rows.group};
            Bytes q({(py::ssize_t)a.shape(0), (py::ssize_t)out.row_bytes()});
            Scales scales({(py::ssize_t)a.shape(0), (py::ssize_t)out.groups()}),
                offsets({(py::ssize_t)a.shape(0), (py::ssize_t)out.groups()});
            out.q = q.mutable_data(), out.scales = scales.mutable_data(), out.offsets = offsets.mutable_data();
            const long count = a.shape(0);
            long bad;
            {
              py::gil_scoped_release release;
              bad = e.quantize(rows, out, count);
            }
            return py::make_tuple(q, scales, offsets, bad);
          },
          py::arg("array"), py::arg("source"), py::arg("bits"), py::arg("group_size"),
          "InstantQuant: (q uint8 [rows, columns], of 4 bits two in a byte, the even column in the lower half; scales "
          "and offsets\n"
          "[rows, groups]; how many values are NaN or infinite). A weight is recovered as scale * (q - 2^(bits - 1)) + "
          "offset.")
      .def("add_vector",
           [](Executor& e, py::array_t<float, py::array::c_style | py::array::forcecast> a) {
             return e.add_vector(std::vector<float>(a.data(), a.data() + a.size()));
           })
      .def("add_tensor", &Executor::add_tensor, py::arg("width"), py::arg("logit_rows") = false)
      .def("add_op", &Executor::add_op, py::arg("type"), py::arg("inputs"), py::arg("outputs"), py::arg("weights"),
           py::arg("attrs"))
      .def(
          "allocate",
          [](Executor& e, int max_rows, int max_slots, int max_length, int layers, int kv_heads, int head_dim,
             int span_size, int num_spans, const std::string& dtype) {
            py::gil_scoped_release release;
            e.allocate(max_rows, max_slots, max_length, layers, kv_heads, head_dim, span_size, num_spans,
                       cache_dtype_of(dtype));
          },
          py::arg("max_rows"), py::arg("max_slots"), py::arg("max_length"), py::arg("layers"), py::arg("kv_heads"),
          py::arg("head_dim"), py::arg("span_size"), py::arg("num_spans"), py::arg("cache_dtype"))
      .def(
          "step",
          [](Executor& e, const py::bytes& plan, bool want_logits) {
            const std::string bytes = plan;
            StepOutput out;
            {
              py::gil_scoped_release release;
              out = e.step(bytes, want_logits);
            }
            return to_result(out, want_logits);
          },
          py::arg("plan"), py::arg("want_logits") = false)
      .def(
          "multiply",
          [](Executor& e, int id, py::array_t<float, py::array::c_style | py::array::forcecast> x, int out_features,
             std::optional<py::array_t<float, py::array::c_style | py::array::forcecast>> bias) {
            const int n = e.out_features(id), k = e.in_features(id);
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
          [](const Executor& e, int id, long row) {
            py::array_t<float> out(e.in_features(id));
            e.read_row(id, row, out.mutable_data());
            return out;
          },
          py::arg("id"), py::arg("row"), "A row of a matrix as its format recovers it, for tests.")
      .def("set_profiling", &Executor::set_profiling)
      .def(
          "profile",
          [](const Executor& e) {
            py::list all;
            auto append = [&](size_t index, const std::string& name, const Counters& c) {
              py::dict d;
              d["index"] = index, d["op"] = name, d["count"] = c.count, d["min"] = c.least, d["max"] = c.most,
              d["sum"] = c.total;
              d["bytes"] = c.bytes, d["operations"] = c.operations;
              all.append(d);
            };
            const std::vector<Op>& ops = e.ops();
            for (size_t i = 0; i < ops.size(); i++) {
              append(i, ops[i].name, ops[i].alone);
              if (ops[i].fused.count) append(i, ops[i].name + "+" + ops[i + 1].name, ops[i].fused);
            }
            return all;
          },
          "Per op of the list (and once more where it was computed together with the next one, as \"op+next\"): its "
          "index there, name,\n"
          "how often, least, most and total seconds on thread 0; bytes and operations in total (profile.cpp).")
      .def(
          "memory",
          [](const Executor& e) {
            py::list all;
            for (const auto& [p, n] : e.memory()) all.append(py::make_tuple((uintptr_t)p, n));
            return all;
          },
          "(address, bytes) of weights and cache.")
      .def("weight_bytes", &Executor::weight_bytes)
      .def("cache_bytes", &Executor::cache_bytes);
}

void bind_window(py::module_& m) {
  py::class_<Window, std::shared_ptr<Window>>(m, "Window",
                                              "Shared memory between the ranks of a host (native/comm/window.h).")
      .def_static(
          "bytes_needed", [](int) { return sizeof(Segment); }, py::arg("size") = 1,
          "Bytes each rank allocates and zeroes.")
      .def(py::init<int, int, const std::vector<uintptr_t>&, bool, double, double>(), py::arg("rank"), py::arg("size"),
           py::arg("addresses"), py::arg("spin"), py::arg("timeout"), py::arg("beat_seconds") = 1.0)
      .def("close", &Window::close, py::call_guard<py::gil_scoped_release>(),
           "No more beats; before the memory goes away.")
      .def(
          "publish",
          [](Window& w, int kind, const py::bytes& payload) {
            const std::string bytes = payload;
            py::gil_scoped_release release;
            w.publish(kind, bytes);
          },
          py::arg("kind"), py::arg("payload"))
      .def(
          "wait_command",
          [](Window& w, double timeout) -> py::object {
            int kind = 0;
            std::string payload;
            bool got;
            {
              py::gil_scoped_release release;
              got = w.wait_command(timeout, kind, payload);
            }
            if (!got) return py::none();
            return py::make_tuple(kind, py::bytes(payload));
          },
          py::arg("timeout"))
      .def(
          "gather",
          [](Window& w, const py::bytes& payload) -> py::object {
            const std::string bytes = payload;
            std::vector<std::string> all;
            {
              py::gil_scoped_release release;
              all = w.gather(bytes);
            }
            if (w.rank() != 0) return py::none();
            py::list list;
            for (const auto& s : all) list.append(py::bytes(s));
            return list;
          },
          py::arg("payload"))
      .def("abort", &Window::abort, py::arg("message"), py::call_guard<py::gil_scoped_release>())
      .def("aborted",
           [](const Window& w) -> py::object {
             std::string message;
             if (!w.aborted(message)) return py::none();
             return py::str(message);
           })
      .def_property_readonly("rank", &Window::rank)
      .def_property_readonly("size", &Window::size);
}

}  // namespace
}  // namespace as

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels, executor, sampler and shared-memory collectives.";
  as::kernels();  // an unsuitable CPU is an error at import
  m.def("isa", [] { return std::string(as::kernels().name); }, "The instruction set in use.");
  m.def("isas", as::supported_isas, "Instruction sets this CPU has and this build has kernels for, best first.");
  m.def(
      "matrix_bytes",
      [](int n, int k, const std::string& dtype, int group_size) {
        return as::matrix_bytes(as::layout(n, k, as::kernels().rules, as::format_of(dtype), group_size));
      },
      py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
      "Memory that a matrix takes as this instruction set lays it out.");
  m.def(
      "span_bytes",
      [](int span_size, int head_dim, const std::string& dtype) {
        return as::span_layout(as::cache_dtype_of(dtype), span_size, head_dim, as::kernels().rules.bf16_pairs).bytes;
      },
      py::arg("span_size"), py::arg("head_dim"), py::arg("dtype"),
      "Memory of a span of the KV cache, for one layer and KV head.");
  m.def(
      "attention_bytes",
      [](int threads, int max_length, int head_dim, const std::string& dtype) {
        constexpr int kSpanSize = 128;  // of any size: what attention takes does not depend on it
        return as::Executor::attention_bytes(
            as::span_layout(as::cache_dtype_of(dtype), kSpanSize, head_dim, as::kernels().rules.bf16_pairs), threads,
            max_length);
      },
      py::arg("threads"), py::arg("max_length"), py::arg("head_dim"), py::arg("dtype"),
      "Memory that attention over a cache of that type takes for partial results.");
  m.def(
      "prepared_bytes",
      [](int k, const std::string& dtype, int group_size) {
        const as::Kernels& kernels = as::kernels();
        return kernels.prepared(as::layout(1, k, kernels.rules, as::format_of(dtype), group_size)).bytes;
      },
      py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
      "Scratch memory that a product with such a matrix takes for each row of activations.");
  as::bind_window(m);
  as::bind_executor(m);
  as::bind_program(m);
  as::bind_sampler(m);
  as::bind_kernels(m);
  as::bind_ceilings(m);
}
