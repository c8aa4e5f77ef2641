// Python bindings of the shared memory between ranks.
#include "comm/shared_memory.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/panels.h"
#include "comm/expert_exchange.h"
#include "comm/expert_split.h"
#include "cpu/kernels/kernels.h"

namespace py = pybind11;

namespace as {

namespace {

using Floats = py::array_t<float, py::array::c_style>;
using Rows = py::array_t<uint8_t, py::array::c_style>;

// Runs call(thread) on `threads` threads and rethrows the first exception. Returns the seconds taken.
template <typename Call>
double in_threads(int threads, Call call) {
  py::gil_scoped_release release;
  std::vector<std::exception_ptr> errors(threads);
  std::vector<std::thread> others;
  const auto guarded = [&](int thread) {
    try {
      call(thread);
    } catch (...) { errors[thread] = std::current_exception(); }
  };
  const auto start = std::chrono::steady_clock::now();
  for (int t = 1; t < threads; t++) others.emplace_back(guarded, t);
  guarded(0);
  for (std::thread& t : others) t.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
  return seconds;
}

void check_matrix(const py::array& x) {
  if (x.ndim() != 2) throw std::invalid_argument("rows are a matrix, not " + std::to_string(x.ndim()) + "-dimensional");
}

}  // namespace

void bind_shared_memory(py::module_& m) {
  py::class_<Hosts, std::shared_ptr<Hosts>>(m, "Hosts",
                                            "The hosts of a group and MPI between them (native/comm/hosts.h).")
      .def(py::init([](int rank, std::vector<int> first, const std::vector<uintptr_t>& mpi) {
             if (mpi.size() != 5)
               throw std::invalid_argument(
                   "mpi: expected the addresses of MPI_Isend, MPI_Irecv and MPI_Test, a type and a communicator");
             const Mpi found{reinterpret_cast<decltype(Mpi::isend)>(mpi[0]),
                             reinterpret_cast<decltype(Mpi::irecv)>(mpi[1]),
                             reinterpret_cast<decltype(Mpi::test)>(mpi[2]), reinterpret_cast<void*>(mpi[3]),
                             reinterpret_cast<void*>(mpi[4])};
             return std::make_shared<Hosts>(rank, std::move(first), found, kAllLanes);
           }),
           py::arg("rank"), py::arg("first"), py::arg("mpi"))
      .def_property_readonly("size", &Hosts::size)
      .def_property_readonly("own", &Hosts::own)
      .def("receiver", &Hosts::receiver, py::arg("host"), py::arg("rank"));
  const py::class_<Communicator, std::shared_ptr<Communicator>> communicator(
      m, "Communicator", "Communication between the ranks of a group.");
  py::class_<SharedMemory, Communicator, std::shared_ptr<SharedMemory>>(
      m, "SharedMemory", "Shared memory between the ranks of a host (native/comm/shared_memory.h).")
      .def_static(
          "bytes_needed", [](int, int first) { return SharedMemory::bytes_needed(first); }, py::arg("size") = 1,
          py::arg("first") = 0, "Bytes that each rank allocates and zeroes.")
      .def(py::init([](int rank, int size, const std::vector<uintptr_t>& addresses, bool spin, double timeout,
                       double heartbeat_seconds, std::shared_ptr<Hosts> hosts, const std::vector<int>& sockets,
                       int first) {
             return std::make_shared<SharedMemory>(rank, size, addresses, spin, timeout, kernels().sum_partials,
                                                   heartbeat_seconds, std::move(hosts), sockets, first);
           }),
           py::arg("rank"), py::arg("size"), py::arg("addresses"), py::arg("spin"), py::arg("timeout"),
           py::arg("heartbeat_seconds") = 1.0, py::arg("hosts") = nullptr, py::arg("sockets") = std::vector<int>(),
           py::arg("first") = 0, "first: how many first ranks may also sum by themselves, the same on all ranks.")
      .def_property_readonly("rank", &SharedMemory::rank)
      .def_property_readonly("size", &SharedMemory::size, "The number of ranks.")
      .def_property_readonly("exchange_seconds", &SharedMemory::exchange_seconds,
                             "Seconds that thread 0 has spent in the exchanges of steps.")
      .def_property_readonly("wait_seconds", &SharedMemory::wait_seconds,
                             "The part of them spent waiting for other ranks.")
      .def("first_ranks", &SharedMemory::first_ranks, py::arg("count"), py::keep_alive<0, 1>(),
           "The first ranks alone, for the collectives of what they compute. Each call returns the same object.")
      .def_property_readonly("first_count", &SharedMemory::first_count,
                             "How many ranks first_ranks() is for; 0: there is no memory for it.")
      .def("close", &SharedMemory::close, py::call_guard<py::gil_scoped_release>(),
           "Stops the heartbeats. Must be called before the memory is freed.")
      .def(
          "publish",
          [](SharedMemory& w, int kind, const py::bytes& payload) {
            const std::string bytes = payload;
            py::gil_scoped_release release;
            w.publish(kind, bytes);
          },
          py::arg("kind"), py::arg("payload"))
      .def(
          "wait_command",
          [](SharedMemory& w, double timeout) -> py::object {
            int kind = 0;
            std::string payload;
            bool got;
            {
              py::gil_scoped_release release;
              got = w.wait_command(timeout, kind, payload);
            }
            if (!got) return py::none();
            return py::make_tuple(kind, py::bytes(payload));
          },
          py::arg("timeout"))
      .def(
          "gather",
          [](SharedMemory& w, const py::bytes& payload) -> py::object {
            const std::string bytes = payload;
            std::vector<std::string> all;
            {
              py::gil_scoped_release release;
              all = w.gather(bytes);
            }
            if (w.rank() != 0) return py::none();
            py::list list;
            for (const auto& s : all) list.append(py::bytes(s));
            return list;
          },
          py::arg("payload"))
      .def(
          "broadcast",
          [](SharedMemory& w, std::string bytes) {
            {
              py::gil_scoped_release release;
              w.broadcast(bytes);
            }
            return py::bytes(bytes);
          },
          py::arg("payload") = std::string(), "Returns rank 0's bytes on every rank.")
      .def(
          "all_reduce",
          [](SharedMemory& w, Floats& x, int threads, int repeats) {
            float* data = x.mutable_data();
            const size_t n = x.size();
            return in_threads(threads, [&](int thread) {
              for (int i = 0; i < repeats; i++) w.all_reduce(data, n, thread, threads);
            });
          },
          py::arg("x").noconvert(), py::arg("threads") = 1, py::arg("repeats") = 1,
          "Replaces x (float32) by its sum over the ranks, with `threads` threads. Returns seconds.")
      .def(
          "reduce_scatter_rows",
          [](SharedMemory& w, Floats& x, int threads) {
            check_matrix(x);
            float* data = x.mutable_data();
            const size_t rows = x.shape(0), width = x.shape(1);
            return in_threads(threads, [&](int thread) { w.reduce_scatter_rows(data, rows, width, thread, threads); });
          },
          py::arg("x").noconvert(), py::arg("threads") = 1,
          "Replaces this rank's rows of x by their sums over the ranks.")
      .def(
          "all_gather_rows",
          [](SharedMemory& w, Rows& x, int threads) {
            check_matrix(x);
            uint8_t* data = x.mutable_data();
            const size_t rows = x.shape(0), bytes = x.shape(1);
            return in_threads(threads, [&](int thread) { w.all_gather_rows(data, rows, bytes, thread, threads); });
          },
          py::arg("x").noconvert(), py::arg("threads") = 1, "Fills in the other ranks' rows of x (uint8).")
      .def(
          "rows_of", [](const SharedMemory& w, size_t rows) { return w.rows_of(rows, w.rank()); }, py::arg("rows"),
          "The half-open range of scattered rows that belongs to this rank.")
      .def("abort", &SharedMemory::abort, py::arg("message"), py::call_guard<py::gil_scoped_release>())
      .def("aborted",
           [](const SharedMemory& w) -> py::object {
             std::string message;
             if (!w.aborted(message)) return py::none();
             return py::str(message);
           })
      .def_property_readonly("rank", &SharedMemory::rank)
      .def_property_readonly("size", &SharedMemory::size);
  py::class_<ExpertExchange, std::shared_ptr<ExpertExchange>>(
      m, "ExpertExchange", "What the ranks of a mixed group exchange (native/comm/expert_exchange.h).")
      .def(py::init([](std::shared_ptr<SharedMemory> ranks, int rows, int width, int top, int sum_width, int entry_rows,
                       bool by_gpu, int model_ranks) {
             return std::make_shared<ExpertExchange>(
                 std::move(ranks), ExpertShape{rows, width, top, sum_width, entry_rows}, by_gpu, model_ranks);
           }),
           py::arg("shared_memory"), py::arg("rows"), py::arg("width"), py::arg("top"), py::arg("sum_width"),
           py::arg("entry_rows") = 0, py::arg("by_gpu") = false, py::arg("model_ranks") = 1,
           "shared_memory: of all ranks, the first of which computes the model and sends messages; model_ranks - 1\n"
           "others compute it, too, before those of experts. rows, width, top, sum_width: of the largest message.\n"
           "by_gpu: the model's rank sends from a GPU.")
      .def_static(
          "bytes_needed",
          [](int rows, int width, int top, int sum_width, bool holds_experts, int entry_rows) {
            return ExpertExchange::bytes_needed({rows, width, top, sum_width, entry_rows}, holds_experts);
          },
          py::arg("rows"), py::arg("width"), py::arg("top"), py::arg("sum_width"), py::arg("holds_experts"),
          py::arg("entry_rows") = 0, "Bytes of shared memory that a rank allocates.")
      .def_property_readonly("address", [](const ExpertExchange& e) { return py::bytes(e.address()); })
      .def("connect", &ExpertExchange::connect, py::arg("addresses"), "Opens the memory of all ranks.")
      .def_property_readonly("messages", &ExpertExchange::messages,
                             "How many messages this rank has sent or taken, without those that a GPU sends.")
      .def_property_readonly("messages_rows", &ExpertExchange::messages_rows, "How many rows these had.")
      .def("end_step", &ExpertExchange::end_step,
           "Ends a step that runs without a plan: ranks of experts return from it.");
  py::class_<ExpertRates>(m, "ExpertRates", "What a GPU and ranks of experts compute of a step (comm/expert_split.h).")
      .def(py::init([](const std::vector<std::tuple<int, int, double, std::array<double, kTimings>>>& ranks,
                       double bandwidth, int experts, int top, double row_bytes) {
             ExpertRates rates;
             rates.bandwidth = bandwidth, rates.experts = experts, rates.top = top, rates.row_bytes = row_bytes;
             for (const auto& [begin, end, bytes, seconds] : ranks) {
               ExpertRates::Rank& rank = rates.ranks.emplace_back();
               rank.begin = begin, rank.end = end, rank.bytes = bytes;
               std::copy(seconds.begin(), seconds.end(), rank.seconds);
             }
             return rates;
           }),
           py::arg("ranks"), py::arg("bandwidth"), py::arg("experts"), py::arg("top"), py::arg("row_bytes"),
           "ranks: of each its experts [begin, end), the bytes of one, and the seconds that one takes with 4, 16, 64 "
           "and 256 rows.\n"
           "bandwidth: bytes/s of copies. experts, top: of a layer, and of a row. row_bytes: of a row in messages.")
      .def("first_rows", &ExpertRates::first_rows, py::arg("shared"))
      .def(
          "learn",
          [](ExpertRates& rates, int rank, int rows, double took, double timed) {
            rates.ranks.at(rank).learn(rows, took, timed);
          },
          py::arg("rank"), py::arg("rows"), py::arg("took"), py::arg("timed"),
          "After a shared step: seconds that a rank took for its part, and would have by the times that were measured.")
      .def(
          "least_used",
          [](const ExpertRates& rates, int rows, const std::vector<float>& uses, const std::vector<bool>& present) {
            if ((int)uses.size() != rates.experts || (!present.empty() && (int)present.size() != rates.experts))
              throw std::invalid_argument("least_used: uses and present are of " + std::to_string(rates.experts) +
                                          " experts");
            const std::vector<char> flags(present.begin(), present.end());
            ExpertRates::Share share = rates.least_used(rows, uses.data(), flags.empty() ? nullptr : flags.data());
            return std::make_pair(std::move(share.experts), std::move(share.seconds));
          },
          py::arg("rows"), py::arg("uses"), py::arg("present") = std::vector<bool>{},
          "Experts that ranks compute, and the seconds of each rank for its own by the times that were measured.");
  py::class_<ExpertPanels, std::shared_ptr<ExpertPanels>>(
      m, "ExpertPanels", "The matrices of ranks of experts in their memory (native/comm/expert_panels.h).")
      .def(py::init<const std::vector<std::string>&>(), py::arg("addresses"),
           "addresses: of Executor.describe_experts() of all ranks of experts, in order.")
      .def_property_readonly("ranks", &ExpertPanels::ranks)
      .def_property_readonly("layers", &ExpertPanels::layers)
      .def_property_readonly(
          "bytes",
          [](const ExpertPanels& p) {
            size_t all = 0;
            for (int rank = 0; rank < p.ranks(); rank++) all += p.matrices_bytes(rank);
            return all;
          },
          "Of all matrices.")
      .def(
          "seconds",
          [](const ExpertPanels& p, int rank) {
            py::dict found;
            for (int i = 0; i < kTimings; i++) found[py::int_(kTimedRows[i])] = p.seconds(rank, i);
            return found;
          },
          py::arg("rank"), "How long an expert takes on a rank, by its number of rows.")
      .def(
          "panels",
          [](const ExpertPanels& p, int rank, int layer, bool down) {
            if (rank < 0 || rank >= p.ranks() || layer < 0 || layer >= p.layers())
              throw py::index_error("there is no such layer of experts");
            const ExpertLayer& of = p.layer(rank, layer);
            const ExpertStack& stack = down ? of.down : of.gate_up;
            Panels found{stack.layout, {}, {}};
            for (int e = 0; e < of.experts(); e++) {
              const char* const data = p.matrices(rank) + stack.panels + e * stack.bytes();
              found.experts.emplace_back(data, data + stack.bytes());
            }
            if (const int* order = p.order(rank, stack)) found.order.assign(order, order + stack.layout.k);
            return found;
          },
          py::arg("rank"), py::arg("layer"), py::arg("down"),
          "A copy of a layer's matrices of gate and up, or of down, as the rank has them: Panels.")
      .def(
          "bias",
          [](const ExpertPanels& p, int rank, int layer, bool down) -> py::object {
            const ExpertLayer& of = p.layer(rank, layer);
            const ExpertStack& stack = down ? of.down : of.gate_up;
            const float* const bias = p.bias(rank, stack);
            if (!bias) return py::none();
            return py::array_t<float>({(py::ssize_t)of.experts(), (py::ssize_t)stack.layout.n}, bias);
          },
          py::arg("rank"), py::arg("layer"), py::arg("down"), "float32 [experts, n], or None.");
}

}  // namespace as
