"""Folders of this repository."""
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
BENCHMARKS = ROOT / "benchmarks"
NATIVE = ROOT / "native"
SUPPORT = TESTS / "support"
