// Lists of token ids: a conversation has tens of thousands, and each loop in Python takes a millisecond.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "common/blake2b.h"

namespace py = pybind11;

namespace as {
namespace {

constexpr Py_ssize_t kKeyBytes = 16;
constexpr size_t kManyIds = 1 << 17;  // are hashed in 2 ms

// Throws TypeError or OverflowError unless all of [begin, end) are ints of 32 bits.
void read_ids(const py::list& ids, Py_ssize_t begin, Py_ssize_t end, int32_t* to) {
  for (Py_ssize_t i = begin; i < end; i++) {
    const long id = PyLong_AsLong(PyList_GET_ITEM(ids.ptr(), i));
    if (id == -1 && PyErr_Occurred()) throw py::error_already_set();
    if (id < INT_MIN || id > INT_MAX) {
      PyErr_Format(PyExc_OverflowError, "id %ld at place %zd is beyond 32 bits", id, i);
      throw py::error_already_set();
    }
    *to++ = (int32_t)id;
  }
}

bool ids_below(const py::list& ids, long limit) {
  const Py_ssize_t count = PyList_GET_SIZE(ids.ptr());
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* const id = PyList_GET_ITEM(ids.ptr(), i);
    if (!PyLong_CheckExact(id)) return false;
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(id, &overflow);
    if (overflow || value < 0 || value >= limit) return false;
  }
  return true;
}

py::bytes id_bytes(const py::list& ids) {
  const Py_ssize_t count = PyList_GET_SIZE(ids.ptr());
  py::bytes packed = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, count * sizeof(int32_t)));
  if (!packed) throw py::error_already_set();
  read_ids(ids, 0, count, reinterpret_cast<int32_t*>(PyBytes_AS_STRING(packed.ptr())));
  return packed;
}

py::list span_keys(const py::bytes& parent, const py::list& ids, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t size,
                   const std::optional<std::vector<std::string>>& images) {
  if (begin < 0 || end < begin || size < 1 || end > PyList_GET_SIZE(ids.ptr()) / size)
    throw std::invalid_argument("span_keys: spans " + std::to_string(begin) + "..." + std::to_string(end) + " of " +
                                std::to_string(size) + " ids are not among " +
                                std::to_string(PyList_GET_SIZE(ids.ptr())) + " ids");
  if (images && (Py_ssize_t)images->size() != end - begin)
    throw std::invalid_argument("span_keys: images of " + std::to_string(images->size()) + " spans for " +
                                std::to_string(end - begin));
  std::vector<int32_t> values((end - begin) * size);
  read_ids(ids, begin * size, end * size, values.data());
  std::string content = parent;
  std::vector<char> keys((end - begin) * kKeyBytes);
  {
    // Whoever releases the GIL may wait for it up to 5 ms.
    const std::unique_ptr<py::gil_scoped_release> release(
        values.size() > kManyIds ? std::make_unique<py::gil_scoped_release>() : nullptr);
    for (Py_ssize_t i = 0; i < end - begin; i++) {
      content.append(reinterpret_cast<const char*>(&values[i * size]), size * sizeof(int32_t));
      if (images) content += (*images)[i];
      blake2b(content.data(), content.size(), &keys[i * kKeyBytes], kKeyBytes);
      content.assign(&keys[i * kKeyBytes], kKeyBytes);
    }
  }
  py::list result(end - begin);
  for (Py_ssize_t i = 0; i < end - begin; i++) result[i] = py::bytes(&keys[i * kKeyBytes], kKeyBytes);
  return result;
}

}  // namespace

void bind_token_ids(py::module_& m) {
  m.def("ids_below", &ids_below, py::arg("ids"), py::arg("limit"),
        "Whether all elements of a list are ints (no subclass) from 0 to limit - 1.");
  m.def("id_bytes", &id_bytes, py::arg("ids"),
        "A list of ints as 32-bit words. TypeError or OverflowError for other elements.");
  m.def("span_keys", &span_keys, py::arg("parent"), py::arg("ids"), py::arg("begin"), py::arg("end"), py::arg("size"),
        py::arg("images") = py::none(),
        "The keys of spans begin ... end-1 of `size` ids each (cache/span_keys.py). parent: the key before the first. "
        "images: bytes\nthat each span's hash covers besides.");
}

}  // namespace as
