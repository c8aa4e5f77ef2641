// The window that ranks of a host share, for Python.
#include "comm/window.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace as {

void bind_window(py::module_& m) {
  py::class_<Window, std::shared_ptr<Window>>(m, "Window",
                                              "Shared memory between the ranks of a host (native/comm/window.h).")
      .def_static(
          "bytes_needed", [](int) { return sizeof(Segment); }, py::arg("size") = 1,
          "Bytes each rank allocates and zeroes.")
      .def(py::init<int, int, const std::vector<uintptr_t>&, bool, double, double>(), py::arg("rank"), py::arg("size"),
           py::arg("addresses"), py::arg("spin"), py::arg("timeout"), py::arg("beat_seconds") = 1.0)
      .def("close", &Window::close, py::call_guard<py::gil_scoped_release>(),
           "No more beats; before the memory goes away.")
      .def(
          "publish",
          [](Window& w, int kind, const py::bytes& payload) {
            const std::string bytes = payload;
            py::gil_scoped_release release;
            w.publish(kind, bytes);
          },
          py::arg("kind"), py::arg("payload"))
      .def(
          "wait_command",
          [](Window& w, double timeout) -> py::object {
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
          [](Window& w, const py::bytes& payload) -> py::object {
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
      .def("abort", &Window::abort, py::arg("message"), py::call_guard<py::gil_scoped_release>())
      .def("aborted",
           [](const Window& w) -> py::object {
             std::string message;
             if (!w.aborted(message)) return py::none();
             return py::str(message);
           })
      .def_property_readonly("rank", &Window::rank)
      .def_property_readonly("size", &Window::size);
}

}  // namespace as
