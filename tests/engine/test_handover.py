"""Prefill apart from decode, with real groups: the bits are the same, whatever happens on the way."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from allspark_client import AsModelConfig, ClientEngine
from allspark_client._proto import allspark_pb2 as pb
from allspark_launch.group.background import background_group
from allspark_server import Engine
from allspark_server.engine import handover
from allspark_server.engine.handover import Handover, Records
from allspark_server.runtime.host_cache import HEADER, SpanRecords, records_path

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.checkpoints import checkpoint
from support.processes import ranks_of

slow = pytest.mark.slow

SPAN, LENGTH = 16, 400
PROMPTS = [[(17 * i * i + 31 * seed + i) % 500 for i in range(LENGTH - seed)] for seed in range(4)]


def model_config(directory: Path | None, name: str = "qwen2-gqa-tied", **fields) -> AsModelConfig:
    kept = {"host_cache_dir": str(directory), "host_cache_memory": 16 << 20} if directory else {}
    given = {"cache_span_size": SPAN, "engine_max_length": 1024, "engine_max_batch": 3, "num_threads": 1,
             "cache_memory": 16 << 20, **kept, **fields}
    return AsModelConfig(model_name="m", model_path=str(checkpoint(name)), **given)


class Group:
    """A group that runs, and a client of it."""

    def __init__(self, engine: ClientEngine, address: str, supervisor: int, directory: Path | None, ranks: int):
        self.engine, self.address, self.supervisor, self.directory, self.ranks = (
            engine, address, supervisor, directory, ranks)

    def ask(self, prompt: list[int], count: int = 6) -> tuple[list[int], list[float]]:
        _, handle, results = self.engine.start_request("m", {"input_ids": prompt}, {
            "seed": 7, "max_new_tokens": count, "eos_token_id": -1, "logprobs": True})
        ids, logprobs = [], []
        for elements in results:
            ids += elements.ids_from_generate
            logprobs += elements.token_logprobs_list
        self.engine.release_request("m", handle)
        return ids, logprobs

    def metric(self, name: str, **labels: str) -> float:
        text = self.engine._pool.members[0].call("GetMetrics", pb.MetricsRequest(), pb.Metrics).text
        found = re.findall(rf"^allspark_{name}{{([^}}]*)}} (\S+)$", text, re.MULTILINE)
        assert found, name
        return sum(float(value) for given, value in found if all(f'{k}="{v}"' in given for k, v in labels.items()))

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: int(count) for outcome in ("file", "stream", "none", "failed")
                if (count := self.metric("handover_requests_total", outcome=outcome))}

    def kill(self) -> None:
        """Ends all of it, so that it does not come back."""
        supervisor = psutil.Process(self.supervisor)
        processes = [supervisor, *supervisor.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP if process is supervisor else signal.SIGKILL)
        supervisor.kill()


@contextlib.contextmanager
def group(directory: Path | None, *arguments: str, ranks: int = 1, token: str | None = None,
          **fields) -> Iterator[Group]:
    with background_group(["--ranks", str(ranks), *arguments], timeout=60) as started, \
            ClientEngine(started.addresses[0], reconnect_timeout=5, token=token) as engine:
        engine.install_model(model_config(directory, **fields))
        engine.start_model("m")
        yield Group(engine, started.addresses[0], started.supervisor_pid, directory, ranks)


def asks(address: str, tokens: int = 64) -> list[str]:
    return ["--prefill-from", address, "--prefill-tokens", str(tokens)]


def whole_spans(prompt: list[int]) -> int:
    return (len(prompt) - 1) // SPAN * SPAN


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=slow), 2])
def test_spans_of_another_group_have_the_same_bits(tmp_path, ranks):
    with group(tmp_path / "p", ranks=ranks) as prefill, group(tmp_path / "d", *asks(prefill.address),
                                                              ranks=ranks) as decode:
        expected = [prefill.ask(prompt) for prompt in PROMPTS[:2]]
        prefill.engine.reset_prefix_cache("m")
        assert [decode.ask(prompt) for prompt in PROMPTS[:2]] == expected
        assert decode.outcomes == {"file": 2}
        assert decode.metric("handover_tokens_total") == sum(map(whole_spans, PROMPTS[:2]))
        assert decode.metric("handover_bytes_total") > 0 == decode.metric("handover_lost_spans_total")
        assert prefill.engine.get_as_engine_stat("m").total_generated_token == 2 * 6 + 2
        # What is known already, and short prompts, are not asked for.
        assert decode.ask(PROMPTS[0]) == expected[0]
        decode.ask(PROMPTS[2][:60])
        assert decode.outcomes == {"file": 2}
        # The rest of a prompt whose beginning is known
        longer = PROMPTS[0] + PROMPTS[3][:200]
        assert decode.ask(longer) == prefill.ask(longer)
        rest = whole_spans(longer) - len(PROMPTS[0])
        assert decode.metric("handover_tokens_total") == sum(map(whole_spans, PROMPTS[:2])) + rest


def test_over_the_network_and_damaged(tmp_path):
    with group(tmp_path / "p", ranks=2) as prefill, group(tmp_path / "d", *asks(prefill.address), ranks=2) as decode:
        expected = [prefill.ask(prompt) for prompt in PROMPTS[:2]]
        assert decode.ask(PROMPTS[0]) == expected[0]
        # A span's content that changes after it was saved: what follows is computed. The record of another one stays.
        path = Path(records_path(prefill.directory, "m", 1, 2))
        known = SpanRecords(str(path))
        with open(path, "r+b") as file:
            entries = file.read(HEADER + 32 * known.spans)[HEADER:]
            used = [record for record in range(known.spans) if entries[32 * record:][:16] != bytes(16)]
            assert len(used) >= LENGTH // SPAN - 1
            file.seek(-(known.spans - used[5]) * (-(-known.bytes // 64) * 64) + 7, os.SEEK_END)
            file.write(b"!")
        decode.engine.reset_prefix_cache("m")
        assert decode.ask(PROMPTS[0]) == expected[0]
        assert decode.metric("handover_lost_spans_total") == 1 and decode.outcomes == {"file": 2}
        assert whole_spans(PROMPTS[0]) < decode.metric("handover_tokens_total") < 2 * whole_spans(PROMPTS[0])
        # Without the files: as if the group were on another host.
        prefill.directory.rename(tmp_path / "elsewhere")
        decode.engine.reset_prefix_cache("m")
        assert [decode.ask(prompt) for prompt in PROMPTS[:2]] == expected
        assert decode.metric("handover_lost_spans_total") == 2 and decode.outcomes == {"file": 2, "stream": 2}


def test_a_model_without_a_file_says_so_once(caplog):
    with Engine() as engine:
        engine.handover = Handover(engine, ["127.0.0.1:1"], 64, 1.0)
        engine.install_model(model_config(None))
        engine.start_model("m")
        asked = Group(engine, "", 0, None, 1)
        assert asked.ask(PROMPTS[0]) and asked.ask(PROMPTS[1])
        assert caplog.text.count("taking spans of other groups needs host_cache_memory and host_cache_dir") == 1


def test_by_tcp_with_a_token(tmp_path):
    names = {}
    for name, text in {"all": "admin rules\ndoor passes\ngenerate asks\n", "door": "door passes\n",
                       "user": "generate asks\n"}.items():
        names[name] = tmp_path / name
        names[name].write_text(text)
        names[name].chmod(0o600)
    tcp = ["--address", "127.0.0.1:0", "--token-file", str(names["all"])]
    with group(tmp_path / "p", *tcp, token="rules") as prefill:
        assert prefill.address.startswith("127.0.0.1:")
        expected = prefill.ask(PROMPTS[0])
        for name, outcome in (("door", "file"), ("user", "failed")):
            shown = ["--prefill-token-file", str(names[name])]
            with group(tmp_path / f"d-{name}", *asks(prefill.address), *shown) as decode:
                assert decode.ask(PROMPTS[0]) == expected and decode.outcomes == {outcome: 1}


def test_a_group_that_is_killed_is_not_waited_for(tmp_path):
    with group(tmp_path / "p") as prefill, group(tmp_path / "d", *asks(prefill.address)) as decode:
        expected = [prefill.ask(prompt) for prompt in PROMPTS]
        assert decode.ask(PROMPTS[0]) == expected[0]
        prefill.kill()
        began = time.monotonic()
        assert [decode.ask(prompt) for prompt in PROMPTS[1:]] == expected[1:]
        assert decode.outcomes == {"file": 1, "failed": 3} and time.monotonic() - began < 20


def test_a_group_that_is_killed_while_it_computes(tmp_path):
    with group(tmp_path / "p") as prefill, group(tmp_path / "d", *asks(prefill.address)) as decode:
        expected = prefill.ask(PROMPTS[0])
        for rank in ranks_of(prefill.supervisor):
            rank.suspend()      # it accepts the call and never answers
        answer: list = []
        asking = threading.Thread(target=lambda: answer.append(decode.ask(PROMPTS[0])))
        asking.start()
        asking.join(1.0)
        assert asking.is_alive() and decode.engine.get_as_engine_stat("m").pendding_request == 1
        prefill.kill()
        asking.join(30.0)
        assert answer == [expected] and decode.outcomes == {"failed": 1}


def test_a_group_that_does_not_answer(tmp_path):
    with group(tmp_path / "p") as prefill, group(
            tmp_path / "d", *asks(prefill.address), "--prefill-timeout", "1") as decode:
        expected = prefill.ask(PROMPTS[0])
        for rank in ranks_of(prefill.supervisor):
            rank.suspend()
        assert decode.ask(PROMPTS[0]) == expected and decode.outcomes == {"failed": 1}
        prefill.kill()


@pytest.mark.parametrize("case", ["fingerprint", pytest.param("no files", marks=slow)])
def test_groups_that_are_unlike(tmp_path, case):
    fields = {"cache_dtype": "bfloat16"} if case == "fingerprint" else {}
    with group(tmp_path / "p" if fields else None, **fields) as prefill, group(
            tmp_path / "d", *asks(prefill.address), cache_dtype="float32") as decode, Engine() as alone:
        alone.install_model(model_config(None, cache_dtype="float32"))
        alone.start_model("m")
        assert decode.ask(PROMPTS[0]) == Group(alone, "", 0, tmp_path, 1).ask(PROMPTS[0])
        assert decode.outcomes == {"failed": 1}
        assert prefill.engine.get_as_engine_stat("m").total_prefill_token == 0


@pytest.mark.parametrize("name, length", [
    ("qwen3-5", 400), pytest.param("qwen3-5", 384, marks=slow), pytest.param("gemma3", 400, marks=slow)])
def test_recurrent_states_and_windows(tmp_path, name, length):
    fields = {"name": name, "cache_span_size": 32}
    prompt = PROMPTS[0][:length]
    with group(tmp_path / "p", **fields) as prefill, group(tmp_path / "d", *asks(prefill.address), **fields) as decode:
        expected = prefill.ask(prompt)
        prefill.engine.reset_prefix_cache("m")
        assert decode.ask(prompt) == expected
        assert decode.outcomes == {"file": 1}
        # Where the last state lies: at a multiple of 64 positions
        reach = (length - 1) // (64 if name == "qwen3-5" else 32) * (64 if name == "qwen3-5" else 32)
        assert decode.metric("handover_tokens_total") == decode.engine.get_as_engine_stat("m").prefix_cache_hit_token
        assert decode.metric("handover_tokens_total") == reach


def test_the_release_of_a_model_waits_for_copies_but_not_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(handover, "SpanRecords", lambda path, writable: path)
    records = Records(str(tmp_path), "m", 2)
    with records.open():
        closing = threading.Thread(target=records.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive() and not caplog.records
    with pytest.raises(ValueError, match="the model was released"), records.open():
        pass

    monkeypatch.setattr(handover, "_CLOSE_SECONDS", 0.1)
    records = Records(str(tmp_path), "m", 2)
    with records.open():
        records.close()
    assert "1 copies of spans have not ended within 0.1 s" in caplog.text
