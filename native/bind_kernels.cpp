// Single kernels for tests and microbenchmarks; the engine does not use these.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>

#include "bf16.h"
#include "executor.h"

namespace py = pybind11;

namespace as {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

void bind_kernels(py::module_& m) {
  py::module_ k = m.def_submodule("kernels", "Single kernels of the instruction set in use, for tests.");
  k.def("rms_norm", [](Floats x, Floats w, float eps) {
    Floats y(x.size());
    kernels().rms_norm(x.data(), w.data(), y.mutable_data(), (int)x.size(), eps);
    return y;
  });
  k.def("silu_mul", [](Floats gate, Floats up) {
    Floats y(gate.size());
    kernels().silu_mul(gate.data(), up.data(), y.mutable_data(), (int)gate.size());
    return y;
  });
  k.def("rope", [](Floats x, Floats cosine, Floats sine) {
    Floats y(x.size());
    std::copy_n(x.data(), x.size(), y.mutable_data());
    kernels().rope(y.mutable_data(), cosine.data(), sine.data(), (int)cosine.size());
    return y;
  });
  k.def(
      "attend",
      [](Floats q, Floats keys, Floats values, std::vector<int> limits, float scale, int span_size, bool bf16) {
        // q [rows, dim], keys and values [tokens, dim] of one block; row r sees tokens [0, limits[r]).
        const int rows = (int)q.shape(0), dim = (int)q.shape(1), tokens = (int)keys.shape(0), padded = (dim + 15) / 16 * 16;
        if (rows > kTileRows || tokens > kBlockTokens || (int)limits.size() != rows) throw std::invalid_argument("at most 16 rows, 128 tokens, a limit a row");
        const size_t element = bf16 ? 2 : 4, span_elements = (size_t)span_size * (dim + padded);
        const int count = (tokens + span_size - 1) / span_size;
        std::vector<char> memory(span_elements * element * count, (char)0xff);  // NaN wherever nothing is written
        std::vector<const void*> spans(count);
        for (int s = 0; s < count; s++) spans[s] = memory.data() + span_elements * element * s;
        auto put = [&](size_t at, float x) {
          if (bf16) reinterpret_cast<uint16_t*>(memory.data())[at] = float_to_bf16(x);
          else reinterpret_cast<float*>(memory.data())[at] = x;
        };
        for (int t = 0; t < tokens; t++) {
          const size_t base = span_elements * (t / span_size);
          const int u = t % span_size;
          for (int d = 0; d < padded; d++) {
            if (d < dim) put(base + (size_t)(u / kKeyGroup * dim + d) * kKeyGroup + u % kKeyGroup, keys.at(t, d));
            put(base + (size_t)span_size * dim + (size_t)u * padded + d, d < dim ? values.at(t, d) : 0);
          }
        }
        AttentionTile a{};
        a.rows = rows, a.head_dim = dim, a.padded_dim = padded, a.scale = scale, a.span_size = span_size, a.tokens = tokens;
        Floats maximum(rows), sum(rows), out({rows, padded});
        for (int r = 0; r < rows; r++) a.q[r] = q.data(r, 0), a.limit[r] = limits[r];
        a.spans = spans.data(), a.v_offset = (size_t)span_size * dim, a.dtype = bf16 ? DType::bf16 : DType::f32;
        a.maximum = maximum.mutable_data(), a.sum = sum.mutable_data(), a.out = out.mutable_data();
        kernels().attend(a);
        return py::make_tuple(maximum, sum, out);
      },
      "One block of attention: (maximum [rows], sum [rows], weighted values [rows, padded dim]).");
  m.def(
      "measure_ceilings",
      [](std::vector<int> cpus, int threads, int repeats, size_t megabytes) {
        py::gil_scoped_release release;
        Pool pool(threads, std::move(cpus), true);
        Buffer memory(megabytes << 20, "measuring bandwidth");
        const size_t floats = memory.size() / sizeof(float);
        pool.run([&](int t) {
          for (size_t i = floats * t / threads; i < floats * (t + 1) / threads; i++) memory.as<float>()[i] = 1;
        });
        using Clock = std::chrono::steady_clock;
        double bandwidth = 0, rate = 0;
        for (int r = 0; r < repeats; r++) {
          std::vector<float> keep(threads);
          auto start = Clock::now();
          pool.run([&](int t) { keep[t] = kernels().read_memory(memory.as<float>() + floats * t / threads, floats / threads); });
          bandwidth = std::max(bandwidth, (double)memory.size() / std::chrono::duration<double>(Clock::now() - start).count());
          std::vector<double> operations(threads);
          start = Clock::now();
          pool.run([&](int t) { operations[t] = kernels().multiply_add(3'000'000, &keep[t]); });
          double total = 0;
          for (double o : operations) total += o;
          rate = std::max(rate, total / std::chrono::duration<double>(Clock::now() - start).count());
        }
        return std::make_pair(bandwidth, rate);
      },
      py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1, py::arg("repeats") = 5, py::arg("megabytes") = 512,
      "(bytes/s read from memory, fp32 operations/s) of that many threads together: the best of `repeats`.");
  m.def(
      "measure_tile_ceilings",
      [](std::vector<int> cpus, int threads, int repeats) {
        py::gil_scoped_release release;
        Pool pool(threads, std::move(cpus), true);
        double rates[2] = {0, 0};
        for (int r = 0; r < repeats && kernels().multiply_tiles; r++)
          for (int integers = 0; integers < 2; integers++) {
            std::vector<double> operations(threads);
            const auto start = std::chrono::steady_clock::now();
            pool.run([&](int t) { operations[t] = kernels().multiply_tiles(300'000, integers); });
            double total = 0;
            for (double o : operations) total += o;
            rates[integers] = std::max(rates[integers], total / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
          }
        return std::make_pair(rates[0], rates[1]);
      },
      py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1, py::arg("repeats") = 5,
      "(bfloat16, 8-bit operations/s) of AMX tiles from registers, of that many threads together; (0, 0) without AMX.");
}

}  // namespace as
