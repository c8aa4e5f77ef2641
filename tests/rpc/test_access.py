"""Who may connect to a server group, and what each role may do: tokens, certificates, roles."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from allspark_client import AllSparkError, ClientEngine, TlsConfig
from allspark_client._proto import allspark_pb2 as pb
from allspark_server import certificates
from allspark_server.access import Access, Role, read_tokens
from support.calls import ADMIN_CALLS, CALLS_OF_ALL, REFLECTION, TOKENS, call
from support.certificates import make_certificate
from support.fake_engine import FakeEngine
from support.fake_service import expected, serving, tokens
from support.metrics import samples


@pytest.fixture
def certificate(tmp_path) -> dict[str, str]:
    """A self-signed certificate for localhost, as fields of a TlsConfig."""
    return make_certificate(tmp_path)


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


# --- roles ---

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


def test_what_needs_no_token():
    with serving(access=Access(TOKENS)) as (_, address), grpc.insecure_channel(address) as channel:
        assert isinstance(call(channel, "/grpc.health.v1.Health/Check", b""), bytes)
        assert isinstance(call(channel, "/grpc.health.v1.Health/Watch", b""), bytes)
        assert call(channel, "/grpc.health.v1.Health/List", b"") is grpc.StatusCode.UNIMPLEMENTED  # it names models
        assert call(channel, REFLECTION, b"\x3a\x00") is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(call(channel, REFLECTION, b"\x3a\x00", "see"), bytes)


def test_logs_of_refusals_are_few(caplog):
    caplog.set_level(logging.INFO)
    with serving(access=Access(TOKENS)) as (_, address), grpc.insecure_channel(address) as channel:
        for _ in range(20):
            call(channel, "GetServerInfo", b"", "guess")
    assert len([r for r in caplog.records if "no valid token" in r.getMessage()]) == 1 and "guess" not in caplog.text
