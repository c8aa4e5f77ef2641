"""The compute unit that suites of the whole engine run on."""

from __future__ import annotations

import os

#: ALLSPARK_TEST_UNIT=CUDA:0 selects a GPU, CUDA:0,1 groups of two
UNIT = {"compute_unit": os.environ.get("ALLSPARK_TEST_UNIT", "CPU:0")}
GPUS = UNIT["compute_unit"].removeprefix("CUDA:").split(",") if UNIT["compute_unit"].startswith("CUDA:") else []
#: whether ranks share a GPU: each of their sums waits until the GPU turns to the other rank, which is slow
SHARED = len(set(GPUS)) < len(GPUS)
