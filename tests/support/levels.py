"""Instruction sets below the best one of this machine. By default only the lowest is tested."""

from __future__ import annotations

import pytest

from allspark_server import _native

LOWER = [pytest.param(isa, marks=() if isa == _native.isas()[-1] else pytest.mark.slow) for isa in _native.isas()[1:]]
