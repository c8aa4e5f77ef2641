"""A pool's file, its systemd units, and the commands that manage it, with a fake systemctl that records its calls."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from allspark_launch.cli import EXIT_CONFIG, main
from allspark_launch.group import notify
from allspark_launch.group.http_server import HttpOptions
from allspark_launch.group.notify import Notifier
from allspark_launch.machine.topology import read_topology
from allspark_launch.options import UNIT_KEY, GroupOptions
from allspark_launch.pool import units
from allspark_launch.pool.pool import Pool
from allspark_launch.pool.units import TEMPLATES, unit_files
from support.machines import machine
from support.pool_commands import toml, words, write

# --- the file ---


def test_the_example(tmp_path, capsys):
    toml()
    example = TEMPLATES / "pool.toml"
    arguments = ["pool", "install", "--config", str(example), "--unit-dir", str(tmp_path / "u"),
                 "--config-dir", str(tmp_path / "c")]
    assert main(arguments) == 0
    assert "systemctl" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "u").iterdir()} == {"allspark-default@.service", "allspark-default.target"}
    for path in (tmp_path / "u").iterdir():
        assert not re.search(r"\{\w+\}", path.read_text())
    unit = (tmp_path / "u/allspark-default@.service").read_text()
    assert f"serve --config {tmp_path}/c/default/%i.json --state-file /var/lib/allspark/default/%i.json" in unit
    member = json.loads((tmp_path / "c/default/b.json").read_text())
    assert member["numa_nodes"] == [2, 3]
    assert main(["serve", "--config", str(tmp_path / "c/default/a.json"), "--numa-nodes", "0", "--dry-run"]) == 0


@pytest.mark.parametrize("pool,message", [
    ({"user": "nobody\nExecStartPre=/bin/evil"}, r"user 'nobody\\nExecStartPre=/bin/evil' must be of letters"),
    ({"name": "a\nb"}, r"name 'a\\nb' must be of letters"),
    ({"user": 5}, "user 5 must be of letters"),
    ({"usr": "x"}, "unknown key 'usr'; known: name, user, layout, .*, member"),
    ({"defaults": {"rank": 2}}, "defaults: unknown key 'rank'"),
    ({"member": {"a": 1}}, "member is {'a': 1}; it must be a list of tables"),
    ({"member": [{"name": "a\n", "address": "x:1"}]}, r"member name 'a\\n' must be unique, of letters"),
    ({"member": [{"address": ["x:1", 2]}]}, r"member '0': address is \['x:1', 2\]; it must be of type list\[str\]"),
    ({"member": [{"address": "x:1\ny"}]}, r"address is \['x:1\\ny'\]"),
    ({"member": [{"address": "x:1", "ranks": "2"}]}, "ranks is '2'; it must be of type int"),
    ({"member": [{"address": "x:1", "ranks": True}]}, "ranks is True; it must be of type int"),
    ({"member": [{"drain_limit": -1}]}, "drain_limit is -1; it must be a number of seconds, at least 0, or inf"),
    ({"member": [{"drain_limit": "1"}]}, "drain_limit is '1'; it must be of type float"),
    ({"member": [{"address": "x:1", "numa_nodes": ["0"]}]}, r"numa_nodes is \['0'\]; it must be of type list\[int\]"),
    ({"member": [{"address": "x:1", "models": [3]}]}, r"models is \[3\]; it must be of type list\[dict \| str\]"),
    ({"member": [{"address": "x:1", "models": [{"model_name": "m", "model_path": "/m", "engine_max_batch": "many"}]}]},
     "member '0': models: .*engine_max_batch"),
    ({"member": [{"name": "a", "address": "unix:/x"}, {"name": "b", "address": "unix:/x"}]}, "have address unix:/x"),
    ({"member": [{"address": "0.0.0.0:1"}]}, "member '0': refusing to serve on 0.0.0.0:1"),
    ({"member": []}, r"has no \[\[member\]\]"),
    ({"collector": "collector:4318"}, "collector is 'collector:4318'; it must be a URL such as http"),
    ({"defaults": {"environment": "A=1"}}, "defaults: environment is 'A=1'; it must be a table of text"),
    ({"member": [{"environment": {"A B": "1"}}]}, "member '0': environment: 'A B' is not the name of a variable"),
    ({"member": [{"environment": {"A": 1}}]}, "member '0': environment: A is 1; it must be text of one line"),
    ({"member": [{"environment": {"A": "1\nUser=root"}}]}, r"A is '1\\nUser=root'; it must be text of one line"),
])  # fmt: skip
def test_a_pool_file_with_something_wrong_writes_no_unit(tmp_path, capsys, pool, message):
    write(tmp_path, [{"address": "unix:/x"}], **pool)
    assert main(words(tmp_path, "install")) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and str(tmp_path / "pool.json") in error
    assert not (tmp_path / "u").exists() and not (tmp_path / "c").exists()


POOL = """# a pool
name = "x"

[defaults]
log_level = "debug"

[[member]]
name = "a"

[[member]]
name = "b"      # a second one
models = [
    "/a",
    "/b",
]
"""


@pytest.mark.parametrize("old, new, message", [
    ('name = "x"', 'nam = "x"', "line 2: unknown key 'nam'"),
    ('name = "x"', 'name = "x y"', "line 2: name 'x y' must be"),
    ('log_level = "debug"', "log_level = 3", "line 5: defaults: log_level is 3; it must be of type str"),
    ('name = "a"', 'name = "a"\nranks = "2"', "line 9: member 'a': ranks is '2'; it must be of type int"),
    ('"/b",', '"/b", 3', "line 12: member 'b': models is"),
    ('name = "a"', 'name = "a"\naddress = "0.0.0.0:1"', "line 9: member 'a': refusing to serve on 0.0.0.0:1"),
    ('name = "b"', 'name = "a"', "line 11: member name 'a' must be unique"),
    ('name = "b" ', 'name = "b\n', "line 11, column"),
])  # fmt: skip
def test_mistakes_have_a_line(tmp_path, old, new, message):
    toml()
    path = tmp_path / "pool.toml"
    path.write_text(POOL)
    assert list(Pool.from_file(str(path)).members) == ["a", "b"]
    path.write_text(POOL.replace(old, new))
    with pytest.raises(ValueError) as caught:
        Pool.from_file(str(path))
    assert f"{path}, {message}" in str(caught.value) or (message in str(caught.value) and "column" in message)


def test_defaults_of_members(tmp_path):
    write(tmp_path, [{"name": "a"}, {"name": "b", "drain_limit": 5, "address": ["127.0.0.1:1", "unix:/x"]}],
          defaults={"token_file": "/tokens", "drain_limit": 30})
    pool = Pool.from_file(str(tmp_path / "pool.json"))
    a, b = pool.members.values()
    assert (a.token_file, a.drain_limit, b.drain_limit) == ("/tokens", 30, 5)
    assert pool.addresses("a") == ["unix:/run/allspark/default/a/socket"] and pool.addresses("b") == b.address


ONE, TWO = {0: [[0], [1]]}, {0: [[0], [1]], 1: [[2], [3]]}


@pytest.mark.parametrize("nodes, members, problem", [
    (TWO, [{"numa_nodes": [0]}, {"numa_nodes": [0, 1]}], "'0' and '1' use the CPUs of NUMA node 0: .* have 4"),
    (TWO, [{}, {"numa_nodes": [1]}], "'0' and '1' use the CPUs of NUMA node 1"),
    (TWO, [{"numa_nodes": [7]}, {"numa_nodes": [7]}], "of NUMA node 7: together they have 2 threads for its 0 cores"),
    (ONE, [{"cpus_per_rank": 1}, {"cpus_per_rank": 1}, {"cpus_per_rank": 1}], "'0' and '1' and '2' use the CPUs"),
    (TWO, [{"ranks": 4, "cpus_per_rank": 1}, {"cpus_per_rank": 1}], "together they have 3 threads for its 2 cores"),
    (TWO, [{"numa_nodes": [0]}, {"numa_nodes": [1]}], ""),
    (TWO, [{"ranks": 1}, {"numa_nodes": [1]}], ""),
    (ONE, [{"cpus_per_rank": 1}, {"cpus_per_rank": 1}], ""),
    (ONE, [{}, {"gpus": [0]}, {"share_cpus": True}], ""),
])  # fmt: skip
def test_members_that_need_the_same_cpus_are_refused(tmp_path, nodes, members, problem):
    write(tmp_path, members, defaults={"share_cpus": False})
    pool = Pool.from_file(str(tmp_path / "pool.json"))
    topology = read_topology(machine(tmp_path / "machine", nodes))
    if not problem:
        return pool.check_cpus(topology)
    with pytest.raises(ValueError, match=problem):
        pool.check_cpus(topology)


# --- units ---


def systemd_values(text: str) -> dict[str, configparser.SectionProxy]:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read_string(text)
    return unit


def test_units_meet_the_start_limit_and_survive_a_lost_rank(tmp_path):
    """Units are read as systemd reads them: a supervisor that fails at once must reach the start limit although it is
    restarted after RestartSec seconds; after a configuration error it is not restarted at all.
    """
    pool = Pool("default", "daemon", {"a": GroupOptions(drain_limit=90), "b": GroupOptions(drain_limit=10)})
    files = unit_files(pool, tmp_path)
    unit = systemd_values(files["allspark-default@.service"])
    limits, service = unit["Unit"], unit["Service"]
    assert int(limits["StartLimitBurst"]) * (int(service["RestartSec"]) + 60) < int(limits["StartLimitIntervalSec"])
    assert str(EXIT_CONFIG) in service["RestartPreventExitStatus"].split()
    assert service["OOMPolicy"] == "continue" and int(service["OOMScoreAdjust"]) < 0
    assert int(service["TimeoutStopSec"]) > 90
    assert files["allspark-default.target"].count("allspark-default@") == 2
    endless = Pool("default", "daemon", {"a": GroupOptions(drain_limit=float("inf"))})
    assert "TimeoutStopSec=infinity" in unit_files(endless, tmp_path)["allspark-default@.service"]


@pytest.mark.parametrize("options, has, lacks", [
    ({}, ["IPAddressDeny=any", "ProtectHome="], ["SupplementaryGroups", "ReadWritePaths", "@chown"]),
    ({"address": ["0.0.0.0:1"], "insecure": True}, [], ["IPAddressDeny"]),
    ({"http": "10.0.0.1:1", "insecure": True}, [], ["IPAddressDeny"]),
    ({"prefill_from": ["10.0.0.1:1"]}, [], ["IPAddressDeny"]),
    ({"prefill_from": ["127.0.0.1:1"], "prefill_token_file": "/home/a/tokens"}, ["IPAddressDeny=any",
                                                                                 "ProtectHome=read-only"], []),
    ({"models": ["Qwen/Qwen2.5-0.5B"]}, [], ["IPAddressDeny"]),
    ({"models": ["/home/me/model"]}, ["ProtectHome=read-only"], []),
    ({"hosts": "a,b"}, ["ProtectHome=read-only"], ["IPAddressDeny"]),
    ({"models": [{"model_path": "/m", "host_cache_dir": '/a "b"%'}]}, ['ReadWritePaths="/a \\"b\\"%%"'], []),
    ({"gpus": [0, 1]}, ["PrivateDevices=no", "DeviceAllow=char-nvidia* rw", "CUDA_CACHE_PATH=/var/cache"],
     ["MemoryDenyWriteExecute=yes"]),
    ({"models": [{"model_path": "/m", "compute_unit": "CUDA:1"}]}, ["PrivateDevices=no"],
     ["MemoryDenyWriteExecute=yes"]),
    ({"socket_group": "adm"}, ["SupplementaryGroups=adm", "SystemCallFilter=@chown"], []),
])  # fmt: skip
def test_units_allow_what_members_need(tmp_path, options, has, lacks):
    pool = Pool("p", "daemon", {"a": GroupOptions(**options)})
    text = unit_files(pool, tmp_path)["allspark-p@.service"]
    assert all(line in text for line in has) and not any(line in text for line in lacks)


@pytest.mark.parametrize("collector, environment, opens", [
    ("http://collector:4318", {}, True),
    ("http://127.0.0.1:4318/v1", {}, False),
    ("grpc://[::1]:4317", {}, False),
    ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "10.0.0.1:4317"}, True),
    ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, False),
])  # fmt: skip
def test_a_collector_on_another_host_opens_the_network(tmp_path, collector, environment, opens):
    """It was blocked without a word."""
    write(tmp_path, [{"name": "a", "environment": environment}], collector=collector)
    pool = Pool.from_file(str(tmp_path / "pool.json"))
    assert ("IPAddressDeny" not in unit_files(pool, tmp_path)["allspark-default@.service"]) is opens
    assert (f'OTEL_EXPORTER_OTLP_ENDPOINT="{collector}"' in pool.environment_file("a")) is bool(collector)


def test_nothing_runs_as_root_unless_asked(tmp_path):
    (tmp_path / "pool.json").write_text(json.dumps({"member": [{"name": "a"}]}))
    pool = Pool.from_file(str(tmp_path / "pool.json"))
    assert "\nUser=allspark\n" in unit_files(pool, tmp_path)["allspark-default@.service"]


@pytest.mark.parametrize("user", ["root", "nobody", "allspark"])
def test_systemd_thinks_well_of_the_units(tmp_path, user):
    """`systemd-analyze security`, with every relaxation that a member may need at once."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    widest = GroupOptions(address=["0.0.0.0:1"], insecure=True, socket_group="adm", models=["/home/m"], gpus=[0])
    http = HttpOptions(address="0.0.0.0:443", insecure=True, socket_group="adm", token_file="/home/t")
    for name, text in unit_files(Pool("p", user, {"a": widest}, http=http), tmp_path).items():
        (tmp_path / name).write_text(text)
    found = [tmp_path / "allspark-p@a.service", tmp_path / "allspark-p-http.service", tmp_path / "allspark-p.target"]
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *found], capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if "allspark" in line and "Special user nobody" not in line]
    assert done.returncode == 0 and not complaints, done.stderr
    done = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager",
                           tmp_path / "allspark-p@.service", tmp_path / "allspark-p-http.service"],
                          capture_output=True, text=True, timeout=60)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze reads no files")
    assert done.returncode == 0, done.stdout[-200:]


# --- commands ---


def test_install_and_uninstall(tmp_path, systemctl, capsys):
    write(tmp_path, [{"name": "a"}, {"name": "b"}])
    assert main(words(tmp_path, "install")) == 0 and systemctl() == []
    assert main(words(tmp_path, "install", "--now")) == 0
    assert systemctl() == ["daemon-reload", "enable allspark-default@a.service allspark-default@b.service "
                           "allspark-default.target", "start allspark-default.target",
                           *(f"is-active allspark-default@{member}.service" for member in "ab")]
    write(tmp_path, [{"name": "b"}])    # the installed configuration counts, not the changed file
    assert main(words(tmp_path, "uninstall")) == 0
    assert systemctl() == ["disable --now allspark-default.target allspark-default@a.service "
                           "allspark-default@b.service", "daemon-reload"]
    assert not list((tmp_path / "u").iterdir()) and not list((tmp_path / "c").iterdir())


def test_apply_does_what_the_change_needs(tmp_path, systemctl, capsys):
    write(tmp_path, [{"name": "a"}, {"name": "b"}, {"name": "c"}])
    assert main(words(tmp_path, "install")) == 0
    assert main(words(tmp_path, "apply")) == 0
    assert [call for call in systemctl() if call.split()[0] not in ("daemon-reload", "enable", "is-active")] == \
        [f"start allspark-default@{m}.service" for m in "abc"]
    assert main(words(tmp_path, "apply")) == 0
    assert {call.split()[0] for call in systemctl()} == {"daemon-reload", "enable", "is-active"}, "nothing to do"
    # b is told its limits; c is gone, d is new.
    write(tmp_path, [{"name": "a"}, {"name": "b", "log_level": "debug"}, {"name": "d"}])
    capsys.readouterr()
    assert main(words(tmp_path, "apply")) == 0
    calls, said = systemctl(), capsys.readouterr().out
    assert "disable --now allspark-default@c.service" in calls
    assert "start allspark-default@d.service" in calls and "reload allspark-default@b.service" in calls
    assert not any(call.startswith("restart") for call in calls)
    assert "a: unchanged" in said and "b: reloaded" in said and "d: started" in said
    assert not (tmp_path / "c/default/c.json").exists()


def test_the_http_server_of_a_pool(tmp_path, systemd, capsys):
    unit, config = tmp_path / "u/allspark-default-http.service", tmp_path / "c/default.http.json"
    report = Path(units.RUN_DIR, "default.http", "running.json")
    tokens = tmp_path / "tokens"
    tokens.write_text("admin a-long-enough-token\n")
    members = [{"name": "a", "token_file": str(tokens)}, {"name": "b"}]
    http = {"address": "0.0.0.0:443", "insecure": True}

    def apply(**changed) -> list[str]:
        write(tmp_path, members, **changed)
        systemd.calls = []
        assert main(words(tmp_path, "apply")) == 0
        return [call for call in systemd.calls if "http" in call and call.split()[0] not in ("is-active", "enable")]

    def run() -> None:
        """What `allspark http` reports once it has started, or has reloaded."""
        systemd.lost.add(unit.name)
        report.parent.mkdir(exist_ok=True)
        digest = re.search(rf"^Environment={UNIT_KEY}=(.*)$", unit.read_text(), re.M)[1]
        report.write_text(json.dumps({"options": json.loads(config.read_text()), UNIT_KEY: digest}))

    assert apply(http=http) == [f"start {unit.name}"]
    assert {"AmbientCapabilities=CAP_NET_BIND_SERVICE", "TimeoutStopSec=90", "Type=notify"} <= set(
        unit.read_text().splitlines())
    assert unit.name in (tmp_path / "u/allspark-default.target").read_text()
    options = json.loads(config.read_text())
    assert options["pool"] == [f"unix:{units.RUN_DIR}/default/{name}/socket" for name in "ab"]
    assert options["pool_token_file"] == str(tokens) and options["drain_limit"] == 60
    run()
    assert apply(http=http) == [] and "http: unchanged" in capsys.readouterr().out
    assert apply(http={**http, "workers": 3}) == [f"reload {unit.name}"]
    run()
    assert apply(http={**http, "workers": 3, "address": "0.0.0.0:444"}) == [f"restart {unit.name}"]
    report.unlink()
    assert apply(http={**http, "workers": 3}) == [f"restart {unit.name}"]
    assert apply() == [f"disable --now {unit.name}"] and not unit.exists() and not config.exists()
    assert apply(http=http) and main(words(tmp_path, "uninstall")) == 0 and not unit.exists() and not config.exists()


@pytest.mark.parametrize("http, message", [
    (5, r"http is 5; it must be a table, \[http\]"),
    ({"port": 1}, "http: unknown key 'port'; known: token_file, .*, address, workers"),
    ({"address": "0.0.0.0:1"}, "http: refusing to serve on 0.0.0.0:1"),
    ({"address": "unix:/m", "drain_limit": -1}, "drain_limit is -1; it must be a number of seconds"),
    ({"address": "unix:/m"}, "members 'http' and 'a' both have address unix:/m"),
])  # fmt: skip
def test_mistakes_in_the_table_http(tmp_path, http, message):
    write(tmp_path, [{"name": "a", "address": "unix:/m"}], http=http)
    with pytest.raises(ValueError, match=message):
        Pool.from_file(str(tmp_path / "pool.json"))


def test_status_of_a_group_that_is_down(capsys, tmp_path):
    assert main(["pool", "status", "--address", f"unix:{tmp_path}/none"]) == 1
    assert "down" in capsys.readouterr().out


def test_an_unknown_member_is_reported(tmp_path, capsys):
    write(tmp_path, [{"name": "a"}])
    assert main(["pool", "restart", "--config", str(tmp_path / "pool.json"), "z"]) == 1
    assert "there is no member 'z'; members: a" in capsys.readouterr().err


# --- what systemd is told ---


def test_systemd_learns_that_a_service_is_ready_though_its_queue_was_full(tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "SEND_SECONDS", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        notifier = Notifier(str(tmp_path / "notify"))
        with contextlib.ExitStack() as stack:
            sent = 1
            while sent:         # each sender is limited, too
                other = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                other.setblocking(False)
                sent = 0
                with contextlib.suppress(BlockingIOError):
                    while True:
                        other.sendto(b"STATUS=busy", str(tmp_path / "notify"))
                        sent += 1
        notifier.ready()
        said = []
        with pytest.raises(BlockingIOError):
            while True:
                said.append(listener.recv(100))
        assert set(said) == {b"STATUS=busy"}
        notifier.alive()
        assert listener.recv(100) == b"READY=1"
        notifier.alive()
        with pytest.raises(BlockingIOError):
            listener.recv(100)


def test_systemd_is_notified(tmp_path):
    path = tmp_path / "notify"
    environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000", "WATCHDOG_PID": str(os.getpid())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.setblocking(False)
        notifier = Notifier.from_environment(environment)
        assert environment == {}, "nothing of it is for the ranks"
        notifier.ready()
        notifier.status("serving:\n1 request")
        notifier.status("serving:\n2 requests")     # too soon
        notifier.alive()
        notifier.alive()                            # not due yet
        notifier.stopping()
        said = [listener.recv(100) for _ in range(4)]
        assert said == [b"READY=1", b"STATUS=serving: 1 request", b"WATCHDOG=1", b"STOPPING=1"]
        with pytest.raises(BlockingIOError):
            listener.recv(100)
    notifier.ready()        # nobody listens any more
    Notifier.from_environment({}).ready()
    other = Notifier.from_environment({"WATCHDOG_USEC": "300000", "WATCHDOG_PID": "1"})
    assert other._interval == 0, "it is another process that systemd watches"
