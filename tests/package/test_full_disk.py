"""A full disk, for each file that is written: what was there stays, the error names the file, nothing is left behind.

Elsewhere: results of `allspark batch` (tests/launch/commands/test_batch.py), the host cache's file
(tests/cache/test_host_cache.py), MPI's shared memory (tests/runtime/test_ranks.py).
"""
from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from allspark_client import AllSparkError, AsModelConfig
from allspark_launch.cli import main
from allspark_launch.group.background import shipped_model
from allspark_launch.group.serving import _report
from allspark_launch.group.supervisor import _write_json
from allspark_launch.options import GroupOptions
from allspark_launch.output import Outlet, write_whole
from allspark_server import HuggingFaceModel
from allspark_server.engine.engine import Engine
from allspark_server.engine.state_file import StateFile
from allspark_server.runtime import reservations
from allspark_server.weights.gguf import tokenizer as gguf_tokenizer
from allspark_server.weights.safetensors import write_safetensors
from support.full_disk import full_disk
from support.pool_commands import words, write

ROOM = 16


@pytest.mark.parametrize("room", [0, ROOM])
def test_whole_files(tmp_path, room):
    """Members' configurations, units, environments, layouts, reports and ready files are all written by this."""
    path = tmp_path / "file"
    path.write_text("before")
    with full_disk(room), pytest.raises(OSError, match=str(path)):
        write_whole(path, "after" * 10, 0o600)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_commands_of_a_pool(tmp_path, capsys):
    write(tmp_path, [{"name": "a"}])
    with full_disk(ROOM):
        assert main(words(tmp_path, "install")) == 1
    assert f"{tmp_path}/u/allspark-default@.service" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "pool.json"]
    assert main(words(tmp_path, "install")) == 0


def test_what_a_supervisor_writes(tmp_path, caplog):
    """The ready file, the ranks' metrics, and the report to `allspark pool`: the group goes on without them."""
    with full_disk(ROOM):
        _write_json(tmp_path / "group.json", {"restarts": 1, "ranks": []})
        _report(str(tmp_path / "running.json"), GroupOptions())
    assert "group.json cannot be written" in caplog.text and "running.json cannot be written" in caplog.text
    assert not list(tmp_path.iterdir())


def test_logs():
    """A supervisor's log in a file: what does not fit is lost, and nothing waits or fails."""
    with tempfile.TemporaryFile() as file:
        outlet = Outlet(os.dup(file.fileno()))
        with full_disk(ROOM):
            for _ in range(100):
                outlet.write(b"a line of a log\n")
            assert outlet.finish()
    handler = logging.StreamHandler(open("/dev/full", "w"))
    handler.handleError = lambda record: None
    handler.emit(logging.makeLogRecord({"msg": "x" * 10000}))
    handler.stream.close = lambda: None


def test_the_state_file(tmp_path, caplog):
    file = tmp_path / "state.json"
    StateFile(str(file)).write(lambda: [{"config": {"model_name": "before"}}])
    before = file.read_text()
    with full_disk(ROOM):
        StateFile(str(file)).write(lambda: [{"config": {"model_name": "after"}}])
    assert f"the state file is as it was: cannot write {file}" in caplog.text
    assert file.read_text() == before and list(tmp_path.iterdir()) == [file]


def test_reservations(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(reservations, "folder", lambda: tmp_path / "r")
    (tmp_path / "r").mkdir(mode=0o700)
    with full_disk(ROOM):
        one, cpus = reservations.Reservation("m", 1 << 30, [0]), reservations.CpuReservation()
        cpus.take([0])
    assert caplog.text.count("other groups do not see what this one reserves") == 2
    assert not list((tmp_path / "r").iterdir()) and reservations.pending([0]) == 0
    one.release()
    cpus.close()


def test_serialized_models(tmp_path):
    model = HuggingFaceModel(str(shipped_model()), "m")
    with Engine() as engine:
        model.serialize_to_path(engine, str(tmp_path))
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for room in (0, ROOM, 4096):
            with full_disk(room), pytest.raises(AllSparkError, match=f"ALLSPARK_IO_ERROR: cannot write {tmp_path}"):
                model.serialize_to_path(engine, str(tmp_path), skip_if_exists=False)
        with full_disk(ROOM), pytest.raises(AllSparkError, match="ALLSPARK_IO_ERROR: cannot write"):
            model.export_model_diconfig(str(tmp_path / "m.json"))
        with full_disk(4096), pytest.raises(AllSparkError, match=f"cannot write {tmp_path}/t"):
            write_safetensors(tmp_path / "t", [("t", "F32", (2000,))], {}, [[np.zeros(2000, np.float32)]])
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        engine.install_model(AsModelConfig("m", str(tmp_path / "m.asgraph"), str(tmp_path / "m.asparam")))


def test_the_tokenizer_of_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with full_disk(ROOM), pytest.raises(AllSparkError, match=f"cannot write {tmp_path}/tmp/allspark-gguf-"):
        gguf_tokenizer._written(tmp_path / "cache" / "digest", "x" * 100, {})
    assert not list((tmp_path / "tmp").iterdir()) and not list((tmp_path / "cache").iterdir())
    place = Path(gguf_tokenizer._written(tmp_path / "cache" / "digest", "x" * 100, {"a": 1}))
    assert place == tmp_path / "cache" / "digest" and json.loads((place / "tokenizer_config.json").read_text()) == {
        "a": 1}


def test_metrics_of_the_http_server(tmp_path):
    """Their files are mapped into memory. On a full disk the worker died of SIGBUS; now it says what is full."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs to mount a file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "full").write_bytes(bytes(1 << 20))
        code = "from allspark_server.http.metrics import Metrics\nMetrics().request('chat', 200, 0.1)\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                              env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
        assert done.returncode == 1 and f"No space left on device: '{tmp_path}/counter_" in done.stderr, done
    finally:
        subprocess.run(["umount", tmp_path], check=True)
