// The Python module allspark_server._native.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "common/crc32.h"
#include "common/row_hash.h"
#include "cpu/isa.h"
#include "cpu/ops/attention_work.h"
#include "cpu/ops/entries.h"
#include "cpu/ops/indexer.h"
#include "cpu/weights.h"
#include "program/weight_spec.h"

namespace py = pybind11;

namespace as {

DType cache_dtype_of(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "int8") return DType::i8;
  if (name == "uint4") return DType::u4;
  throw std::invalid_argument("cache dtype must be float32, bfloat16, int8 or uint4, got " + name);
}

ScaleLayout scale_layout_of(const py::kwargs& fields) {
  ScaleLayout layout;
  for (const auto& [key, value] : fields) {
    const std::string name = py::cast<std::string>(key);
    if (name == "scales") layout.scales = scale_type_of(py::cast<std::string>(value));
    else if (name == "zeros") layout.zeros = zero_type_of(py::cast<std::string>(value));
    else if (name == "group_rows") layout.group_rows = py::cast<int>(value);
    else if (name == "permuted") layout.permuted = py::cast<bool>(value);
    else if (name == "super_group") layout.super_group = py::cast<int>(value);
    else if (name == "scale_bits") layout.scale_bits = py::cast<int>(value);
    else if (name == "center") layout.center = py::cast<int>(value);
    else throw py::type_error("a layout of scales has no field " + name);
  }
  return layout;
}

}  // namespace as

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels, executor, sampler and shared-memory collectives.";
  as::kernels();  // an unsupported CPU is an error at import
  m.def("isa", [] { return std::string(as::kernels().name); }, "The instruction set in use.");
  m.def("isas", as::supported_isas, "Instruction sets that both this CPU and this build support, best first.");
  m.def("uses_streams", as::uses_streams,
        "Whether AVX2's kernels multiply one row with several panels of weights in turn; by the processor at first.");
  m.def("use_streams", as::use_streams, py::arg("several"), "For tests and benchmarks, while nothing computes.");
  m.def("use_isa", as::use_isa, py::arg("name"),
        "Changes the instruction set in use, before any model or shared memory exists.");
  m.def(
      "crc32",
      [](const py::buffer& data, uint32_t crc) {
        const py::buffer_info info = data.request();
        if (info.ndim != 1 || info.strides[0] != info.itemsize)
          throw std::invalid_argument("crc32: the data must be contiguous, with one dimension");
        py::gil_scoped_release release;
        return as::crc32(info.ptr, (size_t)(info.size * info.itemsize), crc);
      },
      py::arg("data"), py::arg("crc") = 0, "The CRC-32 of bytes, as zlib.crc32.");
  m.def("shares_huge_pages", as::shares_huge_pages,
        "Whether memory that processes share can be in huge pages, as private memory is.");
  m.def(
      "matrix_bytes",
      [](int n, int k, const std::string& dtype, int group_size, int experts, int gathered, const py::kwargs& layout) {
        const as::Packed one = as::packed_of(as::kernels().rules, n / experts, k, dtype, group_size,
                                             as::scale_layout_of(layout), gathered);
        return as::matrix_bytes(one, experts);
      },
      py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0,
      py::arg("experts") = 1, py::arg("gathered") = 0,
      "Bytes of a matrix, or of a stack of `experts` matrices, in this instruction set's layout. gathered: columns of "
      "a\n"
      "matrix with an order (add_matrix). Keywords: the layout of its scales.");
  m.def(
      "span_bytes",
      [](int span_size, int head_dim, const std::string& dtype) {
        return as::span_layout(as::cache_dtype_of(dtype), span_size, head_dim, as::kernels().rules.bf16_pairs).bytes;
      },
      py::arg("span_size"), py::arg("head_dim"), py::arg("dtype"),
      "Bytes of a span of the KV cache, for one layer and KV head.");
  m.def(
      "latent_span_bytes",
      [](int span_size, int latent_dim, int rope_dim, const std::string& dtype) {
        const bool pairs = as::kernels().rules.bf16_pairs;
        return as::latent_layout(as::cache_dtype_of(dtype), span_size, latent_dim + rope_dim, latent_dim, pairs).bytes;
      },
      py::arg("span_size"), py::arg("latent_dim"), py::arg("rope_dim"), py::arg("dtype"),
      "Bytes of a span of a latent cache, for one layer.");
  m.def(
      "index_span_bytes",
      [](int span_size, int dim, const std::string& dtype) {
        return as::index_layout(as::cache_dtype_of(dtype), span_size, dim, as::kernels().rules.bf16_pairs).bytes;
      },
      py::arg("span_size"), py::arg("dim"), py::arg("dtype"), "Bytes of a span of an indexer's keys, for one layer.");
  m.def(
      "indexer_bytes",
      [](int threads, int max_length, int heads, int dim, const std::string& entries) {
        const bool pairs = as::kernels().rules.bf16_pairs;
        const as::SpanLayout layout =
            entries.empty() ? as::SpanLayout() : as::entry_layout(as::cache_dtype_of(entries), 1, dim, pairs);
        return as::indexer_bytes(threads, max_length, heads, dim, entries.empty() ? nullptr : &layout);
      },
      py::arg("threads"), py::arg("max_length"), py::arg("heads"), py::arg("dim"), py::arg("entries") = "",
      "Bytes that indexers use for scores. entries: the type of the cache, if entries are scored.");
  m.def(
      "attention_bytes",
      [](int threads, int max_length, int head_dim, const std::string& dtype, int rope_dim) {
        constexpr int kSpanSize = 128;  // any size: attention's memory does not depend on it
        const as::DType type = as::cache_dtype_of(dtype);
        const bool pairs = as::kernels().rules.bf16_pairs;
        return as::attention_bytes(
            rope_dim >= 0 ? as::packed_layout(as::latent_layout(type, kSpanSize, head_dim + rope_dim, head_dim, pairs),
                                              as::kBlockTokens, head_dim)
                          : as::span_layout(type, kSpanSize, head_dim, pairs),
            threads, max_length);
      },
      py::arg("threads"), py::arg("max_length"), py::arg("head_dim"), py::arg("dtype"), py::arg("rope_dim") = -1,
      "Bytes that attention over such a cache uses for partial results. rope_dim: of a latent cache.");
  m.def(
      "prepared_bytes",
      [](int k, const std::string& dtype, int group_size, int gathered, const py::kwargs& layout) {
        const as::Kernels& kernels = as::kernels();
        return kernels
            .converted_layout(
                as::packed_of(kernels.rules, 1, k, dtype, group_size, as::scale_layout_of(layout), gathered))
            .bytes;
      },
      py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0, py::arg("gathered") = 0,
      "Bytes of scratch memory that a GEMM with such a matrix uses for each row of activations.");
  m.def(
      "copy_span",
      [](const py::buffer& target, const py::buffer& source) {
        const py::buffer_info to = target.request(true), from = source.request();
        const size_t bytes = from.size * from.itemsize;
        if ((size_t)(to.size * to.itemsize) != bytes) throw std::invalid_argument("the buffers differ in size");
        const py::gil_scoped_release release;
        return as::copy_row_hash(static_cast<char*>(to.ptr), from.ptr, bytes, 0);
      },
      py::arg("target"), py::arg("source"),
      "Copies the content of a span of a host cache, without the GIL. Returns the checksum of the copy.");
  m.def(
      "span_checksum",
      [](const py::buffer& content) {
        const py::buffer_info of = content.request();
        const py::gil_scoped_release release;
        return as::row_hash(of.ptr, of.size * of.itemsize, 0);
      },
      py::arg("content"), "The checksum of the content of a span of a host cache.");
  as::bind_shared_memory(m);
  as::bind_token_ids(m);
  as::bind_executor(m);
  as::bind_program(m);
  as::bind_sampler(m);
  as::bind_kernels(m);
  as::bind_roofline(m);
}
