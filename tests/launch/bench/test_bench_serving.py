"""`allspark bench serving`: workloads, percentiles, and every kind of target at the smallest sizes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading

import numpy as np
import pytest

from allspark_launch.bench.latencies import Figures, Target, measured
from allspark_launch.bench.load import Point
from allspark_launch.bench.targets import Answer
from allspark_launch.bench.workload import Arrivals, Shape, distribution, read_trace, sessions
from allspark_launch.cli import main
from support.fake_engine import FakeEngine
from support.fake_service import serving


def bench(capsys, *words: str) -> str:
    assert main(["bench", "serving", *words]) == 0
    return capsys.readouterr().out


# --- workload ---


def test_distributions():
    rng = np.random.default_rng(0)
    for text, low, high, mean in (
        ("7", 7, 7, 7),
        ("uniform:5:9", 5, 9, 7),
        ("normal:100:10", 50, 150, 100),
        ("lognormal:100:0.5", 10, 1000, 113),
        ("exp:50", 1, 600, 50),
        ("choice:1:1:4", 1, 4, 2),
    ):
        values = [distribution(text)(rng) for _ in range(2000)]
        assert low <= min(values) and max(values) <= high and abs(np.mean(values) - mean) < 0.1 * mean, text
    for text in ("", "x", "uniform:5", "uniform:9:5", "normal:1", "-5", "poisson:3"):
        with pytest.raises(ValueError, match="no distribution of lengths"):
            distribution(text)


def test_arrivals():
    for text, burst in (("poisson", 1), ("constant", 1), ("burst:5", 5), ("gamma:0.5", 1)):
        times = list(itertools.islice(Arrivals.parse(text).times(10.0, [1]), 3000))
        assert times == sorted(times) and 270 < times[-1] < 330, text
        assert times == list(itertools.islice(Arrivals.parse(text).times(10.0, [1]), 3000))
        assert len(set(times)) == 3000 // burst
    for text in ("", "burst:0", "burst:1.5", "gamma:-1", "poisson:2", "often"):
        with pytest.raises(ValueError, match="must be poisson"):
            Arrivals.parse(text)


def test_sessions():
    shape = Shape(distribution("uniform:3:9"), distribution("5"), distribution("choice:1:3"), 16, 2, {}, 0.5)
    some = list(itertools.islice(sessions(shape, [1, 0, 0], 1000), 200))
    assert some == list(itertools.islice(sessions(shape, [1, 0, 0], 1000), 200))
    other = list(itertools.islice(sessions(shape, [1, 1, 0], 1000), 200))
    assert some != other
    assert {tuple(s.turns[0].ids[:16]) for s in some} == {tuple(s.turns[0].ids[:16]) for s in other}
    assert len({tuple(s.turns[0].ids[:16]) for s in some}) == 2
    assert {len(s.turns) for s in some} == {1, 3} and all(3 <= len(t.ids) <= 9 for s in some for t in s.turns[1:])
    guided = [t.schema is not None for s in some for t in s.turns]
    assert 0.3 < np.mean(guided) < 0.7
    assert len(some[0].turns[0].text.split()) == len(some[0].turns[0].ids)


def test_traces(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 2500, "input_length": 7, "output_length": 3}\n\n'
                    '{"arrival": 1, "prompt": 4, "output": 2}\n{"arrival": 9, "prompt": 4, "output": 2}\n')
    assert read_trace(path, 2) == [(0.0, 4, 2), (1.5, 7, 3)]
    shape = Shape(None, None, None, trace=read_trace(path, 9))
    assert [(s.arrival, len(s.turns[0].ids), s.turns[0].output) for s in sessions(shape, [0], 50)] == [
        (0.0, 4, 2), (1.5, 7, 3), (8.0, 4, 2)]
    for line in ("x", "[]", '{"arrival": 1}', '{"arrival": -1, "prompt": 4, "output": 2}'):
        path.write_text(line)
        with pytest.raises(ValueError, match="line 1: .*a line is such as"):
            read_trace(path, 9)
    path.write_text("")
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(path, 9)


# --- figures ---


def test_figures():
    def answer(due, *times, error=""):
        return Answer(due, due, [(t, 1) for t in times], times[-1] if times else 0, 5, 1, len(times), error)

    one = answer(1.0, 1.1, 1.2, 1.4)
    assert measured(one, "ttft") == pytest.approx([100]) and measured(one, "e2e") == pytest.approx([400])
    assert measured(one, "itl") == pytest.approx([100, 200]) and measured(one, "tpot") == pytest.approx([150])
    figures, slo = Figures("x", Point(clients=2)), Target.parse("ttft=150,itl=210")
    figures.add([one, answer(1.0, 1.3), answer(2.0, 2.1, 2.4), answer(3.0, error="gone")], 2.0, slo)
    found = figures.to_dict()["rounds"][0]
    assert (found["requests"], found["failed"], found["goodput"]) == (3, 1, 0.5)
    assert found["output_tokens_per_second"] == 3 and found["ttft"]["p50"] == pytest.approx(100)
    assert figures.errors == {"gone": 1}
    figures.add([answer(0.0, 1.0)], 1.0, slo)
    assert figures.median("ttft", "p50") == pytest.approx(550) and figures.median("itl", "p50") == pytest.approx(200)
    for text in ("ttft", "x=1", "ttft=0", "ttft=a"):
        with pytest.raises(ValueError, match="must be NAME=MILLISECONDS"):
            Target.parse(text)


# --- targets ---


@contextlib.contextmanager
def openai_endpoint(fail_after: int = 10**9):
    """An endpoint that answers with words; yields its URL and the bodies that it received."""
    bodies: list[dict] = []

    async def handle(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(h.split(b":")[1]) for h in head.lower().split(b"\r\n")
                               if h.startswith(b"content-length")), 0)
                data = await reader.readexactly(length)
                if head.startswith(b"GET /v1/models"):
                    answer(writer, b"200 OK", json.dumps({"data": [{"id": "m"}]}).encode())
                    continue
                body = json.loads(data)
                bodies.append({"path": head.split()[1].decode(), **body})
                if len(bodies) > fail_after:
                    answer(writer, b"429 Too Many Requests", b'{"error": {"message": "slow down"}}')
                    continue
                chat = b"chat" in head.split()[1]
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                             b"Transfer-Encoding: chunked\r\n\r\n")
                for i in range(body["max_tokens"]):
                    piece = {"delta": {"content": f"w{i} "}} if chat else {"text": f"w{i} "}
                    event(writer, {"choices": [piece]})
                    await asyncio.sleep(0.002)
                event(writer, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"],
                                                        "prompt_tokens_details": {"cached_tokens": 2}}})
                chunk(writer, b"data: [DONE]\n\n")
                writer.write(b"0\r\n\r\n")

    def answer(writer, status, data):
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(data) + data)

    def event(writer, value):
        chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(writer, data):
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

    started, loop = threading.Event(), asyncio.new_event_loop()
    port, server = 0, None

    async def serve():
        nonlocal port, server
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        started.set()

    def run():
        loop.create_task(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}", bodies
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_two_targets_get_the_same(capsys, tmp_path):
    pytest.importorskip("httpx")
    with openai_endpoint() as (url, bodies), serving(core=FakeEngine(interval=0.001)) as (core, address):
        text = bench(capsys, "--target", f"ours={address}", "--target", f"peer={url}", "--clients", "1,3", "--rounds",
                     "2",
                     "--requests", "6", "--prompt", "uniform:2:9", "--output", "4", "--slo", "ttft=1000,itl=500",
                     "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png"))
        ours = [spec.input_ids for spec in core.submitted]
        peers = [body["prompt"] for body in bodies]
        assert sorted(ours) == sorted(peers) and len(ours) == 2 + 2 * 2 * 6
        assert bodies[0]["path"] == "/v1/completions" and bodies[0]["ignore_eos"] and bodies[0]["model"] == "m"
    assert len(re.findall(r"clients +\d", text)) == 4 and "goodput" in text
    assert "peer, 3 clients: 24 of 36 prompt tokens came from the prefix cache" in text
    report = json.loads((tmp_path / "o.json").read_text())
    assert [(r["target"], r["clients"]) for r in report["results"]] == [
        ("ours", 1), ("ours", 3), ("peer", 1), ("peer", 3)]
    for result in report["results"]:
        assert all(r["requests"] == 6 and r["output_tokens"] == 24 and r["goodput"] > 0 for r in result["rounds"])
        assert result["median"]["ttft"]["p99"] > 0
    assert report["results"][3]["rounds"][0]["cached_tokens"] == 12
    assert (tmp_path / "o.png").stat().st_size > 10_000


def test_chats(capsys):
    pytest.importorskip("httpx")
    with openai_endpoint() as (url, bodies), serving(core=FakeEngine(interval=0.001)) as (core, address):
        bench(capsys, "--target", address, "--target", url, "--clients", "2", "--requests", "8", "--turns", "3",
              "--prompt", "2", "--output", "3", "--prefix", "4", "--warmup", "0")
        prompts = sorted((spec.input_ids for spec in core.submitted), key=len)
        assert [len(p) for p in prompts].count(6) in (3, 4) and len(prompts[-1]) == 6 + 3 + 2 + 3 + 2
        longest = prompts[-1]
        assert any(longest[:11] == p for p in prompts)
        chat = max((body["messages"] for body in bodies), key=len)
        assert [m["role"] for m in chat] == ["user", "assistant", "user", "assistant", "user"]
        assert chat[1]["content"] == "w0 w1 w2 " and bodies[0]["path"] == "/v1/chat/completions"


def test_open_loop_and_traces(capsys, tmp_path):
    with serving(core=FakeEngine(interval=0.001)) as (core, address):
        text = bench(capsys, "--target", address, "--rate", "100", "--arrivals", "burst:5", "--requests", "20",
                     "--output", "3", "--temperature", "0.8")
        assert "100/s" in text and len(core.submitted) == 22
        assert core.submitted[5].config.temperature == 0.8 and core.submitted[5].config.seed is not None
        trace = tmp_path / "t.jsonl"
        trace.write_text("".join(json.dumps({"timestamp": 100 * i, "input_length": i + 1, "output_length": 2}) + "\n"
                                 for i in range(5)))
        bench(capsys, "--target", address, "--trace", str(trace), "--rate", "2", "--warmup", "0")
        assert sorted(len(spec.input_ids) for spec in core.submitted[22:]) == [1, 2, 3, 4, 5]
        bench(capsys, "--target", address, "--duration", "0.3", "--clients", "2", "--output", "3")
        assert len(core.submitted) > 35


def test_guided(capsys, tmp_path):
    pytest.importorskip("httpx")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    with openai_endpoint() as (url, bodies):
        bench(capsys, "--target", url, "--clients", "1", "--requests", "4", "--schema", str(tmp_path / "s.json"))
    assert bodies[-1]["response_format"]["json_schema"]["schema"] == schema and "ignore_eos" not in bodies[-1]


def test_failures(capsys):
    pytest.importorskip("httpx")
    with openai_endpoint(fail_after=5) as (url, _):
        text = bench(capsys, "--target", url, "--clients", "1", "--requests", "6", "--output", "2")
        assert "3 x status 429" in text and "slow down" in text
    assert main(["bench", "serving", "--target", url, "--clients", "1"]) == 1      # nobody listens there any more
    assert "allspark bench: " in capsys.readouterr().err
    for words, text in ((["--clients", "1", "--rate", "2"], "give one of them"),
                        (["--target", "unix:/x", "--target", "unix:/x"], "two targets have one name"),
                        (["--model", "/no/such"], "there is no such file"), (["--guided", "2"], "--guided between")):
        assert main(["bench", "serving", *words]) == 1 and text in capsys.readouterr().err
    for words in (["--clients", "0"], ["--prompt", "x"], ["--slo", "x=1"], ["--arrivals", "x"]):
        with pytest.raises(SystemExit):
            main(["bench", "serving", *words])


def test_own_engine_and_group(capsys):
    text = bench(capsys, "--target", "engine", "--target", "group", "--ranks", "1", "--threads", "1", "--clients", "2",
                 "--requests", "4", "--prompt", "8", "--output", "4", "--set", "engine_max_length=64")
    assert "engine" in text and "group" in text
