"""Which instruction set a server takes, and what is said about members of a pool whose sets differ."""
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from allspark_client.types import MemberState, ModelState
from allspark_client.unlike import unlike_members
from allspark_launch.commands import doctor
from allspark_server import _native
from allspark_server.http.pool import Pool
from allspark_server.options import INSTRUCTION_SETS
from allspark_server.runtime import level

FOUND = ["amx", "avx512_vnni", "avx512_bf16", "avx512"]


class Library:
    """The native library, with products that take a set time; `used`: the levels that were switched to."""

    def __init__(self, monkeypatch):
        self.used: list[str] = []
        self.current = FOUND[0]
        self.Executor = self._executor
        monkeypatch.setattr(level, "native_library", lambda: self)
        monkeypatch.setattr(level, "usable_isas", lambda: FOUND)

    def isas(self):
        return FOUND

    def isa(self):
        return self.current

    def use_isa(self, name):
        self.current = name
        self.used.append(name)

    @staticmethod
    def _executor(num_threads):
        assert num_threads == 1
        return SimpleNamespace(add_matrix=lambda *_: 0, fill_matrix=lambda *_: None, multiply=lambda *_: np.zeros(1))


@pytest.fixture
def library(monkeypatch, tmp_path):
    monkeypatch.setenv(level.VARIABLE, str(tmp_path))
    monkeypatch.setattr(level, "SECONDS", 0.0)
    return Library(monkeypatch)


def test_only_a_clear_lead_overrides_the_table(caplog):
    with caplog.at_level(logging.INFO):
        assert level.in_order(FOUND, {"amx": 100, "avx512_vnni": 114, "avx512_bf16": 90}) == FOUND
        assert not caplog.text
        assert level.in_order(FOUND, {"amx": 100, "avx512_vnni": 90, "avx512_bf16": 116}) == [
            "avx512_bf16", "amx", "avx512_vnni", "avx512"]
    assert "avx512_bf16: it is 1.16 times as fast here as amx" in caplog.text
    assert level.in_order(FOUND, {"avx512": 900}) == FOUND      # nothing is known of the table's first


def test_rates_are_measured_once(library, tmp_path, monkeypatch, caplog):
    level.levels()
    assert library.used == [*FOUND[:3], FOUND[0]]       # each once, and back
    level.levels()
    assert len(library.used) == 4
    path, rates = level.kept_rates(FOUND)
    assert path.parent == tmp_path and list(rates) == FOUND[:3] and all(rate > 0 for rate in rates.values())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rates": {"amx": -1, "avx512_vnni": 9}}))
    level.levels()
    assert len(library.used) == 8 and "are no rates of this CPU's instruction sets" in caplog.text
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rates": dict(zip(FOUND, (1, 9, 2)))}))
    assert level.levels()[0] == "avx512_vnni" and level.levels(measures=False) == FOUND
    monkeypatch.setenv(level.VARIABLE, "off")
    assert level.levels() == FOUND and len(library.used) == 8


def test_a_pinned_level(library):
    assert level.levels("avx512") == ["avx512"] and not library.used
    with pytest.raises(ValueError, match="isa is 'neon', which this CPU or this build does not have; it has amx, avx"):
        level.levels("neon")


def test_real_levels_are_measured():
    """Whatever this machine is: rates of its levels, and the level of before."""
    before = _native.isa()
    rates = level.measure(_native.isas()[:3], 0.0)
    assert list(rates) == _native.isas()[:3] and _native.isa() == before


def test_members_that_differ_are_named():
    def model(fingerprint, isa, name="m", images=""):
        return ModelState(name, True, fingerprint, isa=isa, image_fingerprint=images)

    alike = [("a", [model("1", "amx")]), ("b", [model("1", "amx"), model("9", "amx", "other")])]
    assert unlike_members(alike) == []
    assert unlike_members([*alike, ("c", [model("", "")])]) == []       # on demand, not loaded
    assert unlike_members([*alike, ("c", [model("2", "avx2")])]) == [
        "members cannot resume each other's requests to model 'm', because their fingerprints differ: a, b (amx); "
        "c (avx2): the option isa pins one instruction set for all members on CPUs"]
    assert unlike_members([*alike, ("c", [model("3", "amx")])])[0].endswith("a, b (amx); c (amx)")
    assert unlike_members([("a", [model("1", "amx", images="7")]), ("b", [model("1", "amx", images="8")])]) == [
        "members cannot resume each other's requests with images to model 'm', because they prepare or bound images "
        "differently: a; b: max_image_tokens and engine_max_length bound them"]
    assert len(unlike_members([("a", [model("1", "amx", images="7")]), ("b", [model("2", "amx", images="8")])])) == 1


def test_the_http_server_tells_once_which_members_differ(caplog):
    pool = Pool(["unix:/none"])

    def look(*members):
        pool._members = 0.0, [MemberState(address, connected, models=[ModelState("m", True, print_)])
                              for address, connected, print_ in members]
        pool._tell_differences()
        return len(caplog.records)

    assert look(("a", True, "1"), ("b", True, "1")) == 0
    assert [look(("a", True, "1"), ("b", True, "2")) for _ in range(3)] == [1, 1, 1]
    assert look(("a", True, "1"), ("b", False, "")) == 1 and look(("a", True, "1"), ("b", True, "2")) == 1
    assert look(("a", True, "1"), ("b", True, "1")) == 1 and look(("a", True, "1"), ("b", True, "2")) == 2


def test_the_option_knows_all_levels():
    assert set(_native.isas()) <= set(INSTRUCTION_SETS)


def test_doctor_shows_the_level(monkeypatch, tmp_path):
    monkeypatch.delenv("ALLSPARK_ISA", raising=False)
    monkeypatch.setenv(level.VARIABLE, str(tmp_path))
    assert "amx, by the table; the first group measures" in doctor._level(FOUND).text
    path, _ = level.kept_rates(FOUND)
    path.write_text(json.dumps({"key": level._key(FOUND),
                                "rates": {"amx": 10, "avx512_vnni": 20, "avx512_bf16": 9}}))
    assert doctor._level(FOUND).text == ("avx512_vnni, at least 1.15 times as fast here as the table's amx; Gop/s of a "
                                         f"thread: amx 10, avx512_vnni 20, avx512_bf16 9; measured, in {path}")
    monkeypatch.setenv(level.VARIABLE, "off")
    assert doctor._level(FOUND).text == "amx, by the table; nothing is measured"
    monkeypatch.setenv("ALLSPARK_ISA", "avx2")
    assert doctor._level(FOUND).text == "avx2: ALLSPARK_ISA pins it"
