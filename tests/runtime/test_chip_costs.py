"""The file of what kernels cost on a GPU, with a library that counts how often it measures."""

from __future__ import annotations

import json
import stat
import threading

import pytest

from allspark_server.runtime import chip_costs
from allspark_server.runtime.chip_costs import VARIABLE, kept_costs
from allspark_server.runtime.native import DeviceLost

COSTS = {"read": 800.0, "mma": [1.0, 2.0, 3.0]}


class Library:
    COSTS_VERSION = 1

    def __init__(self, doubt: str = "", error: Exception | None = None, driver: int = 13000):
        self.measured, self._doubt, self._error, self._driver = 0, doubt, error, driver

    def driver_version(self):
        return self._driver

    def chip_limits(self, index):
        return {"name": "NVIDIA Test 9 / X", "uuid": f"{index:032x}", "capability": 86, "sms": 82,
                "shared_bytes": 101376, "clock": 1.695, "memory": 936.1}

    def measure_costs(self, index):
        self.measured += 1
        if self._error:
            raise self._error
        return COSTS, self._doubt

    def why_implausible(self, costs, **bounds):
        if not isinstance(costs, dict):
            raise TypeError("incompatible arguments")
        return "" if costs["read"] > 100 else "read of nothing"


@pytest.fixture(autouse=True)
def new_process(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chip_costs, "_known", {})


def asked(library, index=0):
    """As a new process asks."""
    chip_costs._known.clear()
    return chip_costs.chip_costs(library, index)


def test_a_gpu_is_measured_once(tmp_path):
    library = Library()
    assert kept_costs(library, 0)[1] is None
    assert [asked(library, index) for index in (0, 0, 1, 1)] == [COSTS] * 4 and library.measured == 2
    path, kept = kept_costs(library, 0)
    assert kept == COSTS and path == tmp_path / "allspark/gpus" / f"NVIDIA-Test-9-X-{0:032x}.json"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and not list(path.parent.glob("*.partial"))
    assert asked(Library(driver=13010)) == COSTS and kept_costs(library, 0)[1] is None  # of another driver now


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"key": 1}', b"\xff\xfe", "costs of nothing", "costs of a list"])
def test_a_file_that_is_damaged_is_replaced(content, caplog):
    library = Library()
    asked(library)
    path, _ = kept_costs(library, 0)
    if isinstance(content, str):
        known = json.loads(path.read_text())
        known["costs"] = {"read": 0} if content.endswith("nothing") else [1]
        content = json.dumps(known).encode()
    path.write_bytes(content)
    caplog.clear()
    assert asked(library) == COSTS and library.measured == 2 and kept_costs(library, 0)[1] == COSTS
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == (content != b'{"key": 1}')


@pytest.mark.parametrize("library", [Library("the GPU has other work"), Library(error=RuntimeError("no memory"))])
def test_doubtful_costs_are_not_kept(library, caplog):
    assert asked(library) == {} and kept_costs(library, 0)[1] is None
    assert len(caplog.records) == 1 and "are chosen as for an H100" in caplog.text
    assert chip_costs.chip_costs(library, 0) == {} and library.measured == 1  # once in a process


def test_a_lost_gpu_is_reported():
    with pytest.raises(DeviceLost):
        asked(Library(error=DeviceLost("lost")))


def test_another_folder_and_none(monkeypatch, tmp_path, caplog):
    library = Library()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
    assert asked(library) == COSTS and kept_costs(library, 0)[0].parent == tmp_path / "other"
    monkeypatch.setenv(VARIABLE, "off")
    assert asked(library) == {} and library.measured == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    assert asked(library) == COSTS and library.measured == 2 and "cannot be written" in caplog.text


def test_ranks_that_share_a_gpu_wait_for_one_another(monkeypatch):
    library, begun, found = Library(), threading.Event(), []
    measure = library.measure_costs

    def slowly(index):
        begun.set()
        threading.Event().wait(0.2)
        return measure(index)

    monkeypatch.setattr(library, "measure_costs", slowly)
    key = chip_costs.key_of(library, 0)
    first = threading.Thread(target=lambda: found.append(chip_costs._found(library, 0, key)))
    first.start()
    begun.wait(5)
    found.append(chip_costs._found(library, 0, key))
    first.join()
    assert found == [COSTS, COSTS] and library.measured == 1
