"""Clients and servers of neighbouring versions of the protocol work together; others are refused by name.

The last version's side is a recording of it (support/versions), or in slow tests that version itself.
"""
import base64
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine, GenerateRequestStatus as Status, convert
from allspark_client._proto import allspark_pb2 as pb
from support.fake_engine import FakeEngine
from support.fake_service import expected, serving, wait_until
from support.paths import ROOT, SUPPORT, TESTS
from support.versions import script, wire

#: the last commit of version 1 of the protocol
LAST = "0aa324429336a5a1225802b2368ffd766eef8aff"
VERSIONS = SUPPORT / "versions"
RECORD = json.loads((VERSIONS / "protocol-1.json").read_text())


def outcomes(messages: list[bytes]) -> dict[int, dict]:
    """What a server has answered to each request of a session."""
    found: dict[int, dict] = {}
    for event in (event for data in messages for event in pb.SessionResponse.FromString(data).events):
        one = found.setdefault(event.id, {"ids": {}, "logprobs": [], "status": None, "reason": "", "kind": None})
        one["kind"] = event.WhichOneof("outcome") or one["kind"]
        for elements in event.elements:
            one["ids"].setdefault(elements.sample_index, []).extend(elements.ids)
            one["logprobs"] += elements.token_logprobs
        if event.HasField("status"):
            one["status"] = Status(event.status)
        one["reason"] = event.finish_reason or one["reason"]
    return found


def is_settled(answers: list[bytes], message: bytes | None) -> bool:
    """Whether a client would send this message now: all earlier requests have ended, or one that it stops has begun."""
    sent = pb.SessionRequest.FromString(message or b"")
    found = outcomes(answers)
    if sent.stop:
        return bool(found.get(sent.stop, {"ids": {}})["ids"])
    if sent.start.id > 1 and sent.start.id - 1 not in found:
        return False
    return (bool(answers) or sent.HasField("hello")) and all(
        one["kind"] == "refused" or (one["status"] is not None and one["status"].final) for one in found.values())


@pytest.mark.parametrize("number", range(len(RECORD["sessions"])))
def test_a_client_of_the_last_version(number):
    frames = RECORD["sessions"][number]
    with serving(core=FakeEngine(0.002)) as (_, address):
        answers = wire.play_client(address, frames, is_settled)
    assert pb.SessionResponse.FromString(answers[0]).info.protocol == RECORD["protocol"] == 1
    then = outcomes([base64.b64decode(data) for side, data in frames if side == "server"])
    now = outcomes(answers)
    assert then.keys() == now.keys()
    for id_, one in then.items():
        if one["kind"] == "started" and not (one["status"] and one["status"].final):       # the connection was lost
            assert now[id_]["ids"][0][:len(one["ids"][0])] == one["ids"][0]
        elif one["status"] is Status.GenerateInterrupted:
            assert (now[id_]["status"], now[id_]["reason"]) == (one["status"], one["reason"])
        else:
            assert now[id_] == one


def test_calls_of_the_last_version():
    with serving(core=FakeEngine(0.002)) as (_, address), grpc.insecure_channel(address) as channel:
        for method, data, answer in RECORD["calls"]:
            now = channel.unary_unary(method, wire._same, wire._same)(base64.b64decode(data))
            if method.endswith("GetModelInfo"):
                kind = pb.ModelInfo.FromString
                assert kind(now) == kind(base64.b64decode(answer))


def test_a_server_of_the_last_version(tmp_path):
    """One request loses its connection and is resumed."""
    address = f"unix:{tmp_path}/s"
    with wire.playing_server(address, RECORD), ClientEngine(address, reconnect_timeout=10) as engine:
        assert script.run(engine) == RECORD["results"]


def greet(address: str, **versions: int) -> pb.ServerInfo:
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(wire.SESSION, pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString)
        return next(call(iter([pb.SessionRequest(hello=pb.Hello(client="c", **versions))]))).info


def test_a_server_negotiates(monkeypatch):
    """It uses the newest version that both speak, and refuses a client without one by name."""
    with serving() as (_, address):
        assert greet(address, protocol=1).protocol == 1                             # of the last version
        assert greet(address, protocol=1, newest_protocol=2).protocol == 2
        info = greet(address, protocol=2, newest_protocol=5)                        # of the next version
        assert (info.protocol, info.oldest_protocol) == (4, 1)
        newer = r"speaks versions 5 to 6 of the protocol, this server \(.*\) speaks versions 1 to 4: upgrade this s"
        for versions, text in (({"protocol": 5, "newest_protocol": 6}, newer), ({"protocol": 7}, "speaks version 7 of"),
                               ({}, "speaks version 0 .*: upgrade the client")):
            with pytest.raises(grpc.RpcError) as caught:
                greet(address, **versions)
            assert caught.match("the client .'c'. " + text)
        monkeypatch.setattr(convert, "OLDEST_PROTOCOL", 3)
        with pytest.raises(grpc.RpcError, match=r"version 1 .* speaks versions 3 to 4: upgrade the client .'c'"):
            greet(address, protocol=1)


@pytest.mark.parametrize("newest", [2, 3])
def test_each_version_gets_tokens_in_its_own_form(newest):
    """Columns of tokens from version 3 on; before it only events."""
    config = {"max_new_tokens": 9, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1}
    request = pb.GenerateRequest(model="m", input_ids=pb.TokenIds(ids=[4, 5]), want_text=True,
                                 config=pb.GenerateConfig(**config))
    release = threading.Event()

    def requests():
        yield pb.SessionRequest(hello=pb.Hello(protocol=1, newest_protocol=newest, client="c"))
        yield pb.SessionRequest(start=pb.StartRequest(id=1, request=request))
        release.wait(20)

    found: dict[int, list] = {0: [], 1: []}
    in_columns = 0
    with serving(core=FakeEngine(0.005)) as (_, address), grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(wire.SESSION, pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString)
        for message in call(requests()):
            assert newest == 3 or not message.HasField("tokens")
            for _, token, text, sample, logprob, top in convert.tokens_from_pb(message.tokens):
                found[sample].append((token, text, logprob, top))
                in_columns += 1
            for event in message.events:
                for elements in map(convert.elements_from_pb, event.elements):
                    found[elements.sample_index] += zip(
                        elements.ids_from_generate, [elements.text], elements.token_logprobs_list,
                        elements.log_probs_list, strict=True)
            if any(event.HasField("stat") for event in message.events):
                break
        release.set()
        with ClientEngine(address) as engine, engine.generate("m", {"input_ids": [4, 5]}, config) as generation:
            generation.read()
    for sample, rows in enumerate(generation.samples):
        ids, texts, logprobs, tops = zip(*found[sample])
        assert (list(ids), list(logprobs)) == (rows.ids_from_generate, rows.token_logprobs_list)
        assert list(tops) == rows.log_probs_list and texts == tuple(f"<{i}>" for i in ids)
    assert in_columns > 6 if newest == 3 else not in_columns


@pytest.mark.parametrize("versions,text", [
    ({"protocol": 6, "oldest_protocol": 5}, r"\(version 9.9\) speaks versions 5 to 6 of the protocol, this client "
                                            r"\(allspark_client .*\) speaks versions 1 to 4: upgrade this client"),
    ({"protocol": 0}, "version 0 .*: upgrade the server")])
def test_a_client_refuses_a_server_without_a_common_version(versions, text, tmp_path):
    info = pb.SessionResponse(info=pb.ServerInfo(version="9.9", **versions)).SerializeToString()
    frames = [["client", ""], ["server", base64.b64encode(info).decode()], ["client", ""]]
    with wire.playing_server(f"unix:{tmp_path}/s", {"sessions": [frames], "calls": []}):
        with pytest.raises(AllSparkError, match=text):
            ClientEngine(f"unix:{tmp_path}/s")


def test_defaults_are_not_sent():
    """A server of the version before refuses fields that it lacks."""
    config = AsModelConfig("m", "/p", engine_max_batch=7, enable_prefix_cache=False)
    message = convert.model_config_to_pb(config)
    assert sorted(message.fields) == ["enable_prefix_cache", "engine_max_batch", "model_name", "model_path"]
    assert convert.model_config_from_pb(message) == config
    assert convert.model_config_from_pb(convert.model_config_to_pb(AsModelConfig("m"))) == AsModelConfig("m")


# --- the last version itself ---


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    """The last version: a checkout, and its client as a wheel installs it."""
    folder = tmp_path_factory.mktemp("last")
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", LAST], capture_output=True)
    if archive.returncode:
        pytest.skip(f"commit {LAST} is not in this checkout")
    (folder / "tree").mkdir()
    subprocess.run(["tar", "x", "-C", str(folder / "tree")], input=archive.stdout, check=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "tree")],
                   env={**os.environ, "ALLSPARK_CLIENT_ONLY": "1"}, check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "client"), *map(str, folder.glob("*.whl"))],
                   check=True)
    subprocess.run([sys.executable, "setup.py", "-q", "build_proto"], cwd=folder / "tree", check=True)
    return folder


class Server:
    """A server in a process of its own, of this version or of that in `tree`. Its fingerprint is its version's."""

    def __init__(self, address: str, tree: Path | None = None):
        paths = [tree, tree / "tests"] if tree else [ROOT, TESTS]
        words = [sys.executable, str(VERSIONS / "server.py"), address, "then" if tree else "now"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))})
        assert self.process.stdout.readline().strip() == address

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


CLIENT = """
import json, sys, allspark_client
from allspark_client import ClientEngine
import script
assert allspark_client.__file__.startswith(sys.argv[1])
with ClientEngine(sys.argv[2].split(","), reconnect_timeout=20) as engine:
    if len(sys.argv) == 3:
        print(json.dumps(script.run(engine)))
    else:
        requests = json.loads(sys.stdin.read())
        script.load(engine, requests, 3, lambda *answer: (sys.stdout.write(json.dumps(answer) + "\\n"),
                                                           sys.stdout.flush()))
"""


def client_process(last: Path, *words: str) -> subprocess.Popen:
    """The last version's client."""
    return subprocess.Popen([sys.executable, "-c", CLIENT, str(last), *words], stdin=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": f"{last / 'client'}{os.pathsep}{VERSIONS}"},
                            stdout=subprocess.PIPE, cwd=last)


@pytest.mark.slow
def test_the_last_client_and_the_last_server(last, tmp_path):
    wanted = {name: value for name, value in RECORD["results"].items() if name != "lost"}
    lost = RECORD["results"]["lost"]
    for name, tree in (("now", None), ("then", last / "tree")):
        address = f"unix:{tmp_path}/{name}"
        with Server(address, tree), ClientEngine(address) as engine:
            with client_process(last, address) as process:
                found = json.loads(process.communicate(timeout=60)[0])
            for results in (found, script.run(engine)):
                assert results.pop("lost") == lost and results == wanted


@pytest.mark.slow
def test_a_pool_is_upgraded_under_load(last, tmp_path):
    """One member after the other, with clients of both versions. The members' fingerprints differ, so that no request
    can move: each finishes while its member drains.
    """
    addresses = [f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"]
    prompts = [[i % 900, i // 900, 3] for i in range(360)]
    answers: list[tuple[list[int], list[int], str]] = []
    members = [Server(address, last / "tree") for address in addresses]

    def more() -> None:
        """Waits until forty more requests have ended."""
        count = len(answers) + 40
        wait_until(lambda: len(answers) >= count, 30)

    try:
        with ClientEngine(addresses, reconnect_timeout=20) as engine, \
                client_process(last, ",".join(addresses), "load") as old:
            old.stdin.write(json.dumps(prompts[:180]))
            old.stdin.close()
            own = threading.Thread(target=script.load, args=(engine, prompts[180:], 3, lambda *a: answers.append(a)))
            own.start()
            reader = threading.Thread(target=lambda: answers.extend(map(json.loads, old.stdout)))
            reader.start()
            for i, address in enumerate(addresses):
                more()
                member = next(m for m in engine._pool.members if m.address == address)
                assert member.session().info.protocol == 1
                drain = functools.partial(member.call, "Drain", pb.DrainRequest(), pb.ServerInfo)
                wait_until(lambda drain=drain: drain().requests == 0, 20)
                members[i].__exit__()
                members[i] = Server(address)
                wait_until(lambda m=member: m.connected or m.reconnect_soon(), 20)
                assert member.session().info.protocol == 2
            more()
            own.join(60)
            old.wait(60)
            reader.join(10)
    finally:
        for member in members:
            member.__exit__()
    assert len(answers) == len(prompts)
    for prompt, ids, status in answers:
        assert status == "GenerateFinished" and ids == expected(prompt, 40)
