"""Groups whose ranks have CPUs of unlike instruction sets. ALLSPARK_ISA makes a rank's CPU a lesser one."""
import os
import subprocess
import sys

import pytest

from allspark_client import AsModelConfig, ClientEngine
from allspark_launch.group.mpi import clean_environment, installations
from allspark_server import _native
from allspark_server.runtime.native import common_isa
from support.waiting import wait_for

LOWEST = _native.isas()[-1]
MORE = pytest.mark.skipif(len(_native.isas()) < 2 or "ALLSPARK_ISA" in os.environ, reason="one instruction set only")


def ranks_with(isas: list[str], *words: str) -> subprocess.Popen:
    """The ranks of a group on this host; an empty name leaves a rank what its CPU has."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    server = [sys.executable, "-m", "allspark_server", "--ranks", str(len(isas)), "--no-spin", "--cpus", "0", *words]
    contexts = [part for isa in isas for part in (":", "-np", "1", "env", f"ALLSPARK_ISA={isa}", *server)]
    mpirun = installations()[0][0].mpirun
    return subprocess.Popen([mpirun, *root, "--bind-to", "none", "--oversubscribe", *contexts[1:]], text=True,
                            env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True)


def answer(engine: ClientEngine, name: str) -> list:
    """Ids and logprob bits."""
    prompt = {"input_ids": [(7 * i + 3) % 500 for i in range(8)]}
    _, handle, queue = engine.start_request(name, prompt, {"do_sample": False, "max_new_tokens": 6, "logprobs": True,
                                                           "early_stopping": False})
    found = [pair for e in queue for pair in zip(e.ids_from_generate, e.token_logprobs_list)]
    engine.release_request(name, handle)
    return found


@MORE
@pytest.mark.parametrize("lesser,hosts", [
    (1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 2), (0, 1), (1, 1)))])
def test_ranks_compute_with_what_all_of_them_have(lesser, hosts, tmp_path, tiny_model):
    """A prompt, whose rows are divided among the ranks, has the bits of one that is taken token by token."""
    isas = ["", ""]
    isas[lesser] = LOWEST
    address = tmp_path / "s"
    process = ranks_with(isas, "--address", f"unix:{address}", "--model-root", "/",
                         *(("--split-hosts", "2") if hosts == 2 else ()))
    try:
        wait_for(lambda: address.exists() or process.poll() is not None)
        with ClientEngine(f"unix:{address}") as engine:
            for name, rows in (("whole", 64), ("single", 1)):
                engine.install_model(AsModelConfig(model_name=name, model_path=str(tiny_model), engine_max_length=64,
                                                   engine_max_batch=1,
                                                   weight_dtype="int8", max_step_tokens=rows))
                engine.start_model(name)
            assert answer(engine, "whole") == answer(engine, "single")
    finally:
        process.terminate()
        output = process.communicate(timeout=20)[0]
        print(output)
    assert f"rank {1 - lesser} uses the instruction set {LOWEST}, because not all ranks have" in output


@MORE
@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_ranks_with_nothing_in_common_are_refused(order, tmp_path):
    isas = [LOWEST, _native.isas()[0]][::order]
    process = ranks_with(isas, "--address", f"unix:{tmp_path}/s")
    output = process.communicate(timeout=30)[0]
    assert process.returncode and "must have an instruction set in common" in output
    assert all(f"rank {rank} on {os.uname().nodename} has {isa}" in output for rank, isa in enumerate(isas))


def test_the_common_instruction_set():
    zen = ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]
    assert common_isa([("a", ["amx", "avx512_vnni", "avx512_bf16", "avx512", "avx2"]), ("b", zen)]) == "avx512_vnni"
    assert common_isa([("a", zen), ("b", ["avx2_vnni", "avx2"]), ("c", zen)]) == "avx2"
    with pytest.raises(ValueError, match="rank 0 on a has avx2; rank 1 on b has neon_dotprod, neon: leave"):
        common_isa([("a", ["avx2"]), ("b", ["neon_dotprod", "neon"])])


@pytest.mark.skipif("avx512_bf16" not in _native.isas(), reason="this CPU has no AVX512_BF16")
def test_intel_prefers_what_is_faster_there():
    intel = "GenuineIntel" in open("/proc/cpuinfo").read()
    assert (_native.isas().index("avx512_bf16") > _native.isas().index("avx512_vnni")) == intel
