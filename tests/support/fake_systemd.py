"""A systemd for tests of pools: its units are services with a fake engine in this process."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from allspark_launch.options import RELOADABLE, UNIT_KEY
from allspark_launch.pool import units
from allspark_server.access import Access
from allspark_server.rpc.service import Service
from support.fake_engine import FakeEngine


class FakeSystemd:
    """Runs the units of a pool. `broken`: names of members that fail to start. `interval`: seconds of their steps."""

    def __init__(self, config_dir: Path, run_dir: Path):
        self._config_dir, self._run_dir = config_dir, run_dir
        self.calls: list[str] = []
        self.running: dict[str, tuple[FakeEngine, Service]] = {}    # by the unit's name
        self.lost: set[str] = set()         # active units whose group is gone
        self.failed: set[str] = set()
        self.broken: set[str] = set()
        self.interval = 0.001
        #: requests that were running when their member was stopped, and that were not resumed there
        self.cut = 0

    def run(self, command: list[str], **_) -> subprocess.CompletedProcess:
        """In the place of subprocess.run."""
        self.calls.append(" ".join(command[1:]))
        action, *words = command[1:]
        names = [word for word in words if not word.startswith("--")]
        output, code = "", 0
        if action == "is-active":
            failed = "failed" if names[0] in self.failed else "inactive"
            output = "active" if names[0] in {*self.running, *self.lost} else failed
        elif action == "start" and names[0].endswith(".target"):
            members = sorted(self._config_dir.glob("*/*.json"))
            for unit in (units.unit_name(path.parent.name, path.stem) for path in members):
                self._start(unit, False)        # as with Wants=, it does not matter if one fails
        elif action in ("start", "restart"):
            code = max([self._start(unit, action == "restart") for unit in names])
        elif action == "disable" and "--now" in words:
            for unit in names:
                self.stop(unit)
        elif action == "reload":
            for unit in names:
                if "@" not in unit:
                    continue
                fresh = self._options(unit)
                self._report(unit, {**self.report(unit)["options"],
                                    **{key: fresh[key] for key in RELOADABLE if key in fresh}})
        elif action == "reset-failed":
            self.failed -= set(names)
        return subprocess.CompletedProcess(command, code, output + "\n", "it is broken" if code else "")

    def _place(self, unit: str) -> tuple[str, str]:
        return re.fullmatch(r"allspark-(.*)@(.*)\.service", unit).groups()

    def _options(self, unit: str) -> dict:
        pool, member = self._place(unit)
        return json.loads((self._config_dir / pool / f"{member}.json").read_text())

    def report(self, unit: str) -> dict:
        """What a member says that it runs with."""
        pool, member = self._place(unit)
        return json.loads((self._run_dir / pool / member / "running.json").read_text())

    def _report(self, unit: str, options: dict) -> None:
        pool, member = self._place(unit)
        environment = (self._config_dir / pool / f"{member}.env").read_text()
        report = {"options": options, UNIT_KEY: re.search(rf"^{UNIT_KEY}=(.*)$", environment, re.M)[1]}
        (self._run_dir / pool / member / "running.json").write_text(json.dumps(report))

    def _start(self, unit: str, again: bool) -> int:
        if "@" not in unit or (unit in self.running and not again):
            return 0
        self.stop(unit)
        pool, member = self._place(unit)
        if member in self.broken:
            self.failed.add(unit)
            return 1
        (self._run_dir / pool / member).mkdir(parents=True, exist_ok=True)
        options = self._options(unit)
        self._report(unit, options)
        engine = FakeEngine(self.interval)
        service = Service(engine, options["address"], access=Access(insecure=True))
        service.start()
        self.running[unit] = engine, service
        return 0

    def stop(self, unit: str) -> None:
        """Stops a member in order, as its supervisor does; requests that still run are cut."""
        if unit in self.running:
            engine, service = self.running.pop(unit)
            service.drain()
            self.cut += len([request for request in engine.live if not request.spec.resumed])
            service.stop(0.2)
            engine.close()
            shutil.rmtree(self._run_dir.joinpath(*self._place(unit)), ignore_errors=True)

    def lose(self, unit: str) -> None:
        """Loses a member's group; its supervisor is still there."""
        self.lost.add(unit)
        engine, service = self.running.pop(unit)
        service.stop(0.0)
        engine.close()

    def recover(self, unit: str) -> None:
        """The supervisor starts the group again."""
        self._start(unit, False)
        self.lost.discard(unit)

    def close(self) -> None:
        """Stops all members."""
        for unit in list(self.running):
            self.stop(unit)


def install(monkeypatch, systemd: FakeSystemd, run_dir: Path) -> None:
    """Puts it in the place of systemctl."""
    real = subprocess.run

    def run(command, *arguments, **keywords):
        return (systemd.run(command) if command[0] == "systemctl" else real(command, *arguments, **keywords))

    monkeypatch.setattr(units.subprocess, "run", run)
    monkeypatch.setattr(units, "RUN_DIR", str(run_dir))
