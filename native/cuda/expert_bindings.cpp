#include "cuda/expert_bindings.h"

#include <pybind11/stl.h>

#include <array>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace as::cuda {

void bind_expert_stream(py::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>>& executor) {
  executor.def(
      "stream_experts",
      [](CudaExecutor& e, std::shared_ptr<ExpertPanels> panels, int max_rows, int top, size_t bytes, int first_rows,
         size_t hot_bytes, int by_ranks, int split_rows) {
        {
          py::gil_scoped_release release;
          e.stream_experts(std::move(panels), {max_rows, top, bytes, first_rows, by_ranks, split_rows}, hot_bytes);
        }
        const ExpertStream& stream = *e.expert_stream();
        py::dict found;
        found["first_rows"] = stream.first_rows(), found["bandwidth"] = stream.bandwidth();
        found["hot_experts"] = e.hot_experts() ? e.hot_experts()->capacity() : 0;
        found["pinning_seconds"] = stream.pinning_seconds();
        return found;
      },
      py::arg("panels"), py::arg("max_rows"), py::arg("top"), py::arg("bytes"), py::arg("first_rows") = -1,
      py::arg("hot_bytes") = 0, py::arg("by_ranks") = 0, py::arg("split_rows") = 0,
      "Between set_exchange() and allocate(): in steps of at least first_rows rows (-1: chosen from measured speeds; "
      "0:\n"
      "never) the GPU computes the experts itself, whose matrices it copies from the ranks' memory (ExpertPanels).\n"
      "max_rows, top: rows of the largest step, and experts of a row. bytes: of the GPU's memory that may be taken.\n"
      "hot_bytes: more of it, for experts that are chosen most; not 0: ranks of experts return entries.\n"
      "by_ranks: how many experts of a layer ranks compute meanwhile, those with the fewest uses (-1: chosen from\n"
      "measured speeds), in steps of up to split_rows rows. Returns first_rows, bandwidth (bytes/s), hot_experts,\n"
      "pinning_seconds. Raises ValueError or RuntimeError that says\n"
      "why that is impossible; then ranks of experts compute all steps.");
  executor.def_property_readonly(
      "expert_uses",
      [](const CudaExecutor& e) {
        const HotExperts* const hot = e.allocated() ? e.hot_experts() : nullptr;
        return hot ? std::make_pair(hot->hits(), hot->entries()) : std::make_pair((int64_t)0, (int64_t)0);
      },
      "How many entries were of hot experts, and how many there were, in steps that ranks of experts computed, too.");
  executor.def_property_readonly(
      "expert_times",
      [](const CudaExecutor& e) {
        const CudaExecutor::ExpertTimes times = e.expert_times();
        std::vector<double> computed;
        for (const int64_t nanoseconds : times.computed) computed.push_back(1e-9 * (double)nanoseconds);
        return py::make_tuple(times.messages, 1e-9 * (double)times.waited, computed);
      },
      "How many messages to ranks of experts the GPU has sent, seconds until it saw all answers to each, and those in\n"
      "which each rank has computed them.");
  executor.def_property_readonly(
      "busier",
      [](const CudaExecutor& e) {
        std::vector<std::array<double, 32>> found;
        if (e.expert_stream())
          for (const ExpertRates::Rank& rank : e.expert_stream()->rates().ranks) found.push_back(rank.busier);
        return found;
      },
      "Of each rank of experts: how many times as long as when they were timed its experts take in steps of 2^i rows\n"
      "and more that the GPU shares.");
  executor.def_property_readonly(
      "split_rows", [](const CudaExecutor& e) { return e.expert_stream() ? e.expert_stream()->split_rows() : 0; },
      "How many of streamed_rows had some of their experts computed by ranks of experts meanwhile.");
  executor.def_property_readonly(
      "split_experts", [](const CudaExecutor& e) { return e.expert_stream() ? e.expert_stream()->split_experts() : 0; },
      "How many experts ranks of experts computed in these steps, over all layers.");
  executor.def_property_readonly(
      "streamed_rows",
      [](const CudaExecutor& e) { return e.allocated() && e.expert_stream() ? e.expert_stream()->computed_rows() : 0; },
      "How many rows, over all layers, had their experts computed by the GPU after stream_experts().");
}

}  // namespace as::cuda
