"""Loads the native library, or raises an error that says why it is not available."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from types import ModuleType

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.version import __version__


class DeviceLost(RuntimeError):
    """This process can no longer use its GPUs, for example after an illegal address in a kernel: CUDA fails every later
    call. The CUDA backend raises it.
    """


@functools.cache
def native_library() -> ModuleType:
    """The module `allspark_server._native`. Asks the CPU once.

    Raises ImportError, which says what to do, if the module is missing, cannot be loaded, or has no kernels for this
    CPU.
    """
    try:
        module = importlib.import_module("allspark_server._native")
    except ModuleNotFoundError:
        raise ImportError("the native library allspark_server._native is not installed: this is a client-only "
                          "installation or a source tree that was not built. Run `pip install .` with a C++17 "
                          "compiler") from None
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"the native library allspark_server._native cannot be loaded: {error}") from error
    if not module.isas():
        raise ImportError("this CPU has none of the instruction sets for which the native library has kernels "
                          "(x86-64: AVX2 with FMA and F16C, or AVX-512; 64-bit Arm: NEON)")
    return module


def usable_isas() -> list[str]:
    """The instruction sets that this process may use, best first: one if ALLSPARK_ISA is set."""
    forced = os.environ.get("ALLSPARK_ISA")
    return [forced] if forced else native_library().isas()


def common_isa(ranks: Sequence[tuple[str, list[str]]]) -> str:
    """The instruction set of a group: the best one of rank 0 that all ranks have.

    Ranks of different instruction sets would lay out the rows that they exchange differently. ranks: each rank's host
    and instruction sets. Raises ValueError if they have none in common.
    """
    for isa in ranks[0][1]:
        if all(isa in isas for _, isas in ranks):
            return isa
    found = "; ".join(f"rank {rank} on {host} has {', '.join(isas)}" for rank, (host, isas) in enumerate(ranks))
    raise ValueError(f"the ranks of a group must have an instruction set in common, but {found}: leave ALLSPARK_ISA "
                     "unset on all hosts, or start a group for each kind of CPU")


def cuda_library() -> ModuleType:
    """The CUDA backend, which only GPUs need: the server's own module `allspark_server._cuda`, or the one of the
    distribution allspark-numa-cuda.

    Raises AllSparkError, which says what to do, if there is none or if it cannot be loaded.
    """
    native_library()  # the backend shares its types
    why = ("this installation has no CUDA backend: run pip install 'allspark-numa[cuda]', or build it where nvcc is "
           "installed, or with ALLSPARK_CUDA=1, which brings a compiler (pip install .)")
    for name in ("allspark_server._cuda", "allspark_cuda._cuda"):
        try:
            if name.startswith("allspark_cuda"):
                version = importlib.import_module("allspark_cuda").__version__
                if version != __version__:
                    why = (f"allspark-numa-cuda has version {version}, and the server has {__version__}: install "
                           f"allspark-numa-cuda=={__version__}")
                    break
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            why = f"the CUDA backend cannot be loaded: {error}"
            break
    raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"compute_unit 'CUDA': {why}")
