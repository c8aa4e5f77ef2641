"""Proves a pool of systemd services in a virtual machine with two NUMA nodes, from outside.

    prove.py build DIR             makes the machine's image, with what this environment has installed
    prove.py run DIR USER PART     boots it with the last commit, proves that it works as USER; writes DIR/USER-PART.log

PART is group (a member with a rank on each node: placement, a stepped clock, a memory limit, lost ranks, drain), pool
(two members: a rolling restart, a wrong configuration) or hosts (a member over two hosts, one of them a namespace
behind netem's delay and loss).

Needs root, mmdebstrap, qemu-system-x86 and e2fsprogs (two-nodes.sh). A run takes up to ten minutes, and more on a busy
machine: everything is emulated.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
MACHINE = HERE / "two-nodes.sh"
#: packages of the environment that no server needs
LEFT_OUT = ("torch*", "functorch*", "transformers*", "scipy*", "sympy*", "matplotlib*", "networkx*", "PIL", "pillow*",
            "fontTools*", "anthropic*", "openai*", "pip*", "setuptools*", "hypothesis*", "_pytest", "pytest*",
            "grpc_tools*",
            "contourpy*", "pygments*", "mpmath*", "fschat*", "__editable__*", "__pycache__", "hf_xet*")
HOST_PORTS = (50351, 50352)
TOKEN = "a-token-of-the-proof"
PROMPTS, CLIENTS, NEW_TOKENS = 3, 2, 24
RUN_SECONDS = 2400     # alone on two cores a run takes six minutes
UNIT = """[Unit]
After=multi-user.target
[Service]
Type=idle
Environment=PATH=/opt/allspark/bin:/usr/sbin:/usr/bin:/sbin:/bin
ExecStartPre=/bin/tar -xf /dev/nvme1n1 -C /
ExecStart=/usr/bin/python3 /opt/proof/guest.py
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
"""


def build(folder: Path) -> None:
    """Builds the image, and beside it the certificate that clients trust."""
    overlay = folder / "overlay"
    shutil.rmtree(overlay, ignore_errors=True)
    environment = overlay / "opt/allspark"
    source = Path(sys.prefix)
    shutil.copytree(source, environment, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    compile_all(environment, "/opt/allspark")
    for name in ("python", "python3", "python3.11"):
        (environment / "bin" / name).unlink(missing_ok=True)
        (environment / "bin" / name).symlink_to("/usr/bin/python3.11")
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for script in (environment / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script.read_bytes()[:2] == b"#!":
            script.write_text(script.read_text().replace(str(source), "/opt/allspark"))
    etc = overlay / "etc/allspark"
    etc.mkdir(parents=True)
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", etc / "key.pem", "-out",
                    etc / "cert.pem"], check=True, capture_output=True)
    (etc / "tokens").write_text(f"admin {TOKEN}\n")
    for secret in ("tokens", "key.pem"):
        (etc / secret).chmod(0o600)
    shutil.copy(etc / "cert.pem", folder / "cert.pem")
    units = overlay / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True)
    (units / "proof.service").write_text(UNIT)
    (units / "multi-user.target.wants/proof.service").symlink_to("../proof.service")
    subprocess.run([MACHINE, "build", folder, "python3.11", "libpython3.11", "libhwloc15", "libevent-core-2.1-7",
                    "libevent-pthreads-2.1-7"], check=True)


def compile_all(folder: Path, path: str) -> None:
    """Writes byte code beside all modules of a folder, which is `path` in the machine; its Python has this one's
    version.
    Services cannot write byte code, and compiling at each start takes minutes under emulation.
    """
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "2", "--invalidation-mode", "unchecked-hash", "-s",
                    folder, "-p", path, folder], check=False, stdout=subprocess.DEVNULL)


def pack(file: Path) -> None:
    """Packs the last commit, with what was built of it, in the form that the machine unpacks."""
    def of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        return entry

    with tempfile.TemporaryDirectory() as folder, tarfile.open(file, "w") as tar:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        built = ["allspark_client/_proto/__init__.py", "allspark_client/_proto/allspark_pb2.py",
                 "allspark_client/_proto/asgraph_pb2.py"]
        built += [str(p.relative_to(REPOSITORY)) for part in ("allspark_server", "launch/allspark_launch")
                  for p in (REPOSITORY / part).glob("*.so")]
        for name in built:
            Path(folder, name).parent.mkdir(exist_ok=True)
            shutil.copy(REPOSITORY / name, Path(folder, name))
        for package, path in (("allspark_client", "allspark_client"), ("allspark_server", "allspark_server"),
                              ("allspark_launch", "launch/allspark_launch"),
                              ("allspark_launch/systemd", "launch/systemd")):
            place = f"opt/allspark/lib/python3.11/site-packages/{package}"
            compile_all(Path(folder, path), f"/{place}")
            tar.add(Path(folder, path), place, filter=of_root)
        tar.add(HERE / "guest.py", "opt/proof/guest.py", filter=of_root)
        for name in ("shell_client.py", "shell_server.py"):
            tar.add(HERE.parent / "over_hosts" / name, f"opt/proof/over_hosts/{name}", filter=of_root)


class Load:
    """Clients outside of the machine that stream one request after the other, over TLS and with a token."""

    def __init__(self, certificate: Path):
        self._certificate, self._end = certificate, threading.Event()
        self.finished = self.resumed = 0
        self.problems: list[str] = []
        self._expected: dict[int, list[int]] = {}
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(30)

    def _connect(self):
        """A connected client. Connecting is retried, because an emulated handshake takes long on a busy machine."""
        from allspark_client import AllSparkError, ClientEngine

        addresses = [f"localhost:{port}" for port in HOST_PORTS]
        while True:
            try:
                return ClientEngine(addresses, tls={"ca": str(self._certificate)}, token=TOKEN, reconnect_timeout=900)
            except AllSparkError:
                if self._end.wait(1):
                    raise

    def _run(self, number: int) -> None:
        with self._connect() as client:
            while not self._end.is_set():
                prompt = (number + self.finished) % PROMPTS
                try:
                    _, handle, queue = client.start_request(
                        "m", {"input_ids": list(range(5 + prompt, 25 + prompt))},
                        {"max_new_tokens": NEW_TOKENS, "top_k": 1, "early_stopping": False})
                    ids = [i for elements in queue for i in elements.ids_from_generate]
                    client.release_request("m", handle)
                except Exception as error:  # no request may end early, whatever the reason
                    self.problems.append(f"client {number}: {error}")
                    return
                if ids != self._expected.setdefault(prompt, ids) or len(ids) != NEW_TOKENS:
                    self.problems.append(f"client {number}: {ids} instead of {self._expected[prompt]}")
                self.finished += 1


def run(folder: Path, user: str, part: str) -> int:
    """Boots the machine; returns 0 if everything was proven."""
    pack(folder / "code.tar")
    ports = [f"{host}:{guest}" for host, guest in zip(HOST_PORTS, (50051, 50052))]
    machine = subprocess.Popen([MACHINE, "run", folder, *ports], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace",
                               env={**os.environ, "VM_TAR": str(folder / "code.tar"), "VM_DRIVE": "snapshot=on",
                                    "VM_APPEND": f"proof.user={user} proof.part={part} systemd.show_status=0"})
    killer = threading.Timer(RUN_SECONDS, machine.kill)
    killer.start()
    load, proven, before, began = Load(folder / "cert.pem"), False, 0, time.monotonic()
    with open(folder / f"{user}-{part}.log", "w", encoding="utf-8", buffering=1) as log:
        def note(text: str) -> None:
            line = f"{time.monotonic() - began:5.0f} s  {text}"
            print(line, flush=True)
            log.write(line + "\n")

        for line in machine.stdout:
            _, mark, text = line.rstrip().partition("PROOF ")
            if text or line.strip():
                note(text if mark else "| " + line.strip())
            if text == "READY":
                load.start()
            elif text == "ROLLING":
                before = load.finished
            elif text.startswith("ROLLED"):
                note(f"outside: {load.finished - before} requests have finished meanwhile")
            elif text == "HALT":
                load.stop()
                note(f"outside: {load.finished} requests of {NEW_TOKENS} tokens over TLS, each as the first with its "
                     f"prompt; problems: {load.problems or 'none'}")
            proven = proven or text == "DONE"
        load.stop()
    killer.cancel()
    machine.wait()
    return 0 if proven and load.finished and not load.problems else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("user", nargs="?", default="nobody")
    parser.add_argument("part", nargs="?", default="group", choices=["group", "pool", "hosts"])
    options = parser.parse_args()
    if options.action == "build":
        options.folder.mkdir(parents=True, exist_ok=True)
        build(options.folder)
        return 0
    return run(options.folder, options.user, options.part)


if __name__ == "__main__":
    sys.exit(main())
