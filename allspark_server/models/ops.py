"""The native library's table of ops (native/program/op_spec.h), read from its bindings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from allspark_client.errors import nearest_name
from allspark_server.runtime.native import native_library

Attribute = bool | int | float | str


@dataclass(frozen=True)
class AttributeSpec:
    """An attribute of an op.

    type: "integer", "number", "flag" or "choice". scope: "model" if the model file sets it, "rank" if lowering computes
    it for each rank by `rule` from columns of `blocks` blocks from `block` on, "graph" if the model file sets it and
    lowering replaces it.
    """

    name: str
    type: str
    scope: str
    required: bool
    default: Attribute | None
    least: float
    most: float
    choices: tuple[str, ...]
    rule: str
    block: int
    blocks: int

    @property
    def allowed(self) -> str:
        """The allowed values, for error messages."""
        if self.type == "flag":
            return "true or false"
        if self.type == "choice":
            return f"one of {', '.join(self.choices)}"
        return f"{'an integer' if self.type == 'integer' else 'a number'} of {self.least:.12g} to {self.most:.12g}"

    def fits(self, value: Attribute) -> bool:
        """Whether the value is allowed."""
        if self.type == "choice" or isinstance(value, str):
            return self.type == "choice" and value in self.choices
        if self.type == "flag":
            return value in (0, 1)
        return self.least <= value <= self.most and (self.type == "number" or value == int(value))


@dataclass(frozen=True)
class OpSpec:
    """An op. inputs, outputs, weights: the least and the greatest number of them. attributes: by name."""

    name: str
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    weights: tuple[int, int]
    in_place: bool
    rows: str
    attributes: Mapping[str, AttributeSpec]

    def check_graph(self, inputs: int, outputs: int, weights: int, attrs: Mapping[str, Attribute]) -> None:
        """Raises ValueError unless a graph (of the whole model, not of a rank) may contain such an op."""
        found, expected = (inputs, outputs, weights), (self.inputs, self.outputs, self.weights)
        if not all(least <= n <= most for n, (least, most) in zip(found, expected)):
            wanted = [f"{least} to {most}" if most > least else str(least) for least, most in expected]
            raise ValueError(
                f"op {self.name} has {inputs} inputs, {outputs} outputs and {weights} weights: expected "
                f"{wanted[0]}, {wanted[1]} and {wanted[2]}"
            )
        known = [a.name for a in self.attributes.values() if a.scope != "rank"]
        for name, value in attrs.items():
            if name not in known:
                allowed = f"known are {', '.join(known)}{nearest_name(name, known)}" if known else "it takes none"
                raise ValueError(f"op {self.name} has no attribute {name}: {allowed}")
            if not self.attributes[name].fits(value):
                raise ValueError(
                    f"op {self.name}: attribute {name} is {value!r}: expected {self.attributes[name].allowed}"
                )
        missing = [name for name in known if self.attributes[name].required and name not in attrs]
        if missing:
            raise ValueError(f"op {self.name} needs attribute {missing[0]}")


@cache
def op_specs() -> Mapping[str, OpSpec]:
    """All ops by name."""
    return {
        spec["name"]: OpSpec(
            spec["name"],
            spec["inputs"],
            spec["outputs"],
            spec["weights"],
            spec["in_place"],
            spec["rows"],
            {a["name"]: AttributeSpec(**{**a, "choices": tuple(a["choices"])}) for a in spec["attributes"]},
        )
        for spec in native_library().op_specs()
    }


def op_spec(name: str) -> OpSpec:
    """The op's spec; ValueError if there is none."""
    try:
        return op_specs()[name]
    except KeyError:
        raise ValueError(f"unknown op {name!r}: known are {', '.join(op_specs())}") from None
