"""Members of a pool that give different bytes for the same request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class _Model(Protocol):
    """What ModelState and its message have in common."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def image_fingerprint(self) -> str: ...

    @property
    def isa(self) -> str: ...


def unlike_members(members: Iterable[tuple[str, Iterable[_Model]]]) -> list[str]:
    """One sentence for each model that members compute with different fingerprints: one cannot resume the requests of
    the other; and for each model whose images they prepare or bound differently. members: the name of each, and its
    models.
    """
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    images: dict[str, dict[str, list[str]]] = {}
    for member, models in members:
        for model in models:
            if model.fingerprint:
                found.setdefault(model.name, {}).setdefault(model.fingerprint, (model.isa, []))[1].append(member)
                images.setdefault(model.name, {}).setdefault(model.image_fingerprint, []).append(member)
    told = []
    for name, groups in sorted(found.items()):
        if len(groups) < 2:
            continue
        isas = {isa for isa, _ in groups.values()}
        parts = "; ".join(", ".join(names) + (f" ({isa})" if isa else "") for isa, names in groups.values())
        remedy = (": the option isa pins one instruction set for all members on CPUs"
                  if len(isas) > 1 and not any(isa.startswith("sm_") for isa in isas) else "")
        told.append(f"members cannot resume each other's requests to model {name!r}, because their fingerprints "
                    f"differ: {parts}{remedy}")
    for name, prepared in sorted(images.items()):
        if len(prepared) > 1 and len(found[name]) == 1:
            told.append(f"members cannot resume each other's requests with images to model {name!r}, because they "
                        f"prepare or bound images differently: {'; '.join(map(', '.join, prepared.values()))}: "
                        "max_image_tokens and engine_max_length bound them")
    return told
