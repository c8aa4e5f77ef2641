"""Rolling a changed configuration out: errors and kills half-way, lost and busy members, and what is drained after."""
from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

import grpc
import pytest

from allspark_client import ClientEngine
from allspark_launch.cli import main
from allspark_launch.pool import install, layout, rolling, units
from allspark_launch.pool.members import Member, Target
from allspark_server.rpc import health
from support.fake_service import expected, tokens, wait_until
from support.pool_commands import words, write

PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rolling, "_LOOK_SECONDS", 0.01)


def unit(member: str) -> str:
    return units.unit_name("default", member)


def socket_of(member: str) -> str:
    return units.socket_address("default", member)


def log_levels(systemd) -> dict[str, str]:
    """What the running members say of one option."""
    return {name.split("@")[1].split(".")[0]: systemd.report(name)["options"].get("log_format", "text")
            for name in sorted(systemd.running)}


class Load:
    """Clients that send requests to members without a pause. `wrong`: what went wrong with one."""

    def __init__(self, members: str, count: int = 2):
        self._end, self.finished, self.wrong = threading.Event(), 0, []
        self._addresses = [socket_of(member) for member in members]
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        try:
            with ClientEngine(self._addresses, reconnect_timeout=30) as client:
                while not self._end.is_set():
                    got = tokens(client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 20})[2])
                    if got != expected(PROMPT, 20):
                        self.wrong.append(got)
                    self.finished += 1
        except Exception as error:
            self.wrong.append(error)


def test_a_roll_that_failed_is_completed_by_the_next(tmp_path, systemd, capsys):
    write(tmp_path, [{"name": name} for name in "abc"])
    assert main(words(tmp_path, "apply")) == 0
    write(tmp_path, [{"name": name, "log_format": "json"} for name in "abc"])
    systemd.broken = {"b"}
    assert main(words(tmp_path, "apply")) == 1
    error = capsys.readouterr().err
    assert "it is broken" in error and "not restarted: c" in error
    assert log_levels(systemd) == {"a": "json", "c": "text"}
    assert main(words(tmp_path, "apply")) == 1
    assert log_levels(systemd) == {"a": "json", "c": "text"}, "no other member is taken down while one is"
    systemd.broken = set()
    systemd.calls.clear()
    assert main(words(tmp_path, "apply")) == 0
    assert log_levels(systemd) == {"a": "json", "b": "json", "c": "json"}
    assert "reset-failed allspark-default@b.service" in systemd.calls
    capsys.readouterr()
    assert main(words(tmp_path, "apply")) == 0
    assert "a: unchanged\nb: unchanged\nc: unchanged" in capsys.readouterr().out


def test_members_that_do_not_start_are_named_at_the_installation(tmp_path, systemd, capsys):
    """A target starts although what it wants fails."""
    write(tmp_path, [{"name": name} for name in "ab"])
    systemd.broken = {"b"}
    assert main(words(tmp_path, "install", "--now")) == 1
    assert "members b have not started: see journalctl -u allspark-default@b" in capsys.readouterr().err


def test_a_changed_unit_or_environment_restarts_and_a_changed_limit_does_not(tmp_path, systemd, capsys):
    write(tmp_path, [{"name": "a"}, {"name": "b", "environment": {"A": "1"}}])
    assert main(words(tmp_path, "apply")) == 0
    environment = tmp_path / "c/default/b.env"
    assert environment.stat().st_mode & 0o777 == 0o600 and 'A="1"\n' in environment.read_text()
    write(tmp_path, [{"name": "a"}, {"name": "b", "environment": {"A": 'x "$\\'}, "drain_limit": 70}])
    systemd.calls.clear()
    assert main(words(tmp_path, "apply")) == 0
    assert [call for call in systemd.calls if call.split()[0] in ("restart", "reload", "start")] == [
        "restart allspark-default@b.service"]
    assert 'A="x \\"\\$\\\\"\n' in environment.read_text()
    write(tmp_path, [{"name": "a"}, {"name": "b", "environment": {"A": 'x "$\\'}, "drain_limit": 80}])
    systemd.calls.clear()
    assert main(words(tmp_path, "apply")) == 0      # also of TimeoutStopSec in the unit
    assert [call for call in systemd.calls if call.split()[0] in ("restart", "reload", "start")] == [
        "reload allspark-default@b.service"]


class Killed(BaseException):
    """Stands for the end of the process: from then on it has no effect any more."""


@contextlib.contextmanager
def killed_at(number: int, monkeypatch):
    """A context in which everything that a command does outside of its memory counts as a step, and the process is
    killed before step `number`. Yields the list of steps.
    """
    steps: list[str] = []

    def step(action, name):
        def counted(*arguments, **keywords):
            steps.append(name)
            if len(steps) > number:
                raise Killed
            return action(*arguments, **keywords)
        return counted

    with monkeypatch.context() as patch:
        patch.setattr(units.subprocess, "run", step(units.subprocess.run, "systemctl"))
        patch.setattr(Member, "_call", step(Member._call, "call"))
        patch.setattr(Path, "unlink", step(Path.unlink, "unlink"))
        for module in (install, layout):
            patch.setattr(module, "write_whole", step(module.write_whole, "write"))
        with contextlib.suppress(Killed):
            yield steps


def survives_kills(tmp_path, systemd, monkeypatch, numbers) -> int:
    """Kills apply before each of these steps and completes it by another apply, under load. Returns the number of
    steps of a whole one.
    """
    before = [{"name": "a"}, {"name": "b", "log_level": "error"}, {"name": "gone"}]
    after = [{"name": "a", "log_format": "json"}, {"name": "b", "log_level": "debug"}, {"name": "new"}]
    whole = 0
    for number in numbers:
        write(tmp_path, before)
        assert main(words(tmp_path, "apply")) == 0
        write(tmp_path, after)
        with Load("ab") as load:
            with killed_at(number, monkeypatch) as steps:
                assert main(words(tmp_path, "apply")) == 0
                whole = len(steps)
            assert main(words(tmp_path, "apply")) == 0, number
            assert log_levels(systemd) == {"a": "json", "b": "text", "new": "text"}, number
            assert systemd.report(unit("b"))["options"]["log_level"] == "debug"
            for member in ("a", "b", "new"):
                with Member(Target(member, socket_of(member))) as one:
                    assert not one.info().draining, (number, member)
            finished = load.finished
            wait_until(lambda before=finished, load=load: load.finished > before or load.wrong, 20)
        assert not load.wrong and not systemd.cut, (number, load.wrong, systemd.cut)
        installed = {path.name for path in (tmp_path / "c/default").iterdir()}
        assert installed == {f"{m}.{kind}" for m in ("a", "b", "new") for kind in ("json", "env")}, number
    return whole


def test_a_killed_apply_is_completed_by_the_next(tmp_path, systemd, monkeypatch):
    """At two steps; the next test kills it at all of them."""
    survives_kills(tmp_path, systemd, monkeypatch, [9, 20])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_apply_survives_a_kill_at_each_step(tmp_path, systemd, monkeypatch):
    whole = survives_kills(tmp_path, systemd, monkeypatch, [1000])
    survives_kills(tmp_path, systemd, monkeypatch, range(whole + 8))


def test_the_drain_of_a_killed_command_lapses(tmp_path, systemd, monkeypatch):
    monkeypatch.setattr(health, "_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(rolling, "LEASE_SECONDS", 0.3)
    write(tmp_path, [{"name": "a"}])
    assert main(words(tmp_path, "apply")) == 0
    with Member(Target("a", socket_of("a"))) as member:
        member.drain(lease=1.0)
        assert member.info().draining
        wait_until(lambda: not member.serves(), 3)      # what load balancers ask
        wait_until(member.serves, 3)
        assert not member.info().draining
        member.drain()          # an operator's
        member.drain(lease=0.1)
        time.sleep(0.3)
        assert member.info().draining, "a lease does not shorten another drain"


def test_requests_that_do_not_end_stop_the_roll(tmp_path, systemd, capsys):
    systemd.interval = 0.01
    write(tmp_path, [{"name": "a"}, {"name": "b"}])
    assert main(words(tmp_path, "apply")) == 0
    with ClientEngine(socket_of("a")) as client:
        _, _, queue = client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 60})
        first = len(queue.Get().ids_from_generate)
        assert main([*words(tmp_path, "restart")[:4], *words(tmp_path, "restart")[6:], "--config-dir",
                     str(tmp_path / "c"), "--rolling", "--limit", "0.2"]) == 1
        assert "member 'a' still has 1 requests after 0.2 s, and takes new ones again" in capsys.readouterr().err
        assert not any(call.startswith("restart") for call in systemd.calls)
        assert len(tokens(client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 3})[2])) == 3
        assert first + len(tokens(queue)) == 60


def test_what_an_operator_drained_stays_so_after_an_interrupted_roll(tmp_path, systemd, monkeypatch):
    write(tmp_path, [{"name": "a"}])
    assert main(words(tmp_path, "apply")) == 0
    restart = ["pool", "restart", "--rolling", "--config", str(tmp_path / "pool.json"), "--config-dir",
               str(tmp_path / "c")]
    for drained in (False, True):
        with Member(Target("a", socket_of("a"))) as member:
            if drained:
                member.drain()
            with monkeypatch.context() as patch:
                patch.setattr(rolling, "systemctl", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
                assert main(restart) == 130
            assert member.info().draining is drained


def test_a_refused_call_is_not_a_member_that_is_down(tmp_path, systemd, monkeypatch, capsys):
    """Its token has changed, say: it has requests, so it is not restarted."""
    write(tmp_path, [{"name": "a"}])
    assert main(words(tmp_path, "apply")) == 0

    class Refused(grpc.RpcError):
        code = staticmethod(lambda: grpc.StatusCode.UNAUTHENTICATED)
        details = staticmethod(lambda: "the token is not known")

    def refuse(*_):
        raise Refused

    monkeypatch.setattr(Member, "_call", refuse)
    write(tmp_path, [{"name": "a", "log_format": "json"}])
    assert main(words(tmp_path, "apply")) == 1
    assert "UNAUTHENTICATED: the token is not known" in capsys.readouterr().err
    assert not any(call.startswith("restart") for call in systemd.calls)


def test_a_member_that_is_lost_while_it_drains_is_waited_for(tmp_path, systemd, capsys):
    """Its unit is active: its supervisor starts the group again, and its requests continue there."""
    write(tmp_path, [{"name": "a"}])
    assert main(words(tmp_path, "apply")) == 0
    systemd.interval = 0.01
    _, service = systemd.running[unit("a")]
    with ClientEngine(socket_of("a"), reconnect_timeout=30) as client:
        _, _, queue = client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 60})
        first = len(queue.Get().ids_from_generate)
        found = []
        roll = threading.Thread(target=lambda: found.append(main(
            ["pool", "restart", "--rolling", "--config", str(tmp_path / "pool.json"), "--config-dir",
             str(tmp_path / "c")])))
        roll.start()
        wait_until(lambda: service.draining, 10)
        systemd.lose(unit("a"))
        time.sleep(0.3)
        assert roll.is_alive()
        assert not any(call.startswith("restart") for call in systemd.calls)
        systemd.recover(unit("a"))
        assert first + len(tokens(queue)) == 60
        roll.join(30)
    assert found == [0] and not systemd.cut
    assert "restart allspark-default@a.service" in systemd.calls


def test_two_commands_do_not_change_a_pool_at_once(tmp_path, systemd, monkeypatch, capsys):
    write(tmp_path, [{"name": "a"}])
    codes = []

    def meanwhile(*_, **__):
        codes.append(main(words(tmp_path, "apply")))

    with monkeypatch.context() as patch:
        patch.setattr(install, "wait_until_healthy", meanwhile)
        assert main(words(tmp_path, "apply")) == 0
    assert codes == [1] and "another allspark pool command changes the pools" in capsys.readouterr().err


def test_a_user_who_is_missing_is_named_before_anything_is_written(tmp_path, systemd, capsys):
    (tmp_path / "pool.json").write_text(json.dumps({"member": [{"name": "a"}], "user": "nobody-of-this-name"}))
    assert main(words(tmp_path, "apply")) == 1
    assert "there is no user 'nobody-of-this-name'" in capsys.readouterr().err and not systemd.calls
    assert not (tmp_path / "c").exists()
