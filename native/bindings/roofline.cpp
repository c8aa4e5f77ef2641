// Rates of memory and arithmetic of all threads together, and a meter that measures them in short slices.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <tuple>

#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"
#include "cpu/pool.h"

namespace py = pybind11;

namespace as {

namespace {

using MultiplyAdd = double (*)(long, float*);

// The kernel of the instruction set in use.
MultiplyAdd integer_multiply_add() {
  if (kernels().multiply_tiles) return [](long rounds, float*) { return kernels().multiply_tiles(rounds, true); };
  return kernels().integer_multiply_add;
}

// The greatest amount of work a second of all threads together in `repeats` turns. Each thread has `kUnits` units,
// and takes others' when it has none left: the processors of a virtual machine are not equally fast. work(thread,
// unit) returns the unit's amount.
constexpr int kUnits = 32;
template <typename F>
double greatest_rate(Pool& pool, int threads, int repeats, F&& work) {
  using Clock = std::chrono::steady_clock;
  double rate = 0;
  for (int r = 0; r < repeats; r++) {
    std::vector<std::atomic<int>> taken(threads);
    std::vector<double> amounts(threads);
    const auto start = Clock::now();
    pool.run([&](int t) {
      double sum = 0;
      for (int i = 0; i < threads; i++) {
        const int owner = (t + i) % threads;
        for (int unit; (unit = taken[owner]++) < kUnits;) sum += work(t, owner * kUnits + unit);
      }
      amounts[t] = sum;
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    double total = 0;
    for (double a : amounts) total += a;
    rate = std::max(rate, total / seconds);
  }
  return rate;
}

// Measures the roofline in slices of a few milliseconds, between which the caller can run steps.
class RooflineMeter {
 public:
  RooflineMeter(std::vector<int> cpus, int threads, size_t megabytes)
      : cpus_(std::move(cpus)),
        threads_(threads),
        memory_(megabytes << 20, "measuring bandwidth"),
        integers_(integer_multiply_add()),
        positions_(threads) {
    for (int t = 0; t < threads; t++) positions_[t] = begin(t);
  }

  // Measures for about `seconds`. Returns whether everything is measured.
  bool slice(double seconds) {
    if (!touched_) {
      timed(seconds, [&](int t) {
        const size_t n = std::min(kTouched, end(t) - positions_[t]);
        std::fill_n(memory_.as<float>() + positions_[t], n, 1.0f);
        positions_[t] += n;
        return (double)n;
      });
      touched_ = true;
      for (int t = 0; t < threads_; t++) touched_ = touched_ && positions_[t] == end(t);
      return false;
    }
    std::vector<float> keep(threads_);
    const int kind = done_ % kKinds;
    if (kind == 0) {
      rates_[0] = std::max(rates_[0], sizeof(float) * timed(seconds, [&](int t) {
                                        if (positions_[t] == end(t)) positions_[t] = begin(t);
                                        const size_t n = std::min(kRead, end(t) - positions_[t]);
                                        keep[t] += kernels().read_memory(memory_.as<float>() + positions_[t], n);
                                        positions_[t] += n;
                                        return (double)n;
                                      }));
    } else if (kind == 1) {
      rates_[1] = std::max(rates_[1], timed(seconds, [&](int t) {
                             return kernels().multiply_tiles ? kernels().multiply_tiles(10'000, false)
                                                             : kernels().multiply_add(100'000, &keep[t]);
                           }));
    } else if (integers_) {
      rates_[2] = std::max(rates_[2], timed(seconds, [&](int t) { return integers_(50'000, &keep[t]); }));
    }
    return ++done_ >= kKinds * kRepeats;
  }

  const double* rates() const { return rates_; }

 private:
  static constexpr int kKinds = 3, kRepeats = 4;
  // Floats of a unit: few enough for a thread to stop on time, and enough to make the start of one insignificant.
  static constexpr size_t kTouched = 1 << 18, kRead = 1 << 20;

  size_t begin(int t) const { return memory_.size() / sizeof(float) * t / threads_; }
  size_t end(int t) const { return begin(t + 1); }

  // Every thread calls work(t), which returns the amount of work done, until the time is up or nothing is left. Returns
  // the amount a second.
  template <typename F>
  double timed(double seconds, F&& work) {
    using Clock = std::chrono::steady_clock;
    Pool pool(threads_, cpus_, true);
    std::vector<double> amounts(threads_);
    const auto start = Clock::now(),
               stop = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    pool.run([&](int t) {
      double sum = 0;
      for (double done = 1; done > 0 && Clock::now() < stop; sum += done) done = work(t);
      amounts[t] = sum;
    });
    double total = 0;
    for (double a : amounts) total += a;
    return total / std::chrono::duration<double>(Clock::now() - start).count();
  }

  std::vector<int> cpus_;
  int threads_;
  Buffer memory_;
  MultiplyAdd integers_;
  std::vector<size_t> positions_;
  bool touched_ = false;
  int done_ = 0;
  double rates_[kKinds] = {0, 0, 0};
};

}  // namespace

void bind_roofline(py::module_& m) {
  py::class_<RooflineMeter>(m, "RooflineMeter",
                            "Measures what measure_roofline and measure_integer_rate measure, in short slices.")
      .def(py::init<std::vector<int>, int, size_t>(), py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1,
           py::arg("megabytes") = 512)
      .def("slice", &RooflineMeter::slice, py::arg("seconds"), py::call_guard<py::gil_scoped_release>(),
           "Measures for about `seconds`. Returns True when everything is measured.")
      .def(
          "rates",
          [](const RooflineMeter& self) { return std::make_tuple(self.rates()[0], self.rates()[1], self.rates()[2]); },
          "(bytes/s read, fp32 or with tiles bfloat16 operations/s, 8-bit operations/s or 0): the best of the slices "
          "so\n"
          "far.");
  m.def(
      "measure_roofline",
      [](std::vector<int> cpus, int threads, int repeats, size_t megabytes) {
        py::gil_scoped_release release;
        Pool pool(threads, std::move(cpus), true);
        Buffer memory(megabytes << 20, "measuring bandwidth");
        const size_t floats = memory.size() / sizeof(float), units = (size_t)kUnits * threads;
        const auto begin = [&](size_t unit) { return floats * unit / units; };
        pool.run([&](int t) {
          std::fill(memory.as<float>() + begin(t * kUnits), memory.as<float>() + begin((t + 1) * kUnits), 1.0f);
        });
        std::vector<float> keep(threads);
        const double bandwidth = greatest_rate(pool, threads, repeats, [&](int t, int unit) {
          const size_t n = begin(unit + 1) - begin(unit);
          keep[t] += kernels().read_memory(memory.as<float>() + begin(unit), n);
          return (double)(n * sizeof(float));
        });
        const double rate = greatest_rate(
            pool, threads, repeats, [&](int t, int) { return kernels().multiply_add(3'000'000 / kUnits, &keep[t]); });
        return std::make_pair(bandwidth, rate);
      },
      py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1, py::arg("repeats") = 5, py::arg("megabytes") = 512,
      "(bytes/s read from memory, fp32 operations/s) of all threads together: the best of `repeats`.");
  m.def(
      "measure_tile_roofline",
      [](std::vector<int> cpus, int threads, int repeats) {
        py::gil_scoped_release release;
        if (!kernels().multiply_tiles) return std::make_pair(0.0, 0.0);
        Pool pool(threads, std::move(cpus), true);
        const auto rate = [&](bool integers) {
          return greatest_rate(pool, threads, repeats,
                               [&](int, int) { return kernels().multiply_tiles(300'000 / kUnits, integers); });
        };
        const double floats = rate(false);
        return std::make_pair(floats, rate(true));
      },
      py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1, py::arg("repeats") = 5,
      "(bfloat16, 8-bit operations/s) of AMX tiles from registers, of all threads together; (0, 0) without AMX.");
  m.def(
      "measure_integer_rate",
      [](std::vector<int> cpus, int threads, int repeats) {
        py::gil_scoped_release release;
        const MultiplyAdd work = integer_multiply_add();
        if (!work) return 0.0;
        Pool pool(threads, std::move(cpus), true);
        std::vector<float> keep(threads);
        return greatest_rate(pool, threads, repeats, [&](int t, int) { return work(1'000'000 / kUnits, &keep[t]); });
      },
      py::arg("cpus") = std::vector<int>{}, py::arg("threads") = 1, py::arg("repeats") = 5,
      "8-bit multiplications and additions/s, summed in 32 bits, of all threads together: the best of `repeats`. 0 if\n"
      "the instruction set in use has none.");
}

}  // namespace as
