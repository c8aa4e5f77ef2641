// Python bindings of the op table and of programs.
#include "program/program.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace as {
namespace {

py::object default_of(const AttributeSpec& a) {
  if (a.required) return py::none();
  if (a.otherwise_as) return py::str(a.otherwise_as);
  if (a.type == AttributeType::choice) return py::str(a.choices[(size_t)a.otherwise]);
  if (a.type == AttributeType::flag) return py::bool_(a.otherwise != 0);
  if (a.type == AttributeType::integer) return py::int_((long)a.otherwise);
  return py::float_(a.otherwise);
}

py::dict to_dict(const AttributeSpec& a) {
  py::dict d;
  d["name"] = a.name, d["type"] = name_of(a.type), d["scope"] = name_of(a.scope), d["required"] = a.required;
  d["default"] = default_of(a);
  d["least"] = a.least, d["most"] = a.most;
  d["rule"] = name_of(a.rule), d["block"] = a.block, d["blocks"] = a.blocks;
  d["choices"] = std::vector<std::string>(a.choices.begin(), a.choices.end());
  return d;
}

py::dict to_dict(const OpSpec& spec) {
  const auto arity = [](Arity a) { return py::make_tuple(a.least, a.most); };
  py::dict d;
  d["name"] = spec.name, d["rows"] = name_of(spec.rows), d["in_place"] = spec.in_place;
  d["inputs"] = arity(spec.inputs), d["outputs"] = arity(spec.outputs), d["weights"] = arity(spec.weights);
  py::list attributes;
  for (const AttributeSpec& a : spec.attributes) attributes.append(to_dict(a));
  d["attributes"] = attributes;
  return d;
}

// A node for Python: typed attributes, without those of graphs.
py::dict to_dict(const OpNode& op) {
  py::dict attributes, d;
  for (const AttributeSpec& a : op.spec->attributes) {
    if (a.scope == Scope::graph) continue;
    if (a.type == AttributeType::integer) attributes[a.name] = op.integer(a.name);
    else if (a.type == AttributeType::number) attributes[a.name] = op.number(a.name);
    else if (a.type == AttributeType::flag) attributes[a.name] = op.flag(a.name);
    else attributes[a.name] = op.choice(a.name);
  }
  d["name"] = op.spec->name, d["inputs"] = op.inputs, d["outputs"] = op.outputs, d["weights"] = op.weights;
  d["attributes"] = attributes;
  return d;
}

template <class Items, class Make>
py::list list_of(const Items& items, Make make) {
  py::list all;
  for (const auto& item : items) all.append(make(item));
  return all;
}

}  // namespace

void bind_program(py::module_& m) {
  m.attr("ALL_ROWS") = kAllRows;
  m.attr("OUTPUT_ROWS") = kOutputRows;
  m.def(
      "op_specs", [] { return list_of(op_specs(), [](const OpSpec& s) { return to_dict(s); }); },
      "The op table: a list of dicts with name, rows, in_place, inputs, outputs and weights (least, most), and\n"
      "attributes: dicts with name, type (integer, number, flag, choice), scope (model, rank, graph), required, "
      "default\n"
      "(a str for an integer: another attribute's value), least, most, choices, and for the scope rank rule, block "
      "and\n"
      "blocks (RankRule).");
  py::class_<Program, std::shared_ptr<Program>>(
      m, "Program",
      "One rank's ops of a model, validated. If an add_* function raises ValueError, the program is unchanged.")
      .def(py::init<>())
      .def(
          "add_matrix",
          [](Program& p, int n, int k, const std::string& format, int group, const py::kwargs& layout) {
            return p.add_matrix(n, k, format, group, scale_layout_of(layout));
          },
          py::arg("out_features"), py::arg("in_features"), py::arg("dtype"), py::arg("group_size") = 0, kLayoutFields)
      .def("add_vector", &Program::add_vector, py::arg("n"))
      .def("add_row_set", &Program::add_row_set, py::arg("of"), py::arg("times"),
           "Adds a set of rows that a router forms: `times` entries for each row of set `of`.")
      .def(
          "add_tensor",
          [](Program& p, int width, int rows, const std::string& dtype) {
            return p.add_tensor(width, rows, tensor_type_of(dtype));
          },
          py::arg("width"), py::arg("rows") = kAllRows, py::arg("dtype") = "float32")
      .def(
          "add_cache_group",
          [](Program& p, const std::string& kind, int window) {
            return p.add_cache_group(cache_kind_of(kind), window);
          },
          py::arg("kind") = "full", py::arg("window") = 0)
      .def("add_op", &Program::add_op, py::arg("name"), py::arg("inputs"), py::arg("outputs"), py::arg("weights"),
           py::arg("attributes"))
      .def_property_readonly(
          "ops", [](const Program& p) { return list_of(p.ops(), [](const OpNode& op) { return to_dict(op); }); })
      .def_property_readonly(
          "tensors",
          [](const Program& p) {
            return list_of(p.tensors(),
                           [](const TensorSpec& t) { return py::make_tuple(t.width, t.rows, name_of(t.type)); });
          },
          "(width, row set, dtype) of each")
      .def_property_readonly(
          "weights",
          [](const Program& p) {
            return list_of(p.weights(),
                           [](const WeightSpec& w) { return py::make_tuple(w.n, w.k, w.format, w.group); });
          },
          "(n, k, dtype, group size) of each; a vector's k is 0")
      .def(
          "scale_layout",
          [](const Program& p, int weight) {
            const ScaleLayout& l = p.weights().at(weight).layout;
            py::dict d;
            d["scales"] = name_of(l.scales), d["zeros"] = name_of(l.zeros), d["group_rows"] = l.group_rows;
            d["permuted"] = l.permuted, d["super_group"] = l.super_group, d["scale_bits"] = l.scale_bits;
            d["center"] = l.center;
            return d;
          },
          py::arg("weight"), "The layout of a matrix' scales, as given to add_matrix.")
      .def_property_readonly("row_sets",
                             [](const Program& p) {
                               return list_of(p.row_sets(),
                                              [](const RowSet& r) { return py::make_tuple(r.of, r.times); });
                             })
      .def_property_readonly("cache_groups",
                             [](const Program& p) {
                               return list_of(p.cache_groups(), [](const CacheGroup& g) {
                                 return py::make_tuple(name_of(g.kind), g.window);
                               });
                             })
      .def(
          "cost",
          [](const Program& p, int op, double rows, double outputs, double seen, double context, double position_bytes,
             double world) {
            const Cost cost = p.cost(p.ops().at(op), {rows, outputs, seen, context, position_bytes, world, {}});
            return py::make_tuple(cost.bytes, cost.operations);
          },
          py::arg("op"), py::arg("rows"), py::arg("outputs") = 0, py::arg("seen") = 0, py::arg("context") = 0,
          py::arg("position_bytes") = 0, py::arg("world") = 1, "(bytes, operations) of an op in such a step");
}

}  // namespace as
