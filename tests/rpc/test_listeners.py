"""Which listeners a server group opens, where, and for whom."""

from __future__ import annotations

import grp
import os
import stat
import sys

import pytest

from allspark_client import AllSparkError
from allspark_launch.cli import main
from allspark_launch.pool.pool import Pool
from allspark_launch.pool.units import TEMPLATES
from allspark_server.access import default_address, mode_of
from support.fake_service import serving


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


def test_a_socket_for_a_group(tmp_path):
    group = grp.getgrgid(os.getgid()).gr_name
    with serving(f"unix:{tmp_path}/s", socket_mode=mode_of("", group), socket_group=group):
        found = os.lstat(tmp_path / "s")
        assert stat.S_IMODE(found.st_mode) == 0o660 and found.st_gid == os.getgid()
    with pytest.raises(AllSparkError, match="socket_group 'no-such-group': there is no such group"):
        with serving(f"unix:{tmp_path}/s", socket_group="no-such-group"):
            pass
    assert mode_of("", "") == 0o600 and mode_of("0600", group) == 0o600
