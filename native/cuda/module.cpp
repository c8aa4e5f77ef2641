// The Python module allspark_server._cuda: loaded when a GPU is asked for, after allspark_server._native, whose types
// it shares.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/step_result.h"
#include "cuda/executor.h"

namespace py = pybind11;

namespace as {
namespace cuda {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// Gives back a model's memory while other threads run Python.
struct WithoutGil {
  void operator()(CudaExecutor* executor) const {
    std::optional<py::gil_scoped_release> release;
    if (PyGILState_Check()) release.emplace();
    delete executor;
  }
};

Source source_of(const std::string& name, const py::array& a) {
  if (name == "F32" && a.dtype().kind() == 'f' && a.itemsize() == 4) return Source::f32;
  if (name == "F16" && a.itemsize() == 2) return Source::f16;
  if (name == "BF16" && a.itemsize() == 2) return Source::bf16;
  throw std::invalid_argument(
      "source must be F32 (float32), F16 (float16 or uint16) or BF16 (uint16) and match the array, got " + name);
}

std::vector<int64_t> fill_rows(CudaExecutor& e, int id, const std::vector<py::array>& arrays, const std::string& source,
                               int64_t row_offset, int64_t column, std::optional<int64_t>) {
  std::vector<HostRows> rows;
  for (const py::array& a : arrays) {
    const Source type = source_of(source, a);
    if (a.ndim() != 2) throw std::invalid_argument("a matrix must be a 2-D array");
    if ((a.shape(1) > 1 && a.strides(1) != a.itemsize()) || a.strides(0) % a.itemsize())
      throw std::invalid_argument("a matrix' columns must be adjacent in memory, its rows whole elements apart");
    rows.push_back({a.data(), type, a.shape(0), (int64_t)(a.strides(0) / a.itemsize()), a.shape(1), column});
  }
  py::gil_scoped_release release;
  return e.weights().fill_rows(id, rows, row_offset);
}

By by_name(const std::string& name) {
  if (name == "any") return By::any;
  if (name == "mma") return By::mma;
  if (name == "split") return By::split;
  if (name == "stream") return By::stream;
  if (name == "wide") return By::wide;
  throw std::invalid_argument("kernels are any, mma, split, stream and wide, got " + name);
}

bool cache_is_bf16(const std::string& name) {
  if (name != "float32" && name != "bfloat16")
    throw std::invalid_argument("caches of type " + name + " are not available on CUDA yet: float32 and bfloat16 are");
  return name == "bfloat16";
}

void bind_weights(py::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>>& executor) {
  executor
      .def(
          "add_matrix",
          [](CudaExecutor& e, int n, int k, const std::string& dtype, int, int experts, const std::vector<int>& order,
             const py::kwargs&) {
            if (experts != 1) throw std::invalid_argument("models with experts are not available on CUDA yet");
            if (!order.empty()) throw std::invalid_argument("columns in an order are not available on CUDA yet");
            return e.add_matrix(n, k, dtype);
          },
          py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
          py::arg("experts") = 1, py::arg("order") = std::vector<int>{},
          "Keywords, of the layout of scales, count for types that have some.")
      .def("fill_rows", fill_rows, py::arg("id"), py::arg("arrays"), py::arg("source"), py::arg("row_offset") = 0,
           py::arg("column") = 0, py::arg("group_size") = py::none(),
           "Columns `column`... of arrays' rows, one array after the other, become a matrix' rows; returns how many "
           "values of each are NaN or infinite.")
      .def(
          "fill_matrix",
          [](CudaExecutor& e, int id, const py::array& a, const std::string& source, int64_t row_offset,
             int64_t column) { return fill_rows(e, id, {a}, source, row_offset, column, {})[0]; },
          py::arg("id"), py::arg("array"), py::arg("source"), py::arg("row_offset") = 0, py::arg("column") = 0)
      .def(
          "source_hash", [](const CudaExecutor& e, int id) { return e.weights().source_hash(id); }, py::arg("id"),
          "The CPU backend's hash of all bytes that a matrix was filled with.")
      .def("add_vector",
           [](CudaExecutor& e, const Floats& a) {
             return e.add_vector(std::vector<float>(a.data(), a.data() + a.size()));
           })
      .def(
          "read_row",
          [](const CudaExecutor& e, int id, int64_t row) {
            const std::vector<float> values = e.weights().read_row(id, row);
            return py::array_t<float>((py::ssize_t)values.size(), values.data());
          },
          py::arg("id"), py::arg("row"))
      .def(
          "multiply",
          [](CudaExecutor& e, int id, const Floats& x, int out_features, const std::optional<Floats>& bias,
             const std::string& by) {
            const Matrix& m = e.weights().matrix(id);
            if (x.ndim() != 2 || x.shape(1) != m.k || out_features != m.n ||
                (bias && (bias->ndim() != 1 || bias->shape(0) != m.n)))
              throw std::invalid_argument("multiply: a matrix of " + std::to_string(m.n) + " x " + std::to_string(m.k) +
                                          " takes x [rows, " + std::to_string(m.k) + "], out_features " +
                                          std::to_string(m.n) + " and no bias or one of " + std::to_string(m.n));
            const std::vector<float> y =
                e.multiply(id, x.data(), bias ? bias->data() : nullptr, (int)x.shape(0), by_name(by));
            return py::array_t<float>({x.shape(0), (py::ssize_t)m.n}, y.data());
          },
          py::arg("id"), py::arg("x"), py::arg("out_features"), py::arg("bias") = py::none(), py::arg("by") = "any",
          "x w^T (+ bias) with one matrix, for tests. by: the kernel, of any, mma, split, stream and wide.");
}

}  // namespace
}  // namespace cuda
}  // namespace as

PYBIND11_MODULE(_cuda, m) {
  using namespace as;
  using namespace as::cuda;
  m.doc() = "The CUDA backend.";
  py::module_::import("allspark_server._native");
  m.def("device_count", device_count, "How many GPUs there are; ValueError that says what to do if none can be used.");
  m.def("matrix_bytes", [](int n, int k, const std::string& dtype) { return matrix_bytes(n, k, is_bf16(dtype)); });
  m.def("span_bytes",
        [](int size, int dim, const std::string& dtype) { return span_bytes(size, dim, cache_is_bf16(dtype)); });
  m.def(
      "partial_bytes", [](int head_dim) { return partial_floats(head_dim) * sizeof(float); },
      "Memory that attention takes for partial results, for each sequence, KV head and run of context.");
  m.attr("RUN_TOKENS") = kRunTokens;
  py::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>> executor(
      m, "Executor", "A model's op list, weights and KV cache on one GPU.");
  executor.def(py::init([](int device, std::shared_ptr<LogitSampler> sampler) {
                 return std::shared_ptr<CudaExecutor>(new CudaExecutor(device, std::move(sampler)), WithoutGil{});
               }),
               py::arg("device"), py::arg("sampler"));
  bind_weights(executor);
  executor
      .def(
          "add_row_set", [](CudaExecutor& e, int of, int times) { return e.program().add_row_set(of, times); },
          py::arg("of"), py::arg("times"))
      .def(
          "add_cache_group",
          [](CudaExecutor& e, const std::string& kind, int window) {
            return e.program().add_cache_group(cache_kind_of(kind), window);
          },
          py::arg("kind"), py::arg("window") = 0)
      .def(
          "add_tensor", [](CudaExecutor& e, int width, int rows) { return e.program().add_tensor(width, rows); },
          py::arg("width"), py::arg("rows") = kAllRows)
      .def(
          "add_op",
          [](CudaExecutor& e, const std::string& name, std::vector<int> inputs, std::vector<int> outputs,
             std::vector<int> weights, const AttributeValues& attributes) {
            e.program().add_op(name, std::move(inputs), std::move(outputs), std::move(weights), attributes);
          },
          py::arg("type"), py::arg("inputs"), py::arg("outputs"), py::arg("weights"), py::arg("attrs"))
      .def(
          "allocate",
          [](CudaExecutor& e, int max_rows, int max_slots, int max_length, int span_size, int num_spans,
             const std::string& dtype, int max_outputs, int masks, bool graphs) {
            py::gil_scoped_release release;
            e.allocate({max_rows, max_outputs ? max_outputs : max_slots, max_slots, max_length, span_size, num_spans,
                        cache_is_bf16(dtype), graphs},
                       masks);
          },
          py::arg("max_rows"), py::arg("max_slots"), py::arg("max_length"), py::arg("span_size"), py::arg("num_spans"),
          py::arg("cache_dtype"), py::arg("max_outputs") = 0, py::arg("masks") = 0, py::arg("graphs") = true,
          "Compiles what was added; steps can follow. graphs: record steps that decode; the bits are the same.")
      .def(
          "step",
          [](CudaExecutor& e, const py::bytes& plan, bool want_logits) {
            const std::string bytes = plan;
            StepOutput out;
            {
              py::gil_scoped_release release;
              out = e.step(bytes, want_logits);
            }
            return to_result(out, want_logits);
          },
          py::arg("plan"), py::arg("want_logits") = false)
      .def_property_readonly("masks", &CudaExecutor::masks, "Masks that draws may name; None where there are none.")
      .def_property_readonly("device_name", [](const CudaExecutor& e) { return e.device().name(); })
      .def_property_readonly(
          "capability", [](const CudaExecutor& e) { return e.device().capability(); }, "90 is 9.0.")
      .def(
          "free_bytes", [](const CudaExecutor& e) { return e.device().free_bytes(); }, "Of the GPU's memory, now.")
      .def("weight_bytes", [](const CudaExecutor& e) { return e.weights().bytes(); })
      .def("cache_bytes", &CudaExecutor::cache_bytes);
}
