"""Ids and bits of fixed models and kernels against the record (tests/support/record_golden.py). A difference means that
bits have changed.
"""

from __future__ import annotations

import json
import runpy

import pytest

from allspark_server import _native
from support.paths import ROOT
from support.record_golden import FILE, run_level

GOLDEN = json.loads(FILE.read_text())


def test_levels_of_the_record_are_known():
    isas = runpy.run_path(str(ROOT / "setup.py"))["ISAS"]
    assert GOLDEN and set(GOLDEN) <= {name for levels in isas.values() for name in levels}


def test_avx_vnni_has_the_bits_of_avx2():
    assert GOLDEN["avx2_vnni"] == GOLDEN["avx2"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", _native.isas())
def test_bits_are_those_recorded(level):
    if level not in GOLDEN:
        pytest.skip(f"nothing is recorded for {level}: run tests/support/record_golden.py {level} on this machine")
    found = run_level(level)
    differing = [f"{case}: {found.get(case)}, recorded {wanted}" for case, wanted in GOLDEN[level].items()
                 if found.get(case) != wanted]
    assert not differing, f"{level}: {len(differing)} of {len(found)} cases differ: " + "; ".join(differing[:5])
    assert set(found) == set(GOLDEN[level])
