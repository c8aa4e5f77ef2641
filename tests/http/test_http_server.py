"""The HTTP server: access, robustness, and life of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from allspark_launch.group import http_server as http_server_module
from allspark_launch.group.background import background_group, shipped_model
from allspark_launch.group.http_server import HttpOptions, open_socket
from support.certificates import make_certificate, shown_at
from support.http_helpers import KEYS, MODEL, STORY, post, refusal, token_file, within
from support.waiting import wait_for

LONG = {"model": MODEL, "messages": STORY, "ignore_eos": True, "max_tokens": 900, "n": 16,
        "temperature": 1}


def head(server, path: str, length: int | str, extra: str = "") -> bytes:
    """The head of a POST request."""
    size = f"content-length: {length}\r\n" if isinstance(length, int) else length
    return (f"POST {path} HTTP/1.1\r\nhost: {server.address}\r\nauthorization: Bearer {KEYS['generate']}\r\n"
            f"content-type: application/json\r\n{size}{extra}\r\n").encode()


def request(server, body: dict, path: str = "/v1/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    return head(server, path, len(data)) + data


# --- who may come in ---------------------------------------------------------------------------------------------


def test_keys(http_server):
    for header in ({"authorization": f"Bearer {KEYS['read']}"}, {"x-api-key": KEYS["read"]}):
        assert httpx.get(http_server.url + "/v1/models", headers=header).status_code == 200
    for header in ({}, {"authorization": "Bearer nonsense"}, {"authorization": KEYS["read"]}, {"x-api-key": ""},
                   {"authorization": "Basic " + KEYS["read"]}):
        answer = httpx.get(http_server.url + "/v1/models", headers=header)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(http_server.url + "/health").json() == {"status": "ok"}    # probes have no keys
    assert httpx.get(http_server.url + "/metrics").status_code == 401
    with http_server.client(KEYS["read"]) as reader:
        assert refusal(reader, "/v1/chat/completions", LONG, 403)["code"] == "insufficient_permissions"
        assert refusal(reader, "/tokenize", {"model": MODEL, "prompt": "a"}, 403)


def test_listeners_are_guarded_like_all(tmp_path):
    with pytest.raises(ValueError, match="refusing to serve on 127.0.0.1:8000"):
        HttpOptions().check()
    HttpOptions(token_file=token_file(tmp_path)).check()
    with pytest.raises(ValueError, match="cross the network in clear text"):
        HttpOptions(address="0.0.0.0:8000", token_file=token_file(tmp_path)).check()
    HttpOptions(address="0.0.0.0:8000", insecure=True).check()
    HttpOptions(address="unix:/tmp/socket").check()
    with pytest.raises(ValueError, match="--workers 0"):
        HttpOptions(insecure=True, workers=0).check()
    with pytest.raises(ValueError, match="--tls-cert and --tls-key"):
        HttpOptions(insecure=True, tls_cert="cert.pem").check()
    with pytest.raises(FileNotFoundError):
        HttpOptions(token_file=str(tmp_path / "none")).check()
    for wrong in ("8000", "host:port", "host:70000"):
        with pytest.raises(ValueError, match="neither HOST:PORT"):
            open_socket(wrong)
    taken, address = open_socket("127.0.0.1:0")
    with taken, pytest.raises(OSError, match=f"cannot listen on {address}"):
        open_socket(address)


def test_unix_socket(http_server, tmp_path):
    path = tmp_path / "socket"
    with server_at(http_server.group, path):
        assert os.stat(path).st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert not path.exists()


def server_at(group, path):
    from allspark_launch.group.http_server import http_server
    return http_server(HttpOptions(address=f"unix:{path}", pool=[group]))


# --- endpoints that no client of OpenAI's has --------------------------------------------------------------------


def test_tokenize(http_client, http_server):
    text = "Once upon a time, naïve 🙂"
    found = post(http_client, "/tokenize", prompt=text, return_token_strs=True)
    assert found["tokens"] == http_server.engine.tokenize(MODEL, {"text": text})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 1024
    assert found["token_strs"][0] == "Once"
    assert post(http_client, "/detokenize", tokens=found["tokens"]) == {"prompt": text}
    chat = post(http_client, "/tokenize", messages=STORY)
    assert chat["tokens"] == http_server.engine.tokenize(MODEL, {"messages": STORY})
    assert post(http_client, "/tokenize", prompt="")["tokens"] == []
    assert post(http_client, "/detokenize", tokens=[]) == {"prompt": ""}
    assert "one of 'prompt' and 'messages'" in refusal(http_client, "/tokenize", {"model": MODEL})["message"]
    refused = refusal(http_client, "/detokenize", {"model": MODEL, "tokens": [10**6]})
    assert "vocabulary" in refused["message"]


def test_metrics(http_client, http_server):
    post(http_client, "/v1/completions", prompt="Once", max_tokens=3)
    with http_server.client(KEYS["read"]) as reader:
        text = reader.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
              for line in text.splitlines() if line and not line.startswith("#")}
    assert values['allspark_http_requests_total{endpoint="completions",status="200"}'] >= 1
    assert values[f'allspark_http_generated_tokens_total{{model="{MODEL}"}}'] >= 3
    assert values[f'allspark_http_first_token_seconds_count{{model="{MODEL}"}}'] >= 1
    named = f'{{engine="0",member="{http_server.group}",model_name="{MODEL}"}}'
    assert values[f"vllm:num_requests_running{named}"] >= 0
    assert values[f"vllm:generation_tokens_total{named}"] >= 3 and values[f"vllm:kv_cache_usage_perc{named}"] <= 1


def test_unknown_paths(http_client):
    assert http_client.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
    answer = http_client.put("/v1/models")
    assert answer.status_code == 405 and "GET" in answer.headers["allow"]


# --- clients that vanish, and clients that do not read -----------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_vanished_clients_request_ends(http_server, stream):
    with http_server.connect() as connection:
        connection.sendall(request(http_server, {**LONG, "stream": stream}))
        assert within(10, lambda: http_server.live() > 0)
    assert within(1.5, lambda: http_server.live() == 0), "still computed"


def test_a_client_that_vanishes_while_it_waits(http_server):
    """More requests than the batch holds: waiting ones are cancelled, too."""
    connections = [http_server.connect() for _ in range(40)]
    for connection in connections:
        connection.sendall(request(http_server, {**LONG, "n": 8}))
    assert within(20, lambda: http_server.live() > 200)
    for connection in connections:
        connection.close()
    assert within(2, lambda: http_server.live() == 0)


def test_pipelined_requests(http_server):
    """Two requests at once on one connection are answered in order."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
    with http_server.connect() as connection:
        connection.sendall(2 * request(http_server, body, "/v1/completions"))
        data = b""
        while data.count(b'"object": "text_completion"') < 2:
            piece = connection.recv(65536)
            assert piece
            data += piece
    assert data.count(b"HTTP/1.1 200") == 2


# --- bodies ------------------------------------------------------------------------------------------------------


def test_bodies(http_server, http_client):
    for body, code in ((b"", "invalid_json"), (b"{", "invalid_json"), (b"[1]", "invalid_json"),
                       (b"null", "invalid_json"),
                       (b'{"model": "fable", "prompt": "\\ud800"}', "invalid_json"), (b"\xff", "invalid_json"),
                       (b'{"a":' * 10_000, "invalid_json")):
        assert refusal(http_client, "/v1/completions", body)["code"] == code, body[:40]
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = http_client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415
    for body, kind in ((b"[" * 20_000, "arrays and objects"), (b"[" + b"1," * 600_000, "values"),
                       (b"{" + b'"a":1,' * 70_000, "names")):
        refused = refusal(http_client, "/v1/completions", body, 413)
        assert refused["code"] == "request_too_large" and kind in refused["message"]
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    assert http_client.post("/v1/completions", content=b"x", headers=packed).status_code == 415
    assert post(http_client, "/v1/completions", prompt="Once", max_tokens=1)


def test_a_large_body(http_server):
    """100 MB, announced or not, is refused before it is read, and costs nothing."""
    with http_server.connect() as connection:
        connection.sendall(head(http_server, "/v1/completions", 100 << 20) + b"x" * 1000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    sent = 0
    with http_server.connect() as connection:
        connection.sendall(head(http_server, "/v1/completions", "transfer-encoding: chunked\r\n"))
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        try:
            while sent < 100:
                connection.sendall(chunk)
                sent += 1
        except OSError:
            assert sent >= 16
        else:
            pytest.fail("took 100 MB")


def test_a_body_that_is_cut_off(http_server, http_client):
    with http_server.connect() as connection:
        connection.sendall(head(http_server, "/v1/completions", 1000) + b'{"model":')
    with http_server.connect() as connection:
        connection.sendall(head(http_server, "/v1/completions", 1000) + b'{"model":')
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000) == b""
    assert post(http_client, "/v1/completions", prompt="Once", max_tokens=1)


def test_heads(http_server):
    with http_server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"x-filler: " + b"y" * 100_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 431")
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00", b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with http_server.connect() as connection:
            connection.sendall(junk)
            assert connection.recv(100)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_silent_connections_block_nobody(http_server, http_client, count):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < count + 1000:
        pytest.skip(f"this system allows {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    silent = [http_server.connect() for _ in range(count)]
    try:
        began = time.monotonic()
        assert post(http_client, "/v1/completions", prompt="Once", max_tokens=1)
        assert time.monotonic() - began < 2
    finally:
        for connection in silent:
            connection.close()


# --- its own life ------------------------------------------------------------------------------------------------


def test_a_server_outlives_its_groups(tmp_path):
    """It starts before there is a group and reports that; serves once there is one; and reports again when the group is
    gone.
    """
    address = f"unix:{tmp_path}/group"
    from allspark_launch.group.http_server import http_server
    with http_server(HttpOptions(address="127.0.0.1:0", pool=[address], insecure=True)) as server:
        with httpx.Client(base_url=f"http://{server.address}", timeout=30) as client:
            wait_for(lambda: answers(client), 20)
            found = client.get("/health")
            assert found.status_code == 503 and found.headers["retry-after"] == "1"
            assert found.json()["reason"] == "the pool cannot be reached"       # no address: this needs no key
            assert client.get("/health/ready").status_code == 503
            assert client.get("/health/live").json() == {"status": "ok"}
            assert refusal(client, "/v1/completions", {"model": MODEL, "prompt": "A"}, 503)["type"] == "server_error"
            command = ["--model", str(shipped_model()), "--max-length", "1024", "--address", address]
            with background_group(command, timeout=60.0):
                wait_for(lambda: client.get("/health").status_code == 200, 20)
                assert post(client, "/v1/completions", prompt="Once", max_tokens=1)


def answers(client) -> bool:
    try:
        return bool(client.get("/health"))
    except httpx.TransportError:
        return False


def test_a_worker_that_dies_is_started_again(http_server):
    from allspark_launch.group.http_server import http_server as start

    with start(HttpOptions(address="127.0.0.1:0", workers=2, insecure=True, pool=[http_server.group])) as server:
        found = wait_for(lambda: len(server.pids) == 2 and server.pids, 10)
        with httpx.Client(base_url=f"http://{server.address}", timeout=30) as client:
            wait_for(lambda: answers(client) and client.get("/health").status_code == 200, 20)
            assert post(client, "/v1/completions", prompt="Once", max_tokens=1)
        os.kill(found[0], signal.SIGKILL)
        wait_for(lambda: len(server.pids) == 2 and found[0] not in server.pids and found[1] in server.pids, 10)
        with httpx.Client(base_url=f"http://{server.address}", timeout=30) as client:
            assert post(client, "/v1/completions", prompt="Once", max_tokens=1)
            # The dead worker's counts are kept; an answer is counted once it is sent.
            wait_for(lambda: any('endpoint="completions"' in line and line.endswith(" 2.0")
                                 for line in client.get("/metrics").text.splitlines()), 5)
        pids = server.pids
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_beside_a_group(tmp_path):
    """`allspark serve --http`: one command, one key file for both listeners."""
    from allspark_launch.options import GroupOptions
    keys = token_file(tmp_path)
    options = GroupOptions(http="127.0.0.1:0", token_file=keys).http_options("unix:/inner")
    assert options.pool == ["unix:/inner"] and options.pool_token_file == keys == options.token_file
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["--model", str(shipped_model()), "--http", f"127.0.0.1:{port}", "--token-file", keys]
    with background_group(command, timeout=60.0):
        header = {"authorization": f"Bearer {KEYS['generate']}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, headers=header) as client:
            wait_for(lambda: answers(client) and client.get("/health").status_code == 200, 20)
            assert post(client, "/v1/completions", prompt="Once", max_tokens=1)
    assert not answers(httpx.Client(base_url=f"http://127.0.0.1:{port}"))


def test_the_command(http_server, tmp_path):
    """`allspark http` with TLS and keys, as systemd runs it: renewed certificates, a reload, and a stop that lets
    responses end. Impossible configurations are reported at once.
    """
    certificate = make_certificate(tmp_path)
    ready, keys, config = tmp_path / "ready", token_file(tmp_path), tmp_path / "http.json"
    options = {"address": "127.0.0.1:0", "pool": [http_server.group], "workers": 2, "drain_limit": 60}
    config.write_text(json.dumps(options))
    words = [sys.executable, "-m", "allspark_launch", "http", "--config", str(config)]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 78 and "refusing to serve on 127.0.0.1:0" in refused.stderr
    options |= {"token_file": keys, "tls_cert": certificate["cert"], "tls_key": certificate["key"]}
    config.write_text(json.dumps(options))
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(tmp_path / "notify"))
    systemd.settimeout(30)
    process = subprocess.Popen([*words, "--ready-file", str(ready), "--log-format", "json"], stderr=subprocess.PIPE,
                               env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}, text=True)
    try:
        assert systemd.recv(100) == b"READY=1"
        address = json.loads(wait_for(ready.exists, 30) and ready.read_text())["address"]
        trusted = ssl.create_default_context(cafile=certificate["cert"])
        with httpx.Client(base_url=f"https://{address}", verify=trusted, timeout=30,
                          headers={"x-api-key": KEYS["generate"]}) as client:
            wait_for(lambda: answers(client) and client.get("/health").status_code == 200, 30)
            assert post(client, "/v1/completions", prompt="Once", max_tokens=1)
            assert 'http_certificate_expiry_timestamp_seconds' in client.get("/metrics").text
            first = shown_at(address)
            make_certificate(tmp_path, days=9)
            wait_for(lambda: shown_at(address) != first, 10)        # of whichever worker
            with client.stream("POST", "/v1/chat/completions", json={**LONG, "n": 1, "stream": True}) as stream:
                lines = stream.iter_lines()
                assert next(lines)
                before = psutil.Process(process.pid).children()
                config.write_text(json.dumps(options | {"workers": 1}))
                process.send_signal(signal.SIGHUP)
                # The worker with the stream stays until its response has ended.
                wait_for(lambda: len(psutil.Process(process.pid).children()) == 2 and
                         len({*before, *psutil.Process(process.pid).children()}) == 3, 30)
                process.terminate()
                assert systemd.recv(100).startswith(b"RELOADING=1") and systemd.recv(100) == b"READY=1"
                assert systemd.recv(100) == b"STOPPING=1"
                wait_for(lambda: not connects(address), 30)
                assert process.poll() is None and list(lines)[-2:] == ["data: [DONE]", ""]
        log = process.communicate(timeout=20)[1]
        assert process.returncode == 0 and not ready.exists()
        assert all(json.loads(line) for line in log.splitlines())
    finally:
        process.kill()
        process.communicate()
        systemd.close()


def connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def test_an_http_server_survives_what_its_watcher_meets(tmp_path, monkeypatch):
    """A fork that fails, and an error that nobody expected."""
    failures = [BlockingIOError(11, "no process is left"), ValueError("a defect")]

    def start(worker, *_):
        if failures:
            raise failures.pop(0)
        worker.process, (worker.alive, unused) = subprocess.Popen(["sleep", "60"]), os.pipe2(os.O_NONBLOCK)
        worker.heard = time.monotonic()
        os.close(unused)

    monkeypatch.setattr(http_server_module._Worker, "start", start)
    options = HttpOptions(address="127.0.0.1:0", pool=[f"unix:{tmp_path}/none"], insecure=True)
    with http_server_module.http_server(options) as server:
        wait_for(lambda: server.pids, 30)
        assert server.watched and not failures


@pytest.mark.slow
def test_a_stop_is_announced(tmp_path):
    options = HttpOptions(address="127.0.0.1:0", pool=[f"unix:{tmp_path}/none"], insecure=True, drain_delay=5)
    with http_server_module.http_server(options) as server:
        wait_for(lambda: server.serves, 30)
        with httpx.Client(base_url=f"http://{server.address}", timeout=30) as client:
            assert "draining" not in client.get("/health").text
            server.drain()
            wait_for(lambda: "the server is draining" in client.get("/health").text, 5)
        wait_for(lambda: not connects(server.address), 30)


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(http_server_module, "_STUCK_SECONDS", 4.0)
    options = HttpOptions(address="127.0.0.1:0", pool=[f"unix:{tmp_path}/none"], insecure=True)
    with http_server_module.http_server(options) as server:
        wait_for(lambda: server.serves, 30)
        stuck = server.pids[0]
        os.kill(stuck, signal.SIGSTOP)
        wait_for(lambda: stuck not in server.pids and server.serves, 30)
        with httpx.Client(base_url=f"http://{server.address}", timeout=30) as client:
            assert client.get("/health").status_code == 503


@pytest.mark.slow
def test_workers_take_over_a_new_token_of_the_pool(tmp_path):
    token = tmp_path / "token"
    token.write_text("door first\n")
    options = HttpOptions(address="127.0.0.1:0", pool=[f"unix:{tmp_path}/none"], insecure=True,
                          pool_token_file=str(token))
    with http_server_module.http_server(options) as server:
        wait_for(lambda: server.serves, 30)
        first = server.pids
        token.write_text("door first\ngenerate other\n")      # what is shown stays
        time.sleep(0.5)
        assert server.pids == first
        token.write_text("door second\n")
        wait_for(lambda: server.serves and first != server.pids, 30)
        wait_for(lambda: not os.path.exists(f"/proc/{first[0]}"), 30)
