"""A server group's listeners: who may connect, what each role may do, and which paths clients may name."""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path

import grpc
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from allspark_client import AllSparkError, AsModelConfig, AsStatus, ClientEngine, TlsConfig, convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_launch.cli import main
from allspark_launch.pool.pool import Pool
from allspark_launch.pool.units import TEMPLATES
from allspark_server import certificates
from allspark_server.access import Access, ModelRoots, Role, default_address, mode_of, read_tokens
from allspark_server.rpc.client_limits import ClientLimits
from allspark_server.tokenizer.text_size import characters_per_token
from support.certificates import make_certificate
from support.fake_engine import FakeEngine
from support.fake_service import expected, serving, tokens, wait_until
from support.metrics import samples

TOKENS = {"see": Role.READ, "ask": Role.GENERATE, "rule": Role.ADMIN}


@pytest.fixture
def certificate(tmp_path) -> dict[str, str]:
    """A self-signed certificate for localhost, as fields of a TlsConfig."""
    return make_certificate(tmp_path)


# --- which listeners open ---


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("admin rule\n")
    path.chmod(0o600)
    return str(path)


TLS = ["--tls-cert", "c.pem", "--tls-key", "k.pem"]


@pytest.mark.parametrize("words", [
    ["--address", "127.0.0.1:50051"],
    ["--address", "0.0.0.0:50051"],
    ["--address", "[::]:50051"],
    ["--address", "localhost:50051"],
    ["--address", "unix:/tmp/s", "--address", "127.0.0.1:50051"],
    ["--address", "unix:/tmp/s", "--http", "127.0.0.1:8000"],
    ["--address", "0.0.0.0:50051", *TLS],
    ["--address", "0.0.0.0:50051", "--token-file", "TOKENS"],
    ["--address", "127.0.0.1.example.org:50051", "--token-file", "TOKENS"],
])  # fmt: skip
def test_an_open_tcp_listener_is_refused(words, token_file, capsys):
    words = [token_file if word == "TOKENS" else word for word in words]
    assert main(["serve", "--dry-run", *words]) != 0
    error = capsys.readouterr().err
    assert ("refusing to serve on" in error and words[-1] in error) or "example" in error or "0.0.0.0" in error
    for way in ("unix:/path", "--token-file", "--tls-cert", "--tls-ca", "--insecure"):
        assert way in error


@pytest.mark.parametrize("words", [
    ["--address", "unix:/tmp/s"],
    ["--address", "127.0.0.1:50051", "--token-file", "TOKENS"],
    ["--address", "[::1]:50051", "--token-file", "TOKENS"],
    ["--address", "0.0.0.0:50051", "--token-file", "TOKENS", *TLS],
    ["--address", "0.0.0.0:50051", "--tls-ca", "ca.pem", *TLS],
    ["--address", "0.0.0.0:50051", "--insecure"],
])  # fmt: skip
def test_a_guarded_listener_opens(words, token_file, capsys):
    assert main(["serve", "--dry-run", *[token_file if word == "TOKENS" else word for word in words]]) == 0
    assert "allspark_server" in capsys.readouterr().out


def test_the_service_itself_refuses_an_open_listener():
    from allspark_server.rpc.service import Service

    with pytest.raises(ValueError, match="refusing to serve on 127.0.0.1:0: clients need neither"):
        Service(object(), ["127.0.0.1:0"])


def test_default_address(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert default_address(guarded=False) == f"unix:{tmp_path}/allspark.sock"
    assert main(["serve", "--dry-run"]) == 0
    assert f"--address unix:{tmp_path}/allspark.sock" in capsys.readouterr().out
    assert default_address(guarded=True) == "127.0.0.1:50051"
    tmp_path.chmod(0o755)       # not private: others could put a socket of theirs there, or remove ours
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"allspark-{os.getuid()}"
    assert default_address(guarded=False) == f"unix:{own}/allspark.sock"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)
    with pytest.raises(ValueError, match="not a directory that only this user can open"):
        default_address(guarded=False)
    own.rmdir()
    own.symlink_to("/tmp")
    with pytest.raises(ValueError, match="not a directory that only this user can open"):
        default_address(guarded=False)


@pytest.mark.parametrize("options, mode", [({}, 0o600), ({"socket_mode": 0o660}, 0o660)])
def test_mode_of_unix_sockets(tmp_path, options, mode):
    before = os.umask(0)
    try:
        with serving(f"unix:{tmp_path}/s", **options):
            assert stat.S_IMODE(os.lstat(tmp_path / "s").st_mode) == mode
            assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_the_example_pool_is_guarded():
    pytest.importorskip("tomllib") if sys.version_info >= (3, 11) else pytest.importorskip("tomli")
    for member in Pool.from_file(str(TEMPLATES / "pool.toml")).members.values():
        assert member.token_file and member.addresses()


def test_a_pool_with_an_open_listener_is_not_installed(tmp_path, capsys):
    path = tmp_path / "pool.json"
    path.write_text('{"member": [{"name": "a", "address": "0.0.0.0:1"}]}')
    assert main(["pool", "install", "--config", str(path), "--dry-run"]) == 1
    assert "member 'a': refusing to serve on 0.0.0.0:1" in capsys.readouterr().err


# --- tokens ---


@pytest.mark.parametrize("text, message", [
    ("", "holds no token"), (" \n\t\n", "holds no token"), ("# admin x\n", "holds no token"),
    ("admin a\nroot b\n", "line 2 .*does not begin with a role; known: read, generate, door, admin"),
    ("admin a\nb\n", "line 2 .*must be 'ROLE TOKEN'"), ("admin\n", "line 1 .*must be 'ROLE TOKEN'"),
    ("admin a b\n", "line 1 .*must be 'ROLE TOKEN'"),
    ("admin a requests=5\n", "line 1 .*may go on with requests_per_minute=N"),
    ("admin a tokens_per_minute=0\n", "tokens_per_minute in line 1 .*at least 1"),
    ("admin a tokens_per_minute=x\n", "tokens_per_minute in line 1 .*at least 1"),
    ("admin a tokens_per_minute=1 tokens_per_minute=2\n", "line 1 .*may go on"),
    ("admin a models=m\n", "models in line 1 .*role read or generate"),
    ("generate a models=,\n", "models in line 1 .*must name the models"),
    ("generate a models=m models=n\n", "line 1 .*may go on"),
    ("admin a\n\n# more\nread a\n", "line 4 .*an earlier line has"),
    ("admin \u00e4\n", "printable ASCII"),
])  # fmt: skip
def test_token_files_that_make_no_sense(tmp_path, text, message):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_tokens(path)
    assert str(path) in str(caught.value)


def test_token_files(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text("# who may do what\nread see\n\n  generate ask\nadmin rule\n")
    path.chmod(0o640)
    assert read_tokens(path) == TOKENS
    assert "fewer than 16 characters, which can be guessed (line 2, 4, 5)" in caplog.text and len(caplog.records) == 1
    caplog.clear()
    path.write_text(f"generate {'x' * 16}\n")
    assert read_tokens(path) and not caplog.records
    path.write_text("s3cret\n")
    path.chmod(0o644)
    assert read_tokens(path) == {"s3cret": Role.ADMIN}
    assert "can be read by every user" in caplog.text and "s3cret" not in caplog.text


def test_open_files():
    """A process may raise its limit as far as the system allows, and says how far that is."""
    code = ("import resource; from allspark_server.runtime.binding import raise_open_files as raised\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 100))\n"
            "print(raised(80), resource.getrlimit(resource.RLIMIT_NOFILE)[0], raised(500), raised(10))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["80", "80", "100", "10"], done.stderr


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_token_file_does_not_open_the_listener(tmp_path, text):
    """Neither under the supervisor nor without it."""
    path = tmp_path / "tokens"
    path.write_text(text)
    words = ["--address", f"unix:{tmp_path}/s", "--token-file", str(path)]
    for program in (["allspark_launch", "serve", "--ranks", "1"], ["allspark_server"]):
        done = subprocess.run([sys.executable, "-m", *program, *words], capture_output=True, text=True, timeout=30)
        assert done.returncode and "holds no token" in done.stderr


def test_the_client_finds_its_token_in_the_environment(monkeypatch, tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# of the batch jobs\ngenerate ask\n")
    with serving(access=Access(TOKENS)) as (_, address):
        with pytest.raises(AllSparkError, match="ALLSPARK_REQUEST_DENIED: .*a bearer token is needed"):
            ClientEngine(address)
        monkeypatch.setenv("ALLSPARK_TOKEN_FILE", str(path))
        with ClientEngine(address) as client:
            assert client.get_rank_nums() == 1
        with pytest.raises(AllSparkError, match="ALLSPARK_REQUEST_DENIED: .*a wrong bearer token"):
            ClientEngine(address, token="guess")
        path.write_text("")
        with pytest.raises(ValueError, match="holds no token"):
            ClientEngine(address)


def test_tokens_are_read_again(tmp_path, caplog, monkeypatch):
    """Whenever the file changes. An incomplete or wrong file changes nothing, and running requests continue."""
    monkeypatch.setattr("allspark_server.access.TOKEN_LOOK_SECONDS", 0.0)
    path = tmp_path / "tokens"
    path.write_text("generate s3cret-1\n")
    path.chmod(0o600)
    long = {"max_new_tokens": 100, "early_stopping": False}
    with serving(access=Access(token_file=path), core=FakeEngine(0.01)) as (_, address):
        with ClientEngine(address, token="s3cret-1") as client:
            running = client.start_request("m", {"input_ids": [1]}, long)[2]
            running.Get()
            for wrong in ("", "s3cret-1\ns3cret-2\n"):
                path.write_text(wrong)
                assert client.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 1})
            assert "the tokens stay as they were" in caplog.text
            path.write_text("generate s3cret-2\nadmin s3cret-3\n")
            with pytest.raises(AllSparkError, match="REQUEST_DENIED: a request needs the role generate"):
                client.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 1})
            with pytest.raises(AllSparkError, match="a wrong bearer token"):
                client.get_as_engine_stat("m")
            tokens(running)
            assert running.GeneratedLength() == 100
            with ClientEngine(address, token="s3cret-2") as other:
                assert tokens(other.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3})[2]) == expected([1],
                                                                                                                  3)
            path.unlink()
            with ClientEngine(address, token="s3cret-3") as other:
                other.stop_model("m")
    assert "s3cret" not in caplog.text and str(path) not in caplog.text


def test_a_socket_for_a_group(tmp_path):
    group = grp.getgrgid(os.getgid()).gr_name
    with serving(f"unix:{tmp_path}/s", socket_mode=mode_of("", group), socket_group=group):
        found = os.lstat(tmp_path / "s")
        assert stat.S_IMODE(found.st_mode) == 0o660 and found.st_gid == os.getgid()
    with pytest.raises(AllSparkError, match="socket_group 'no-such-group': there is no such group"):
        with serving(f"unix:{tmp_path}/s", socket_group="no-such-group"):
            pass
    assert mode_of("", "") == 0o600 and mode_of("0600", group) == 0o600


# --- roles ---

ADMIN_CALLS = {
    "InstallModel": pb.InstallModelRequest(config=convert.model_config_to_pb(AsModelConfig("new", "/none"))),
    "StartModel": pb.ModelRequest(model="m"), "StopModel": pb.ModelRequest(model="x"),
    "ReleaseModel": pb.ModelRequest(model="x"), "GetPrefixes": pb.PrefixesRequest(),
    "Prefill": pb.PrefillRequest(), "ReadSpans": pb.ReadSpansRequest(model="m"),
    "UnloadModel": pb.ModelRequest(model="x"),
    "GetFileInformation": pb.FileInformationRequest(),
    "GetOpProfiling": pb.ModelRequest(model="m"), "LoadLora": pb.LoraRequest(), "UnloadLora": pb.LoraRequest(),
    "UnloadDeviceMem": pb.ModelRequest(), "LoadDeviceMem": pb.ModelRequest(),
    "ResetPrefixCache": pb.ModelRequest(),
}  # fmt: skip
CALLS_OF_ALL = {"GetServerInfo": pb.ServerInfoRequest(), "GetStat": pb.ModelRequest(model="m"),
                "GetModelInfo": pb.ModelRequest(model="m")}  # fmt: skip


def call(channel, method, data: bytes, token=None, timeout=10.0):
    """Makes a call with one message; returns the first answer's bytes or the status code."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    path = method if method.startswith("/") else f"/allspark.Allspark/{method}"
    try:
        return next(iter(channel.unary_stream(path)(data, metadata=metadata, timeout=timeout)))
    except grpc.RpcError as error:
        return error.code()


def test_what_each_role_may_do():
    refused = grpc.StatusCode.PERMISSION_DENIED
    with serving(access=Access(TOKENS)) as (core, address), grpc.insecure_channel(address) as channel:
        for method, request in {**ADMIN_CALLS, **CALLS_OF_ALL}.items():
            data = request.SerializeToString()
            assert call(channel, method, data) is grpc.StatusCode.UNAUTHENTICATED
            assert call(channel, method, data, "rul") is grpc.StatusCode.UNAUTHENTICATED
            for token in ("see", "ask"):
                assert (call(channel, method, data, token) is refused) == (method in ADMIN_CALLS), (method, token)
            assert call(channel, method, data, "rule") is not refused
        assert {model.name for model in core.list_models()} == {"m", "new"}
        generate = pb.GenerateRequest(model="m", text="hey").SerializeToString()
        assert call(channel, "Generate", generate, "see") is refused
        assert isinstance(call(channel, "Generate", generate, "ask"), bytes)


def test_tokens_for_some_models(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("generate asks-for-other models=other,more\ngenerate asks-for-m models=m\n")
    path.chmod(0o600)
    with serving(access=Access(token_file=path)) as (_, address):
        with ClientEngine(address, token="asks-for-other") as other, ClientEngine(address, token="asks-for-m") as m:
            with pytest.raises(AllSparkError, match="^ALLSPARK_REQUEST_DENIED: this client's token does not allow "
                                                    "model 'm'; allowed: more, other$"):
                other.start_request("m", {"input_ids": [1]})
            with pytest.raises(AllSparkError, match="does not allow model 'other'"):
                m.load_model("other")
            assert tokens(m.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3})[2]) == expected([1], 3)


def test_roles_of_engines():
    with serving(access=Access(TOKENS)) as (_, address):
        with ClientEngine(address, token="see") as reader, ClientEngine(address, token="ask") as asker:
            for client in (reader, asker):
                assert client.get_as_engine_stat("m").total_token == 8192 and client.list_models()
                with pytest.raises(AllSparkError, match="^ALLSPARK_REQUEST_DENIED: StopModel needs the role admin; "
                                                        "this client's is (read|generate)$"):
                    client.stop_model("m")
            with pytest.raises(AllSparkError, match="^ALLSPARK_REQUEST_DENIED: a request needs the role generate or "
                                                    "door or admin; this client's is read$"):
                reader.start_request("m", {"input_ids": [1]})
            _, handle, queue = asker.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3})
            assert tokens(queue) == expected([1], 3)
            asker.release_request("m", handle)


def test_a_certificate_has_a_role_and_unix_sockets_are_the_administrator_s(certificate, tmp_path):
    access = Access(tls=TlsConfig(**certificate), tls_role=Role.GENERATE)
    with serving("localhost:0", access=access) as (_, address):
        with ClientEngine(address, tls=TlsConfig(**certificate)) as client:
            assert client.get_rank_nums() == 1
            with pytest.raises(AllSparkError, match="needs the role admin"):
                client.stop_model("m")
    with serving(f"unix:{tmp_path}/s", access=access) as (_, address), ClientEngine(address) as client:
        client.stop_model("m")
    with serving(f"unix:{tmp_path}/s", access=Access(TOKENS)) as (_, address):
        with pytest.raises(AllSparkError, match="token is needed"):    # where there are tokens, everyone needs one
            ClientEngine(address)


@pytest.mark.parametrize("client_ca", [False, True])
def test_a_renewed_certificate_is_used_without_a_restart(certificate, tmp_path, monkeypatch, caplog, client_ca):
    """A connection keeps the one that it began with. What does not fit together changes nothing."""
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.0)
    tls = TlsConfig(**certificate) if client_ca else TlsConfig(cert=certificate["cert"], key=certificate["key"])
    access = Access(tls=tls, insecure=not client_ca)
    with serving("localhost:0", access=access) as (_, address):
        with ClientEngine(address, tls=TlsConfig(**certificate)) as before:
            first = Path(certificate["cert"]).read_bytes()
            assert shown(address, certificate, first) == first
            Path(certificate["key"]).write_text("half a renewal")
            assert shown(address, certificate, first) == first and "the certificate stays as it was" in caplog.text
            make_certificate(tmp_path, days=9)
            second = Path(certificate["cert"]).read_bytes()
            assert shown(address, certificate, second) == second != first
            assert before.get_rank_nums() == 1
            with ClientEngine(address, tls=TlsConfig(**certificate)) as after:
                text = after._pool.call("GetMetrics", pb.MetricsRequest(), pb.Metrics).text
        left = samples(text)[("allspark_certificate_expiry_timestamp_seconds",)] - time.time()
        assert 8.9 < left / 86400 < 9.1


def shown(address: str, certificate: dict[str, str], trusted: bytes) -> bytes:
    """The certificate that a listener shows to a new client, which has one, too, if it still fits its key."""
    context = ssl.create_default_context(cadata=trusted.decode())
    with contextlib.suppress(ssl.SSLError):
        context.load_cert_chain(certificate["cert"], certificate["key"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as one:
        return ssl.DER_cert_to_PEM_cert(one.getpeercert(True)).encode()


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def test_what_needs_no_token():
    with serving(access=Access(TOKENS)) as (_, address), grpc.insecure_channel(address) as channel:
        assert isinstance(call(channel, "/grpc.health.v1.Health/Check", b""), bytes)
        assert isinstance(call(channel, "/grpc.health.v1.Health/Watch", b""), bytes)
        assert call(channel, "/grpc.health.v1.Health/List", b"") is grpc.StatusCode.UNIMPLEMENTED  # it names models
        assert call(channel, REFLECTION, b"\x3a\x00") is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(call(channel, REFLECTION, b"\x3a\x00", "see"), bytes)


# --- messages ---


@pytest.fixture
def served():
    with serving() as (core, address), grpc.insecure_channel(address) as channel:
        yield core, channel


def test_invalid_messages_are_reported(served, caplog):
    """With the right code, and with one line in the log however many there are."""
    _, channel = served
    hostile = b"\xff" * 10
    methods = [*ADMIN_CALLS, *CALLS_OF_ALL, "Generate", "Session", "/grpc.health.v1.Health/Check",
               "/grpc.health.v1.Health/Watch", REFLECTION]
    for method in methods:
        assert call(channel, method, hostile) is grpc.StatusCode.INVALID_ARGUMENT, method
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be decoded" in caplog.text and "Traceback" not in caplog.text
    for method in ("GetServerInfo", "Session"):
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(channel.stream_stream(f"/allspark.Allspark/{method}")(iter([]), timeout=10)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_bad_message_ends_its_stream_alone(served, size):
    core, channel = served
    hello = pb.SessionRequest(hello=convert.hello("test")).SerializeToString()
    start = pb.SessionRequest(start=pb.StartRequest(id=1, request=pb.GenerateRequest(model="m", text="x")))
    session = channel.stream_stream("/allspark.Allspark/Session")
    with pytest.raises(grpc.RpcError) as caught:
        list(session(iter([hello, start.SerializeToString(), b"\xff" * size]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a SessionRequest message" in caught.value.details()
    wait_until(lambda: not core.live, 2)
    assert isinstance(call(channel, "GetServerInfo", b""), bytes)


def test_a_refused_call_is_not_parsed():
    with serving(access=Access(TOKENS)) as (_, address), grpc.insecure_channel(address) as channel:
        assert call(channel, "InstallModel", b"\xff" * 10) is grpc.StatusCode.UNAUTHENTICATED
        assert call(channel, "InstallModel", b"\xff" * 10, "ask") is grpc.StatusCode.PERMISSION_DENIED
        assert call(channel, "Generate", b"\xff" * (12 << 20)) is grpc.StatusCode.UNAUTHENTICATED


def test_messages_are_limited():
    with serving(max_message=1 << 20) as (_, address):
        with grpc.insecure_channel(address) as channel:
            assert call(channel, "GetStat", bytes(2 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        with ClientEngine(address) as client:
            _, _, queue = client.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 200})
            for inputs in ({"text": "x" * (1 << 20)}, {"input_ids": [999] * 600_000}):
                match = r"a message of 1\d{6} bytes, .* takes at most 1048576"
                with pytest.raises(AllSparkError, match=match) as caught:
                    client.start_request("m", inputs)
                assert caught.value.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
            assert tokens(queue) == expected([1], 200)      # the stream of the others goes on


def test_long_texts_hold_up_nobody(served, monkeypatch):
    """They delay neither requests of others, nor statistics, nor the cleanup after a client."""
    core, channel = served
    gate, submit = threading.Event(), core.submit

    def slow(spec, sink):
        if spec.text is not None:
            gate.wait(20)
        return submit(spec, sink)

    monkeypatch.setattr(core, "submit", slow)
    text = pb.GenerateRequest(model="m", text="x" * 100_000).SerializeToString()
    live = [channel.unary_stream("/allspark.Allspark/Generate")(text) for _ in range(8)]
    try:
        time.sleep(0.3)
        begin = time.monotonic()
        assert isinstance(call(channel, "GetStat", pb.ModelRequest(model="m").SerializeToString(), timeout=5), bytes)
        ids = pb.GenerateRequest(model="m", input_ids=pb.TokenIds(ids=[1]), config=pb.GenerateConfig(max_new_tokens=9))
        asked = channel.unary_stream("/allspark.Allspark/Generate")(ids.SerializeToString(), timeout=5)
        assert list(asked)
        wait_until(lambda: not core.handles, 5)     # its request is freed
        assert time.monotonic() - begin < 5
    finally:
        gate.set()
        for one in live:
            one.cancel()


# --- health ---


def test_health_tells_what_does_not_serve(served):
    from grpc_health.v1 import health_pb2

    core, channel = served

    def health(service):
        data = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        answer = call(channel, "/grpc.health.v1.Health/Check", data)
        return health_pb2.HealthCheckResponse.FromString(answer).status if isinstance(answer, bytes) else answer

    status = health_pb2.HealthCheckResponse
    assert health("") == health("allspark.Allspark") == health("allspark.Model/m") == status.SERVING
    assert health("allspark.Model/x") is grpc.StatusCode.NOT_FOUND
    core.unrestored["y"] = "it could not be restored"
    wait_until(lambda: health("") == health("allspark.Allspark") == status.NOT_SERVING, 5)
    assert health("allspark.Model/m") == status.SERVING
    core.unrestored.clear()
    wait_until(lambda: health("") == status.SERVING, 5)
    core.stop_model("m")
    wait_until(lambda: health("allspark.Model/m") == status.NOT_SERVING, 5)
    assert health("") == status.SERVING
    core.serve("n")
    core.release_model("m")
    wait_until(lambda: health("allspark.Model/m") == status.SERVICE_UNKNOWN, 5)
    assert health("allspark.Model/n") == status.SERVING


# --- paths ---


@pytest.fixture
def tree(tmp_path):
    """root/good, a checkpoint; root/bad, one with a file from outside; outside/secret; and links between them."""
    good, bad, outside = tmp_path / "root/good", tmp_path / "root/bad", tmp_path / "outside"
    for folder in (good, bad, outside, tmp_path / "root/blobs"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (outside / "secret").write_text("s")
    (tmp_path / "root/blobs/1").write_text("weights")
    (good / "model.safetensors").symlink_to("../blobs/1")       # as the Hub's cache does
    (bad / "tokenizer.json").symlink_to(outside / "secret")
    (tmp_path / "root/way").symlink_to(outside)
    for name in ("root/c1/additional_chat_templates", "root/c2/x.tokenizer"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(outside)
    (tmp_path / "in").symlink_to(good)
    (tmp_path / "root2").mkdir()
    return tmp_path


def test_what_may_be_opened(tree):
    roots = ModelRoots([tree / "root"])
    for path in ("root/good", "root/../root/good", "in", "root", "root/none", "root/good/config.json"):
        roots.check("model_path", str(tree / path))
    refused = ("root/bad", "root/bad/x.asgraph", "root/c1", "root/c2/x.asgraph", "root/way", "root/way/secret",
               "root/../outside", "outside", "root2")
    for path in (*(str(tree / path) for path in refused), "/dev/zero", "/", ".", ""):
        with pytest.raises(AllSparkError, match="^ALLSPARK_REQUEST_DENIED: model_path=.*--model-root DIR") as caught:
            roots.check("model_path", path)
        assert "secret'" not in str(caught.value) or path.endswith("secret")
    with pytest.raises(AllSparkError, match="weights_path="):
        roots.check_model(AsModelConfig("m", str(tree / "root/good"), weights_path=str(tree / "outside/secret")))
    with pytest.raises(AllSparkError, match="draft_model="):
        roots.check_model(AsModelConfig("m", str(tree / "root/good"), draft_model=str(tree / "outside")))
    ModelRoots(["/"]).check("model_path", str(tree / "root/bad"))
    with pytest.raises(ValueError, match="--model-root /nowhere: there is no such directory"):
        ModelRoots(["/nowhere"])


def test_without_roots_only_the_operator_s_models_may_be_opened(tree):
    roots = ModelRoots([], [AsModelConfig("m", str(tree / "root/bad")), AsModelConfig("a", str(tree / "x.asgraph"))])
    roots.check("model_path", str(tree / "root/bad"))       # as it is: it is theirs
    roots.check("as_param_path", str(tree / "x.asparam"))
    for path in ("root/good", "root/bad/config.json", "y.asgraph"):
        with pytest.raises(AllSparkError, match="is outside of the directories that clients"):
            roots.check("model_path", str(tree / path))


def test_paths_of_clients_are_checked(tree):
    with serving(roots=ModelRoots([tree / "root"])) as (core, address), ClientEngine(address) as client:
        client.install_model(AsModelConfig("good", str(tree / "root/good")))
        for path in (tree / "root/bad", tree / "outside", "/dev/zero"):
            with pytest.raises(AllSparkError, match="ALLSPARK_REQUEST_DENIED: model_path="):
                client.install_model(AsModelConfig("x", str(path)))
        assert client.get_file_information(tree / "root/a", tree / "root/b").create_version_graph
        with pytest.raises(AllSparkError, match="as_graph_path='/dev/zero'"):
            client.get_file_information("/dev/zero", tree / "root/b")
        with pytest.raises(AllSparkError, match="as_param_path='/dev/zero'"):
            client.get_file_information(tree / "root/a", "/dev/zero")
        assert {model.name for model in core.list_models()} == {"m", "good"}


def test_answers_name_no_path_that_the_client_has_not_named(tree, monkeypatch):
    """Neither the places of models, nor the object of an unexpected system error."""
    with serving(roots=ModelRoots([tree / "root"])) as (core, address), ClientEngine(address) as client:
        with pytest.raises(AllSparkError) as caught:
            client.install_model(AsModelConfig("x", "/dev/zero"))
        assert str(tree) not in str(caught.value)
        core._models["m"].info.tokenizer_dir = str(tree)
        assert client.get_model_info("m").tokenizer_dir is None

        def fails(name: str) -> None:
            raise PermissionError(13, "Permission denied", str(tree / "secret"))

        monkeypatch.setattr(core, "stop_model", fails)
        with pytest.raises(AllSparkError, match="PermissionError: Permission denied$"):
            client.stop_model("m")


# --- limits of clients ---


def test_limits_of_tenants_and_of_the_server(tmp_path):
    limits = ClientLimits(total=3, of_tenant=2)
    many = {"max_new_tokens": 10000, "early_stopping": False}
    with serving(access=Access({"one": Role.GENERATE, "two": Role.GENERATE}), limits=limits,
                 core=FakeEngine(0.01)) as (_, address):
        with ClientEngine(address, token="one") as first, ClientEngine(address, token="two") as second:
            handles = [first.start_request("m", {"input_ids": [1]}, many)[1] for _ in range(2)]
            with pytest.raises(AllSparkError, match="EXCEED_LIMIT_ERROR: this client has 2 requests") as caught:
                first.start_request("m", {"input_ids": [1]}, many)
            assert caught.value.retryable
            other = second.start_request("m", {"input_ids": [1]}, many)[1]
            with pytest.raises(AllSparkError, match="EXCEED_LIMIT_ERROR: the server has 3 requests"):
                second.start_request("m", {"input_ids": [1]}, many)
            second.release_request("m", other)
            with pytest.raises(ValueError):     # refused for another reason: its place is free again
                second.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3, "stop_words_ids": [[10 ** 6]]})
            first.release_request("m", handles[0])
            assert tokens(first.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 3})[2]) == expected([1], 3)
        wait_until(lambda: not limits._taken, 5)    # also of those whose client has left


# --- texts too long to be tokenized ---


def test_nfc_makes_one_of_four_characters_at_most():
    from allspark_server.tokenizer import text_size

    every = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    assert max(len(unicodedata.normalize("NFD", c)) for c in every) <= text_size._COMPOSED


def byte_level(**changes) -> tokenizers.Tokenizer:
    vocabulary = {c: i for i, c in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "sevenxx"])}
    made = tokenizers.Tokenizer(changes.pop("model", models.BPE(vocabulary, [])))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.add_special_tokens(changes.pop("added", []))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def byte_fallback(bytes_known=256):
    vocabulary = {c: i for i, c in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(bytes_known)), "sevenxx"])}
    return models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)


SPLIT = tokenizers.Regex(r"\\s+")


@pytest.mark.parametrize("changes, bound", [
    ({}, 7), ({"normalizer": normalizers.NFC()}, 28), ({"normalizer": normalizers.Strip()}, None),
    ({"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])}, None),
    ({"normalizer": normalizers.Replace("  ", "")}, None), ({"normalizer": normalizers.Replace(" ", "_")}, 7),
    ({"pre_tokenizer": pre_tokenizers.Sequence([
        pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel()])}, 7),
    ({"pre_tokenizer": pre_tokenizers.Sequence([
        pre_tokenizers.Split(SPLIT, "removed"), pre_tokenizers.ByteLevel()])}, None),
    ({"pre_tokenizer": pre_tokenizers.Whitespace()}, None), ({"pre_tokenizer": None}, None),
    ({"added": [tokenizers.AddedToken("<|longer|>")]}, 10),
    ({"added": [tokenizers.AddedToken("x", rstrip=True)]}, None),
    ({"model": models.WordPiece({"x": 0}, unk_token="x")}, None),
    ({"model": byte_fallback(), "pre_tokenizer": pre_tokenizers.Metaspace()}, 7),
    ({"model": byte_fallback(255), "pre_tokenizer": None}, None),
])  # fmt: skip
def test_characters_per_token(changes, bound):
    assert characters_per_token(byte_level(**changes)) == bound


def test_logs_of_refusals_are_few(caplog):
    caplog.set_level(logging.INFO)
    with serving(access=Access(TOKENS)) as (_, address), grpc.insecure_channel(address) as channel:
        for _ in range(20):
            call(channel, "GetServerInfo", b"", "guess")
    assert len([r for r in caplog.records if "no valid token" in r.getMessage()]) == 1 and "guess" not in caplog.text
