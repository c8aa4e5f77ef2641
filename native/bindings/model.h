// The bindings that models on CPUs and GPUs share. Both modules instantiate them.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/step_result.h"
#include "common/source_type.h"
#include "program/fusion.h"

namespace as {

// Frees a model without the GIL, because that takes seconds for a large model.
struct WithoutGil {
  template <class Executor>
  void operator()(Executor* executor) const {
    std::optional<py::gil_scoped_release> release;
    if (PyGILState_Check()) release.emplace();
    delete executor;
  }
};

// A two-dimensional array of a checkpoint's values; stride and step: elements from a row, or a column, to the next.
struct ArrayRows {
  const void* data;
  SourceType type;
  int64_t rows, columns, stride, step;
};
inline void check_aligned(const py::array& a) {
  if (!(a.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_))
    throw std::invalid_argument("an array must lie at a multiple of the size of its elements");
}

// source: the type as safetensors names it. Throws std::invalid_argument if the array does not match it.
inline ArrayRows array_rows(const py::array& a, const std::string& source) {
  SourceType type;
  if (source == "F32" && a.dtype().kind() == 'f' && a.itemsize() == 4) type = SourceType::f32;
  else if (source == "F16" && a.itemsize() == 2) type = SourceType::f16;
  else if (source == "BF16" && a.itemsize() == 2) type = SourceType::bf16;
  else
    throw std::invalid_argument(
        "source must be F32 (float32), F16 (float16 or uint16) or BF16 (uint16) and match the array, got " + source);
  if (a.ndim() != 2) throw std::invalid_argument("a matrix must be a 2-D array");
  if (a.strides(0) % a.itemsize() || a.strides(1) % a.itemsize())
    throw std::invalid_argument("a matrix' rows and columns must be whole elements apart in memory");
  check_aligned(a);
  const int64_t step = a.shape(1) > 1 ? a.strides(1) / a.itemsize() : 1;
  return {a.data(), type, a.shape(0), a.shape(1), (int64_t)(a.strides(0) / a.itemsize()), step};
}

// A row of profile(): ops that are computed together and what they cost. Counts has the members count, least, most,
// total, bytes and operations.
template <class Counts>
py::dict profile_row(const Program& program, const FusedOp& op, const Counts& c) {
  int index = op.parts[0];
  for (int part : op.parts)
    if (program.ops()[part].is(Op::linear)) index = part;
  return py::dict(py::arg("index") = index, py::arg("op") = op.name, py::arg("count") = c.count,
                  py::arg("min") = c.least, py::arg("max") = c.most, py::arg("sum") = c.total,
                  py::arg("bytes") = c.bytes, py::arg("operations") = c.operations);
}

// Building a program, running steps, adapters, and figures.
template <class Executor, class Class>
void bind_model(Class& model) {
  model
      .def(
          "add_row_set", [](Executor& e, int of, int times) { return e.program().add_row_set(of, times); },
          py::arg("of"), py::arg("times"))
      .def(
          "add_cache_group",
          [](Executor& e, const std::string& kind, int window) {
            return e.program().add_cache_group(cache_kind_of(kind), window);
          },
          py::arg("kind"), py::arg("window") = 0,
          "To be called before any op. Without it there is one group of full attention.")
      .def(
          "add_tensor", [](Executor& e, int width, int rows) { return e.program().add_tensor(width, rows); },
          py::arg("width"), py::arg("rows") = kAllRows)
      .def(
          "add_op",
          [](Executor& e, const std::string& name, std::vector<int> inputs, std::vector<int> outputs,
             std::vector<int> weights, const AttributeValues& attributes) {
            e.program().add_op(name, std::move(inputs), std::move(outputs), std::move(weights), attributes);
          },
          py::arg("type"), py::arg("inputs"), py::arg("outputs"), py::arg("weights"), py::arg("attrs"))
      .def("add_vector",
           [](Executor& e, const py::array_t<float, py::array::c_style | py::array::forcecast>& a) {
             return e.add_vector(std::vector<float>(a.data(), a.data() + a.size()));
           })
      .def(
          "source_hash", [](const Executor& e, int id) { return e.weights().source_hash(id); }, py::arg("id"),
          "A hash of all bytes that a matrix was filled with. Independent of threads and device.")
      .def("new_adapter", &Executor::new_adapter, "An empty Adapter. Any thread may fill it while steps run.")
      .def("set_adapter", &Executor::set_adapter, py::arg("index"), py::arg("adapter"),
           py::call_guard<py::gil_scoped_release>(),
           "Sets the adapter that plans name by this index; None removes it. To be called between steps, or while no "
           "step uses the index.")
      .def(
          "step",
          [](Executor& e, const py::bytes& plan, bool want_logits) {
            const std::string_view bytes = plan;  // Python's own, which do not change; they may be large
            StepOutput out;
            {
              py::gil_scoped_release release;
              out = e.step(bytes, want_logits);
            }
            return to_result(std::move(out), want_logits);
          },
          py::arg("plan"), py::arg("want_logits") = false)
      .def("set_profiling", &Executor::set_profiling, py::arg("on"))
      .def("allocate_host_cache", &Executor::allocate_host_cache, py::arg("spans"), py::arg("file") = -1,
           py::arg("offset") = 0, py::call_guard<py::gil_scoped_release>(),
           "Adds a second tier to the cache and the draft model's cache. To be called after allocate() and before any\n"
           "step. file: descriptor of a file of at least offset + host_cache_bytes(spans) bytes; -1: memory.")
      .def(
          "verify_host_cache",
          [](Executor& e) {
            std::pair<std::vector<SpanCopy>, int> found;
            {
              py::gil_scoped_release release;
              found = e.verify_host_cache();
            }
            py::dict held;
            for (const SpanCopy& copy : found.first)
              held[py::bytes(reinterpret_cast<const char*>(copy.key.data()), sizeof copy.key)] = copy.host;
            return py::make_tuple(held, found.second);
          },
          "({key: span of the second tier}, number of spans dropped because they differ from what was saved).")
      .def("host_cache_bytes", &Executor::host_cache_bytes, py::arg("spans"))
      .def_property_readonly("masks", &Executor::masks, "The Masks of the rank that samples, or None.")
      .def("weight_bytes", [](const Executor& e) { return e.weights().bytes(); })
      .def("cache_bytes", &Executor::cache_bytes);
}

}  // namespace as
