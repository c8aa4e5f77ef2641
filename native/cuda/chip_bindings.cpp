#include "cuda/chip_bindings.h"

#include <pybind11/stl.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/kernel_choice.h"
#include "cuda/kernels/gemm/mma_prefill_plan.h"
#include "cuda/memory/chip_costs.h"

namespace py = pybind11;

namespace as::cuda {
namespace {

// Calls work(name, first value, number of values) for each field.
template <typename Costs, typename Work>
void each_field(Costs& costs, const Work& work) {
  work("read", &costs.read, 1), work("graph_node", &costs.graph_node, 1), work("launch", &costs.launch, 1);
  work("mma", costs.mma, 3), work("mma_prefill", costs.mma_prefill, kMmaPrefillShapes);
  work("mma_prefill_row", &costs.mma_prefill_row, 1), work("widen", costs.widen, 2);
}

py::dict dict_of(const ChipCosts& costs) {
  py::dict fields;
  each_field(costs, [&](const char* name, const double* values, int count) {
    if (count == 1) fields[name] = *values;
    else fields[name] = std::vector<double>(values, values + count);
  });
  return fields;
}

}  // namespace

ChipCosts costs_of(const py::dict& fields) {
  ChipCosts costs;
  if (!fields.size()) return costs;
  size_t known = 0;
  each_field(costs, [&](const char* name, double* values, int count) {
    std::vector<double> found;
    try {
      const py::object given = fields.contains(name) ? py::object(fields[name]) : py::list();
      found = count == 1 && !py::isinstance<py::list>(given) ? std::vector{given.cast<double>()}
                                                             : given.cast<std::vector<double>>();
    } catch (const py::cast_error&) {}
    bool good = (int)found.size() == count;
    for (const double value : found) good &= std::isfinite(value) && value >= 0;
    if (!good)
      throw std::invalid_argument(std::string("costs: ") + name + " must be " + std::to_string(count) +
                                  (count == 1 ? " number" : " numbers") + " of at least 0");
    std::copy(found.begin(), found.end(), values), known++;
  });
  if (known != fields.size()) throw std::invalid_argument("costs: there is a field of an unknown name");
  return costs;
}

void bind_chips(py::module_& m) {
  py::class_<Chip>(m, "Chip", "What the choice among kernels depends on of a GPU.")
      .def(py::init([](int capability, int sms, int shared_bytes, int prefill_clusters, const py::dict& costs) {
             return Chip{capability, sms, shared_bytes, prefill_clusters, costs_of(costs)};
           }),
           py::arg("capability") = 90, py::arg("sms") = 132, py::arg("shared_bytes") = 227 << 10,
           py::arg("prefill_clusters") = 66, py::arg("costs") = py::dict(), "By default an H100 or H200.");
  m.def(
      "default_costs", [] { return dict_of({}); },
      "What kernels cost on an H100, in nanoseconds (kernels/common/chip.h). Other chips have these until they are "
      "measured.");
  m.def(
      "mma_rate",
      [](const py::dict& costs, int shared_bytes, int sms) { return mma_rate(costs_of(costs), shared_bytes, sms); },
      py::arg("costs"), py::arg("shared_bytes"), py::arg("sms"),
      "Operations a second of a chip by the best tile of mma.sync; a multiply-add is two.");
  m.attr("COSTS_VERSION") = 1;  // of the meaning of costs: raise it when kernels or fields change
  m.def(
      "chip_limits",
      [](int device) {
        const ChipLimits limits = limits_of(device);
        return py::dict(py::arg("name") = limits.name, py::arg("uuid") = limits.uuid,
                        py::arg("capability") = limits.capability, py::arg("sms") = limits.sms,
                        py::arg("shared_bytes") = limits.shared_bytes, py::arg("clock") = limits.clock,
                        py::arg("memory") = limits.memory);
      },
      py::arg("device"), "What the driver says of a GPU: GHz, bytes a nanosecond.");
  m.def(
      "measure_costs",
      [](int device) {
        MeasuredCosts found;
        {
          py::gil_scoped_release release;
          found = measure_costs(device);
        }
        return std::make_pair(dict_of(found.costs), found.doubt);
      },
      py::arg("device"),
      "(What kernels cost on a GPU, why that should not be kept). Takes about a third of a second and 0.4 GB.");
  m.def(
      "why_implausible",
      [](const py::dict& costs, int capability, int sms, int shared_bytes, double clock, double memory) {
        return why_implausible(costs_of(costs), {"", "", capability, sms, shared_bytes, clock, memory});
      },
      py::arg("costs"), py::arg("capability"), py::arg("sms"), py::arg("shared_bytes"), py::arg("clock") = 0.0,
      py::arg("memory") = 0.0, "Why these cannot be the costs of such a chip; '' if they can.");
}

}  // namespace as::cuda
