"""Tools that show and measure GPUs, on a real one: topology, doctor, metrics, `bench static`."""

from __future__ import annotations

import json
import time

import pytest

from allspark_client import AsModelConfig, ClientEngine
from allspark_launch import cli
from allspark_launch.group.background import background_group, shipped_model

pytestmark = pytest.mark.cuda


def count() -> int:
    from allspark_server import _cuda

    return _cuda.device_count()


def test_topology(capsys):
    """A rank for each GPU. In some containers the kernel shows no GPU; GPUs that it shows have a name."""
    gpus = list(range(count()))
    assert cli.main(["topology", "--json", "--gpus", ",".join(map(str, gpus))]) == 0
    found = json.loads(capsys.readouterr().out)
    print({key: found[key] for key in ("gpus", "gpu_links", "ranks")})
    assert [rank["gpu"] for rank in found["ranks"]] == gpus
    if found["gpus"]:
        usable = [gpu for gpu in found["gpus"] if gpu["index"] >= 0]
        assert [gpu["index"] for gpu in usable] == gpus and all(gpu["model"] for gpu in usable)
        assert len(found["gpu_links"]) == len(gpus) * (len(gpus) - 1) // 2
    assert cli.main(["topology"]) == 0
    shown = capsys.readouterr().out
    print(shown)
    assert not found["gpus"] or all(gpu["address"] in shown for gpu in found["gpus"])


def test_doctor(capsys):
    """On a machine that runs these tests, no requirement of GPUs is missing."""
    cli.main(["doctor"])
    shown = capsys.readouterr().out
    print(shown)
    assert not [line for line in shown.splitlines() if "missing" in line and ("GPU" in line or "CUDA" in line)]


def test_metrics():
    """Used and free memory of each rank's GPU; a model's memory is included."""
    from support.metrics import metrics_of, samples

    with background_group(["--gpus", "0"], timeout=120) as group, ClientEngine(group.addresses[0]) as engine:
        engine.install_model(AsModelConfig("m", str(shipped_model()), compute_unit="CUDA:0", engine_max_length=256,
                                           cache_memory=64 << 20))
        engine.start_model("m")
        ends, known = time.monotonic() + 20, {}
        while time.monotonic() < ends and not known:
            time.sleep(0.5)
            known = {key[-1][1]: value for key, value in samples(metrics_of(group.addresses[0])).items()
                     if key[0] == "allspark_rank_gpu_memory_bytes" and ("gpu", "0") in key}
        assert known["used"] > 64 << 20 and known["used"] + known["free"] > 8 << 30


def test_bench_static(capsys, tmp_path):
    """Figures beside rooflines that this GPU's kernels reach."""
    words = ["bench", "static", "--gpus", "0", "--peer", "none", "--formats", "bfloat16,float16,int8", "--cell",
             "1x32x40", "--cell", "8x200x40", "--rounds", "1", "--json", str(tmp_path / "out.json")]
    assert cli.main(words) == 0
    print(capsys.readouterr().out)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"]["gpus"].startswith("GPU 0") and found["settings"]["engine"] == "1 ranks"
    assert all(each["read"] > 2e11 and max(each["fp32"], each["bf16"]) > 1e13 for each in found["ceilings"])
    assert len(found["results"]) == 6
    assert {each["format"] for each in found["results"]} == {"bfloat16", "float16", "int8"}
    for each in found["results"]:
        assert each["status"] == "measured" and each["decode"]["best"] > 0 and 0 < each["decode"]["fraction"] < 1.5
