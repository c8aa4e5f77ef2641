"""The members of a pool: their addresses, and calls to them."""
from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2

from allspark_client._proto import allspark_pb2 as pb
from allspark_server import access

from .units import CONFIG_DIR

if TYPE_CHECKING:
    from .pool import Pool

CALL_SECONDS = 5.0


@dataclass
class Target:
    """A group's address, and how to connect to it."""

    name: str
    address: str
    token: str = ""
    tls_ca: str = ""


def add_target_options(p: argparse.ArgumentParser) -> None:
    """Adds the flags of commands that connect to groups."""
    p.add_argument("--config", metavar="FILE", help="pool.toml")
    p.add_argument("--config-dir", default=CONFIG_DIR, metavar="DIR",
                   help="where it is installed (default %(default)s)")
    p.add_argument("--address", action="append", default=[],
                   help="a group's address, instead of --config; repeatable (default: $ALLSPARK_ADDRESS, or the "
                        "address that a group without one serves on)")
    p.add_argument("--token-file", metavar="FILE",
                   help="authenticate with the token of this file that has the most powerful role")
    p.add_argument("--tls-ca", metavar="PEM", help="connect with TLS and trust these certificates")


def targets(options: argparse.Namespace) -> list[Target]:
    """The groups that the flags name."""
    if options.config:
        from .installed import installed_pool
        return pool_targets(installed_pool(options), options.token_file, options.tls_ca)
    token = first_token(options.token_file)
    addresses = options.address or environment_addresses()
    return [Target(a, a, token, options.tls_ca or "") for a in addresses or [default_address()]]


def pool_targets(pool: Pool, token_file: str | None = None, tls_ca: str | None = None) -> list[Target]:
    """The members of a pool. A member's Unix socket is preferred if it exists, because it needs no certificate."""
    members = []
    for name, member in pool.members.items():
        addresses = pool.addresses(name)
        here = [a for a in addresses if access.is_unix(a) and os.path.exists(a.removeprefix("unix:"))]
        address = (here or addresses)[0]
        for anywhere in ("0.0.0.0:", "[::]:"):
            if address.startswith(anywhere):
                address = "127.0.0.1:" + address.removeprefix(anywhere)
        ca = "" if access.is_unix(address) else tls_ca or member.tls_cert
        members.append(Target(name, address, first_token(token_file or member.token_file), ca))
    return members


def first_token(path: str | None) -> str:
    """The token with the most powerful role in a token file; "" without a file."""
    if not path:
        return ""
    tokens = access.read_tokens(path)
    return max(tokens, key=lambda token: list(access.Role).index(tokens[token]))


def environment_addresses() -> list[str]:
    """The addresses of $ALLSPARK_ADDRESS."""
    return [address for address in os.environ.get("ALLSPARK_ADDRESS", "").split(",") if address]


def default_address() -> str:
    """The address of a group that was started without one."""
    address = access.default_address(guarded=False)
    return address if os.path.exists(address.removeprefix("unix:")) else access.TCP_ADDRESS


class Member:
    """A connection to one group. Its calls raise grpc.RpcError."""

    def __init__(self, target: Target):
        self.target = target
        options = [("grpc.default_authority", "localhost")] if access.is_unix(target.address) else []
        if target.tls_ca:
            credentials = grpc.ssl_channel_credentials(Path(target.tls_ca).read_bytes())
            self._channel = grpc.secure_channel(target.address, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target.address, options)
        self._metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: Any) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any, response: Any) -> Any:
        call = self._channel.unary_unary(f"/allspark.Allspark/{method}", type(request).SerializeToString,
                                         response.FromString)
        return call(request, timeout=CALL_SECONDS, metadata=self._metadata)

    def info(self) -> pb.ServerInfo:
        """The group's ranks, models and state."""
        return self._call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo)

    def stat(self, model: str) -> pb.EngineStat:
        """A model's load and counters."""
        return self._call("GetStat", pb.ModelRequest(model=model), pb.EngineStat)

    def drain(self, undo: bool = False, lease: float = 0.0) -> pb.ServerInfo:
        """Makes the group refuse new requests for `lease` seconds (0: until it is undone), or accept them again. Needs
        the role admin.
        """
        return self._call("Drain", pb.DrainRequest(undo=undo, lease_seconds=lease), pb.ServerInfo)

    def serves(self) -> bool:
        """Whether its health is SERVING."""
        check = self._channel.unary_unary("/grpc.health.v1.Health/Check",
                                          health_pb2.HealthCheckRequest.SerializeToString,
                                          health_pb2.HealthCheckResponse.FromString)
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


def placed_share(info: pb.ServerInfo) -> str:
    """The share of the ranks' memory that is on the intended NUMA nodes, such as "95.0%", or "-" if it is unknown."""
    total = sum(sum(rank.bytes_on_node.values()) for rank in info.ranks)
    return f"{100 - 100 * sum(rank.misplaced_bytes for rank in info.ranks) / total:.1f}%" if total else "-"
