"""`allspark batch`: every endpoint, invalid lines, and resuming after an interrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allspark_client import ClientEngine
from allspark_launch.cli import main
from allspark_launch.commands.batch import NoRequest, Output, parse_line
from allspark_launch.group.background import background_group, shipped_model
from support.waiting import wait_for

MODEL = "fable"


@pytest.fixture(scope="module")
def group():
    """The address of a group with a short queue."""
    with background_group(["--model", str(shipped_model()), "--max-length", "512", "--set", "max_queue=4",
                           "--max-batch", "4"], timeout=60.0) as running:
        yield running.addresses[0]


def line(custom_id, url="/v1/completions", **body) -> str:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "seed": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def batch(folder: Path, group: str, *words: str, status: int = 0) -> dict[str, dict]:
    """Runs the command; returns its output lines by custom_id, and those without one by id."""
    assert main(["batch", "--address", group, *words, str(folder / "in"), str(folder / "out")]) == status
    entries = [json.loads(text) for text in (folder / "out").read_text().splitlines()]
    found = {entry["custom_id"] or entry["id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def test_every_endpoint(group, tmp_path, capsys):
    chat = {"messages": [{"role": "user", "content": "What is 12+30?"}], "max_tokens": 12, "temperature": 0}
    wrong = json.loads(line("wrong"))
    (tmp_path / "in").write_text(
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
                    "body": {"model": MODEL, **chat}}) + "\n"
        + line("text", n=2, temperature=0.9) + "\n"
        + json.dumps({"custom_id": "e", "url": "/v1/embeddings", "body": {"model": MODEL, "input": ["a", "b"]}}) + "\n"
        + line("bad", temperature=9) + line("none", model="none") + "{half\n" + json.dumps({**wrong, "url": "/v1/x"})
        + "\n" + json.dumps({**wrong, "custom_id": "s", "body": {"stream": True}}) + "\n")
    found = batch(tmp_path, group, status=3)
    assert "3 answered, 5 failed, 0 had before of 8" in capsys.readouterr().err
    body = found["chat"]["response"]["body"]
    assert "42" in body["choices"][0]["message"]["content"] and body["usage"]["completion_tokens"] > 0
    assert found["chat"]["error"] is None and found["chat"]["response"]["request_id"] == body["id"]
    assert len(found["text"]["response"]["body"]["choices"]) == 2
    assert len(found["e"]["response"]["body"]["data"]) == 2
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["none"]["response"]["status_code"] == 404
    assert found["batch_req_7"]["error"]["line"] == 7 and "not JSON" in found["batch_req_7"]["error"]["message"]
    assert "must be one of" in found["wrong"]["error"]["message"] and "stream" in found["s"]["error"]["message"]
    assert batch(tmp_path, group, status=3) == found and "8 had before" in capsys.readouterr().err


def test_goes_on_after_a_kill(group, tmp_path, capsys):
    long = {"max_tokens": 200, "ignore_eos": True}
    (tmp_path / "in").write_text("".join(line(f"r{i}", prompt=f"Number {i}:", **long) for i in range(60)))
    words = [sys.executable, "-m", "allspark_launch", "batch", "--address", group, "--concurrency", "3"]
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        before = len((tmp_path / "out").read_bytes().splitlines()) if number != signal.SIGKILL else 0
        process = subprocess.Popen([*words, str(tmp_path / "in"), str(tmp_path / "out")], stderr=subprocess.PIPE)
        wait_for(lambda: (tmp_path / "out").exists()
                 and len((tmp_path / "out").read_bytes().splitlines()) >= before + 4, 60)
        process.send_signal(number)
        assert process.wait(20) == (130 if number != signal.SIGKILL else -number)
        assert b"Traceback" not in process.stderr.read()
        process.stderr.close()
    data = (tmp_path / "out").read_bytes()
    whole = len(data.splitlines())
    (tmp_path / "out").write_bytes(data + data[:50])  # torn
    found = batch(tmp_path, group, "--concurrency", "8")
    assert sorted(found) == sorted(f"r{i}" for i in range(60)) and f"{whole} had before" in capsys.readouterr().err
    assert {entry["response"]["status_code"] for entry in found.values()} == {200}
    with ClientEngine(group) as engine:
        wait_for(lambda: engine.get_as_engine_stat(MODEL).running_request == 0)


def test_a_full_queue_is_waited_out(group, tmp_path):
    (tmp_path / "in").write_text("".join(line(f"r{i}", max_tokens=20) for i in range(24)))
    start = time.monotonic()
    found = batch(tmp_path, group, "--concurrency", "24")
    assert {entry["response"]["status_code"] for entry in found.values()} == {200}
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_a_full_disk_ends_the_batch_which_then_goes_on(group, tmp_path, capsys):
    (tmp_path / "in").write_text("".join(line(f"r{i}") for i in range(20)))
    words = [sys.executable, "-m", "allspark_launch", "batch", "--address", group, "--concurrency", "4"]
    limit = ["prlimit", "--fsize=3000"]     # of a file; the system then refuses to write as it does on a full disk
    done = subprocess.run([*limit, *words, str(tmp_path / "in"), str(tmp_path / "out")], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and "out cannot be written: File too large; run the command again" in done.stderr
    assert "Traceback" not in done.stderr and 2000 < (tmp_path / "out").stat().st_size <= 3000
    assert len(batch(tmp_path, group)) == 20


def test_output_files(tmp_path):
    path = tmp_path / "out"
    output = Output(path)
    output.write(1, "a", (200, {"id": "x"}))
    output.write(2, None, None, "no")
    with pytest.raises(ValueError, match="is being written by another batch"):
        Output(path)
    output.close()
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        output = Output(path)
        lines = data[:cut].count(b"\n") + (data[cut : cut + 1] == b"\n")
        assert len(output.done) == lines and output.has(1, "a") == (lines > 0) and output.has(2, None) == (lines > 1)
        output.close()
        assert path.read_bytes() == b"".join(data.splitlines(True)[:lines])
    path.write_bytes(b"something else\n" + data)
    with pytest.raises(ValueError, match="line 1 is not a line of a batch's output"):
        Output(path)
    assert path.read_bytes().startswith(b"something else")


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("[]", "holds a list"), ("5", "holds a int"), ("{}", "custom_id is None"),
        ('{"custom_id": 5}', "custom_id is 5"),
        ('{"custom_id": "a"}', "url is None"), ('{"custom_id": "a", "url": "/v1/chat/completions"}',
                                                "body is NoneType"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_lines_that_are_no_request(text, wrong):
    with pytest.raises(NoRequest, match=wrong):
        parse_line(text.encode())


def test_wrong_uses(group, tmp_path, capsys, monkeypatch):
    (tmp_path / "in").write_text(line("a") + line("a"))
    monkeypatch.delenv("ALLSPARK_ADDRESS", raising=False)
    for words, text in (
        (["--address", group], "line 2 has the custom_id 'a' of an earlier line"),
        (["--address", group, "--concurrency", "0"], "--concurrency 0 must be"),
        (["--address", group, "--model", "/x"], "give one of them"),
        (["--address", f"unix:{tmp_path}/none"], "cannot be reached"),
        (["--model", "/no/such"], "there is no such file"),
    ):
        assert main(["batch", *words, str(tmp_path / "in"), str(tmp_path / "out")]) == 1
        assert text in capsys.readouterr().err
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "in")]) == 1 and "one file" in capsys.readouterr().err
    assert main(["batch", str(tmp_path / "no"), str(tmp_path / "out")]) == 1
    assert os.path.getsize(tmp_path / "in") == len(line("a") * 2)


def test_a_group_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("ALLSPARK_ADDRESS", raising=False)
    (tmp_path / "in").write_text(line("a", model="mine"))
    words = ["--model-name", "mine", "--ranks", "1", "--threads", "1", str(tmp_path / "in"), str(tmp_path / "out")]
    assert main(["batch", *words]) == 0
    assert json.loads((tmp_path / "out").read_text())["response"]["body"]["model"] == "mine"
