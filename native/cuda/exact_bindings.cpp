#include "cuda/exact_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/panels.h"
#include "cuda/exact_layer.h"

namespace py = pybind11;

namespace as::cuda {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Integers = py::array_t<int, py::array::c_style | py::array::forcecast>;

ExactGate gate_of(const std::string& name) {
  if (name == "none") return ExactGate::none;
  if (name == "silu_mul") return ExactGate::silu;
  if (name == "gelu_tanh_mul") return ExactGate::gelu_tanh;
  if (name == "gelu_mul") return ExactGate::gelu;
  if (name == "clamped_silu_mul") return ExactGate::clamped_silu;
  throw std::invalid_argument("gate must be none, silu_mul, gelu_tanh_mul, gelu_mul or clamped_silu_mul, got " + name);
}

template <typename T>
Memory on_gpu(const T* values, size_t count) {
  Memory memory(std::max<size_t>(count, 1) * sizeof(T), "a test's values");
  if (count) check(cudaMemcpy(memory.as(), values, count * sizeof(T), cudaMemcpyHostToDevice), "copying values");
  check(cudaStreamSynchronize(nullptr), "copying values");  // cudaMemcpy may return earlier
  return memory;
}

// A stack of experts' matrices on the GPU.
struct OnGpu {
  std::vector<Memory> panels;
  Memory order, table, bias;
  ExactMatrix w;

  OnGpu(const Panels& p, const std::optional<Floats>& added) {
    if (!p.order.empty()) order = on_gpu(p.order.data(), p.order.size());
    w = exact_matrix(p.layout, p.order.empty() ? nullptr : order.as<int>());
    std::vector<const char*> addresses;
    for (const std::vector<uint8_t>& expert : p.experts) {
      panels.push_back(on_gpu(expert.data(), expert.size()));
      addresses.push_back(panels.back().as());
    }
    table = on_gpu(addresses.data(), addresses.size());
    if (!added) return;
    if ((size_t)added->size() != p.experts.size() * p.layout.n)
      throw std::invalid_argument("a bias must be [experts, " + std::to_string(p.layout.n) + "]");
    bias = on_gpu(added->data(), added->size());
  }
  const char* const* experts() const { return table.as<const char*>(); }
};

// Entries of rows with given experts.
struct Routed {
  Memory memory;
  Routing routing;
  int rows;

  Routed(const Integers& chosen, const float* shares, size_t experts, const Queue& queue) : rows((int)chosen.shape(0)) {
    const int top = (int)chosen.shape(1);
    for (py::ssize_t i = 0; i < chosen.size(); i++)
      if (chosen.data()[i] < 0 || chosen.data()[i] >= (int)experts)
        throw std::invalid_argument("there are " + std::to_string(experts) + " experts");
    memory = Memory(routing_bytes(rows, top, (int)experts), "rows of experts");
    routing.top = top, routing.end = (int)experts;
    place_routing(memory.as(), rows, (int)experts, routing);
    const auto copy = [&](void* to, const void* from) {
      check(cudaMemcpy(to, from, chosen.size() * 4, cudaMemcpyHostToDevice), "copying experts");
    };
    copy(routing.entry_of, chosen.data());
    if (shares) copy(routing.shares, shares);
    check(cudaStreamSynchronize(nullptr), "copying experts");
    group_entries(routing, rows, kExactTile, queue);
  }
};

void check_rows(const Floats& x, const Integers& chosen, const ExactMatrix& w) {
  if (x.ndim() != 2 || x.shape(1) != w.inputs || chosen.ndim() != 2 || chosen.shape(0) != x.shape(0) ||
      !chosen.size() || chosen.shape(1) > kMaxTop)
    throw std::invalid_argument("x must be [rows, " + std::to_string(w.inputs) +
                                "] and chosen [rows, experts of each], both with rows");
}

py::array_t<float> multiply_exact(CudaExecutor& e, const Panels& panels, const Floats& x, const Integers& chosen,
                                  const std::optional<Floats>& bias, const std::string& gate, float alpha,
                                  float limit) {
  e.device().use();
  const Queue queue = e.device().queue();
  const OnGpu own(panels, bias);
  check_rows(x, chosen, own.w);
  const Routed routed(chosen, nullptr, panels.experts.size(), queue);
  const int rows = routed.rows, top = routed.routing.top, entries = rows * top;
  ExactGemm p;
  p.w = own.w, p.gate = gate_of(gate), p.alpha = alpha, p.limit = limit, p.gathers = true, p.rows = rows;
  const int width = p.gate == ExactGate::none ? own.w.n : own.w.n / 2;
  const Memory in = on_gpu(x.data(), x.size()), quantized(exact_rows_bytes(own.w, rows), "integers"),
               out((size_t)entries * width * sizeof(float), "products");
  p.x = exact_rows(quantized.as(), own.w, rows), p.routing = routed.routing, p.experts = own.experts();
  p.bias = bias ? own.bias.as<float>() : nullptr, p.y = out.as<float>();
  quantize_exact(own.w, in.as<float>(), rows, p.x, queue);
  gemm_exact(p, entries, queue);
  e.device().wait();
  std::vector<float> made((size_t)entries * width);
  std::vector<int> entry_of(entries);
  check(cudaMemcpy(made.data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "copying products");
  check(cudaMemcpy(entry_of.data(), routed.routing.entry_of, entries * 4, cudaMemcpyDeviceToHost), "copying entries");
  py::array_t<float> y({rows, top, width});
  for (int i = 0; i < entries; i++)
    std::copy_n(made.data() + (size_t)entry_of[i] * width, width, y.mutable_data() + (size_t)i * width);
  return y;
}

py::array_t<float> exact_layer(CudaExecutor& e, const Panels& gate_up, const Panels& down, const Floats& x,
                               const Integers& chosen, const Floats& shares, const std::optional<Floats>& gate_up_bias,
                               const std::optional<Floats>& down_bias, const std::string& gate, float alpha,
                               float limit) {
  e.device().use();
  const Queue queue = e.device().queue();
  const OnGpu first(gate_up, gate_up_bias), second(down, down_bias);
  check_rows(x, chosen, first.w);
  if (shares.size() != chosen.size() || gate_up.experts.size() != down.experts.size() ||
      second.w.inputs != first.w.n / 2)
    throw std::invalid_argument("shares, gate_up and down do not fit each other");
  const Routed routed(chosen, shares.data(), gate_up.experts.size(), queue);
  ExactLayer layer{first.w, second.w};
  layer.gate_up_bias = gate_up_bias ? first.bias.as<float>() : nullptr;
  layer.down_bias = down_bias ? second.bias.as<float>() : nullptr;
  layer.gate = gate_of(gate), layer.alpha = alpha, layer.limit = limit;
  const int rows = routed.rows;
  const Memory in = on_gpu(x.data(), x.size()),
               scratch(exact_layer_bytes(layer, rows, routed.routing.top), "a layer's rows"),
               out((size_t)rows * second.w.n * sizeof(float), "sums");
  run_exact_layer(layer, {first.experts(), second.experts()}, in.as<float>(), rows, routed.routing, scratch.as(),
                  out.as<float>(), queue);
  e.device().wait();
  py::array_t<float> y({rows, second.w.n});
  check(cudaMemcpy(y.mutable_data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "copying sums");
  return y;
}

}  // namespace

void bind_exact(py::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>>& executor) {
  executor
      .def("multiply_exact", multiply_exact, py::arg("panels"), py::arg("x"), py::arg("chosen"),
           py::arg("bias") = py::none(), py::arg("gate") = "none", py::arg("alpha") = 0.0f, py::arg("limit") = 0.0f,
           "[rows, experts of a row, n]: x times the experts' matrices that are chosen for each row, with the bits of "
           "the CPU backend, for tests. panels: of the CPU's executor. gate: none, or the op that halves the columns.")
      .def("exact_layer", exact_layer, py::arg("gate_up"), py::arg("down"), py::arg("x"), py::arg("chosen"),
           py::arg("shares"), py::arg("gate_up_bias") = py::none(), py::arg("down_bias") = py::none(),
           py::arg("gate") = "silu_mul", py::arg("alpha") = 0.0f, py::arg("limit") = 0.0f,
           "[rows, n]: the same of a layer of experts, of which each row gets the sum with the weights `shares`.");
}

}  // namespace as::cuda
