// Single kernels, for tests and microbenchmarks. The engine does not use these bindings.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <tuple>

#include "bindings/bindings.h"
#include "common/exact.h"
#include "cpu/executor.h"

namespace py = pybind11;

namespace as {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

namespace {

void expect(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

}  // namespace

void bind_kernels(py::module_& m) {
  py::module_ e = m.def_submodule("exact", "Elementary functions with the same bits everywhere (exact.h), for tests.");
  e.def("exp", &exact::exp);
  e.def("log", &exact::log);
  e.def("pow", &exact::pow);
  e.def("cos_sin", [](double x) {
    const exact::Angle angle = exact::cos_sin(x);
    return std::make_pair(angle.cosine, angle.sine);
  });
  py::module_ k = m.def_submodule("kernels", "Single kernels of the instruction set in use, for tests.");
  k.def("rms_norm", [](Floats x, Floats w, float eps) {
    expect(w.size() == x.size(), "rms_norm: x and w must have the same length");
    Floats y(x.size());
    kernels().rms_norm(x.data(), w.data(), y.mutable_data(), (int)x.size(), eps);
    return y;
  });
  // exact: the bits of every instruction set.
  const auto table = [](bool exact) -> const Kernels& { return exact ? *kernels().exact : kernels(); };
  const auto product = [&](const char* name, auto member) {
    k.def(
        name,
        [=](Floats gate, Floats up, bool exact) {
          expect(up.size() == gate.size(), (std::string(name) + ": gate and up must have the same length").c_str());
          Floats y(gate.size());
          (table(exact).*member)(gate.data(), up.data(), y.mutable_data(), (int)gate.size());
          return y;
        },
        py::arg("gate"), py::arg("up"), py::arg("exact") = false);
  };
  product("silu_mul", &Kernels::silu_mul);
  product("gelu_tanh_mul", &Kernels::gelu_tanh_mul);
  product("gelu_mul", &Kernels::gelu_mul);
  k.def(
      "clamped_silu_mul",
      [=](Floats gate, Floats up, float alpha, float limit, bool exact) {
        expect(up.size() == gate.size(), "clamped_silu_mul: gate and up must have the same length");
        Floats y(gate.size());
        table(exact).clamped_silu_mul(gate.data(), up.data(), y.mutable_data(), (int)gate.size(), alpha, limit);
        return y;
      },
      py::arg("gate"), py::arg("up"), py::arg("alpha"), py::arg("limit"), py::arg("exact") = false);
  k.def("rope", [](Floats x, Floats cosine, Floats sine) {
    expect(sine.size() == cosine.size() && x.size() == 2 * cosine.size(),
           "rope: x must be twice as long as cosine and sine");
    Floats y(x.size());
    std::copy_n(x.data(), x.size(), y.mutable_data());
    kernels().rope(y.mutable_data(), cosine.data(), sine.data(), (int)cosine.size());
    return y;
  });
  k.def(
      "attend",
      [](Floats q, Floats keys, Floats values, std::vector<int> limits, float scale, int span_size,
         const std::string& dtype) {
        // q [rows, dim], keys and values [tokens, dim] of one block; row r sees tokens [0, limits[r]).
        expect(q.ndim() == 2 && keys.ndim() == 2 && values.ndim() == 2, "attend: q, keys and values must be 2-D");
        const int rows = (int)q.shape(0), dim = (int)q.shape(1), tokens = (int)keys.shape(0);
        expect(rows >= 1 && rows <= kTileRows && tokens >= 1 && tokens <= kBlockTokens && (int)limits.size() == rows,
               "attend: at most 16 rows, 128 tokens, a limit a row");
        expect(keys.shape(1) == dim && values.shape(0) == tokens && values.shape(1) == dim,
               "attend: keys and values must be [tokens, dim]");
        const SpanLayout layout = span_layout(cache_dtype_of(dtype), span_size, dim, kernels().rules.bf16_pairs);
        const int count = (tokens + span_size - 1) / span_size;
        std::vector<char> memory(layout.bytes * count, (char)0xff);  // NaN where nothing is written
        std::vector<const void*> spans(count);
        for (int s = 0; s < count; s++) spans[s] = memory.data() + layout.bytes * s;
        for (int t = 0; t < tokens; t++)
          write_token(layout, memory.data() + layout.bytes * (t / span_size), t % span_size, keys.data(t, 0),
                      values.data(t, 0));
        AttentionTile a{};
        a.rows = rows, a.scale = scale, a.tokens = tokens, a.layout = &layout, a.spans = a.next = spans.data(),
        a.cold = true;
        std::vector<char> queries(query_bytes(layout));
        Floats maximum(rows), sum(rows), out({rows, layout.padded_dim});
        for (int r = 0; r < rows; r++) a.q[r] = q.data(r, 0), a.context[r] = limits[r];
        kernels().convert_queries(a, queries.data());
        a.converted = queries.data();
        a.maximum = maximum.mutable_data(), a.sum = sum.mutable_data(), a.out = out.mutable_data();
        {
          const AttentionScope scope(kernels());
          kernels().attend(&a, 1);
        }
        return py::make_tuple(maximum, sum, out);
      },
      "One block of attention: (maximum [rows], sum [rows], weighted values [rows, padded dim]).");
  k.def(
      "attend_seconds",
      [](int rows, int dim, int span_size, const std::string& dtype, int tokens, int heads, std::vector<int> cpus,
         int threads, int repeats) {
        // Each thread has its own part of `heads` caches of `tokens` tokens, laid out as an executor's: the heads of a
        // span are adjacent.
        const SpanLayout layout = span_layout(cache_dtype_of(dtype), span_size, dim, kernels().rules.bf16_pairs);
        const int spans = tokens / span_size, blocks = tokens / kBlockTokens;
        Buffer memory(layout.bytes * spans * heads, "measuring attention");
        std::vector<float> x((size_t)std::max(rows, 2) * dim);
        for (size_t i = 0; i < x.size(); i++) x[i] = (float)(i * 7919 % 1009) / 1009 - 0.5f;
        for (int t = 0; t < spans * span_size; t++)
          for (int h = 0; h < heads; h++)
            write_token(layout, memory.as() + layout.bytes * (t / span_size * heads + h), t % span_size, x.data(),
                        x.data() + dim);
        py::gil_scoped_release release;
        Pool pool(threads, std::move(cpus), true);
        double best = 1e9;
        for (int repeat = 0; repeat < repeats; repeat++) {
          const auto start = std::chrono::steady_clock::now();
          pool.run([&](int thread) {
            std::vector<float> out((size_t)rows * (layout.padded_dim + 2));
            const void *at[kBlockTokens / kKeyGroup], *next[kBlockTokens / kKeyGroup];
            AttentionTile a{};
            a.rows = rows, a.scale = 0.125f, a.tokens = kBlockTokens, a.layout = &layout, a.spans = at, a.next = next,
            a.cold = true;
            for (int r = 0; r < rows; r++) a.q[r] = x.data() + (size_t)r * dim, a.context[r] = kBlockTokens;
            std::vector<char> queries(query_bytes(layout));
            kernels().convert_queries(a, queries.data());
            a.converted = queries.data();
            a.maximum = out.data(), a.sum = out.data() + rows, a.out = out.data() + 2 * rows;
            const auto [b0, b1] = part(blocks * heads, thread, threads);
            const AttentionScope scope(kernels());
            for (int b = b0; b < b1; b++) {
              const int first = b % blocks * (kBlockTokens / span_size),
                        step = b % blocks + 1 < blocks ? kBlockTokens / span_size : 0;
              for (int s = 0; s < kBlockTokens / span_size; s++) {
                at[s] = memory.as() + layout.bytes * ((first + s) * heads + b / blocks);
                next[s] = memory.as() + layout.bytes * ((first + s + step) * heads + b / blocks);
              }
              kernels().attend(&a, 1);
            }
          });
          best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        return std::make_pair(best, (double)memory.size());
      },
      py::arg("rows"), py::arg("dim"), py::arg("span_size"), py::arg("dtype"), py::arg("tokens"), py::arg("heads"),
      py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1, py::arg("repeats") = 5,
      "(least seconds, bytes) of attending once to a whole cache with `heads` KV heads and `rows` query heads each.");
}

}  // namespace as
