"""The seed of random inputs: another one in each run, the same in all its processes, and shown in the tests' names."""

from __future__ import annotations

import os
import secrets

#: ALLSPARK_TEST_SEED, or a fresh one, which processes that this one starts inherit
SEED = int(os.environ.setdefault("ALLSPARK_TEST_SEED", str(secrets.randbits(31))))
