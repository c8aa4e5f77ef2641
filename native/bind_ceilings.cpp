// Rates that only benchmarks need, beside measure_ceilings (bind_kernels.cpp).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>

#include "kernels/kernels.h"
#include "pool.h"

namespace py = pybind11;

namespace as {

#define AS_DECLARE(isa) namespace isa { double integer_multiply_add(long rounds, float* keep); }
#if defined(AS_HAVE_AVX2)
AS_DECLARE(avx2)
#endif
#if defined(AS_HAVE_AVX512)
AS_DECLARE(avx512)
#endif
#if defined(AS_HAVE_AVX512_VNNI)
AS_DECLARE(avx512_vnni)
#endif
#if defined(AS_HAVE_AVX512_BF16)
AS_DECLARE(avx512_bf16)
#endif
#if defined(AS_HAVE_NEON)
AS_DECLARE(neon)
#endif
#if defined(AS_HAVE_NEON_DOTPROD)
AS_DECLARE(neon_dotprod)
#endif
#if defined(AS_HAVE_SVE256)
AS_DECLARE(sve256)
#endif
#if defined(AS_HAVE_SVE512)
AS_DECLARE(sve512)
#endif

namespace {

using MultiplyAdd = double (*)(long, float*);

// That of the instruction set in use; null if it has none.
MultiplyAdd integer_multiply_add() {
  [[maybe_unused]] const char* isa = kernels().name;
#define AS_CHOOSE(name) \
  if (!std::strcmp(isa, #name)) return name::integer_multiply_add;
#if defined(AS_HAVE_AVX2)
  AS_CHOOSE(avx2)
#endif
#if defined(AS_HAVE_AVX512)
  AS_CHOOSE(avx512)
#endif
#if defined(AS_HAVE_AVX512_VNNI)
  AS_CHOOSE(avx512_vnni)
#endif
#if defined(AS_HAVE_AVX512_BF16)
  AS_CHOOSE(avx512_bf16)
#endif
#if defined(AS_HAVE_NEON)
  AS_CHOOSE(neon)
#endif
#if defined(AS_HAVE_NEON_DOTPROD)
  AS_CHOOSE(neon_dotprod)
#endif
#if defined(AS_HAVE_SVE256)
  AS_CHOOSE(sve256)
#endif
#if defined(AS_HAVE_SVE512)
  AS_CHOOSE(sve512)
#endif
  return nullptr;
}

}  // namespace

void bind_ceilings(py::module_& m) {
  m.def(
      "measure_integer_rate",
      [](std::vector<int> cpus, int threads, int repeats) {
        py::gil_scoped_release release;
        const MultiplyAdd work = integer_multiply_add();
        if (!work) return 0.0;
        Pool pool(threads, std::move(cpus), true);
        double rate = 0;
        for (int r = 0; r < repeats; r++) {
          std::vector<double> operations(threads);
          std::vector<float> keep(threads);
          const auto start = std::chrono::steady_clock::now();
          pool.run([&](int t) { operations[t] = work(1'000'000, &keep[t]); });
          double total = 0;
          for (double o : operations) total += o;
          rate = std::max(rate, total / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        return rate;
      },
      py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1, py::arg("repeats") = 5,
      "8-bit multiplications and additions/s, summed in 32 bits, of that many threads together: the best of `repeats`. 0 if the\n"
      "instruction set in use has none.");
}

}  // namespace as
