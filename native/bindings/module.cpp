// The Python module allspark_server._native.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "cpu/isa.h"
#include "cpu/ops/attention_work.h"
#include "cpu/weights.h"

namespace py = pybind11;

namespace as {

DType cache_dtype_of(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "int8") return DType::i8;
  if (name == "uint4") return DType::u4;
  throw std::invalid_argument("cache dtype must be float32, bfloat16, int8 or uint4, got " + name);
}

}  // namespace as

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels, executor, sampler and shared-memory collectives.";
  as::kernels();  // an unsuitable CPU is an error at import
  m.def("isa", [] { return std::string(as::kernels().name); }, "The instruction set in use.");
  m.def("isas", as::supported_isas, "Instruction sets this CPU has and this build has kernels for, best first.");
  m.def(
      "matrix_bytes",
      [](int n, int k, const std::string& dtype, int group_size, int experts) {
        const as::Packed one = as::layout(n / experts, k, as::kernels().rules, as::format_of(dtype), group_size);
        return as::matrix_bytes(one, experts);
      },
      py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
      py::arg("experts") = 1,
      "Memory that a matrix, or a stack of those of so many experts, takes as this instruction set lays it out.");
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
        return as::attention_bytes(
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
