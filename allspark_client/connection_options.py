"""ClientEngine's arguments about servers: addresses, token, TLS."""
from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .errors import AllSparkError, AsStatus
from .types import TlsConfig


def check_address(address: Any) -> str:
    """`address`, "host:port" or "unix:/path", without surrounding blanks; ValueError or TypeError for anything else."""
    if not isinstance(address, str):
        raise TypeError(f"address must be 'host:port' or 'unix:/path', not {type(address).__name__}")
    text: str = address.strip()
    host, _, port = text.rpartition(":")
    if text.startswith("unix:") and len(text) > 5:
        return text
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address={text!r} is not known; allowed: 'host:port' or 'unix:/path'")
    return text


#: what the addresses of members that come and go begin with: see discovery.py
DNS, FILE = "dns:", "file:"


def check_source(address: Any) -> str:
    """As check_address; allows also "dns:NAME:PORT" and "file:PATH"."""
    if isinstance(address, str) and address.strip().startswith(DNS):
        return DNS + check_address(address.strip().removeprefix(DNS))
    if isinstance(address, str) and address.strip().startswith(FILE):
        if address.strip() == FILE:
            raise ValueError(f"address={address.strip()!r} must name a file: file:PATH")
        return address.strip()
    return check_address(address)


def server_addresses(addresses: str | Iterable[str] | None) -> list[str]:
    """The addresses that were given, or those of $ALLSPARK_ADDRESS; none if neither is set: start a group."""
    if addresses is None:
        addresses = os.environ.get("ALLSPARK_ADDRESS", "")
        if not addresses.strip():
            return []
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    if not parts:
        raise ValueError("addresses is an empty list; give at least one, or None to start a group")
    checked = [check_source(part) for part in parts]
    if len(set(checked)) < len(checked):
        raise ValueError(f"addresses={checked!r} names a server twice")
    return checked


def environment_token() -> str | None:
    """The first token of the file $ALLSPARK_TOKEN_FILE, whose lines are `TOKEN` or `ROLE TOKEN`; None if not set."""
    path = os.environ.get("ALLSPARK_TOKEN_FILE", "")
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.split() for line in file if line.strip() and not line.lstrip().startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"$ALLSPARK_TOKEN_FILE cannot be read: {error}") from None
    if not lines:
        raise ValueError(f"$ALLSPARK_TOKEN_FILE: {path} holds no token")
    return lines[0][-1]


def tls_config(tls: TlsConfig | dict[str, str] | str | bool | None) -> TlsConfig | None:
    """ClientEngine's argument `tls` as a TlsConfig; None: no TLS."""
    if tls is None or tls is False:
        return None
    if tls is True:
        return TlsConfig()
    if isinstance(tls, TlsConfig):
        return tls
    if isinstance(tls, dict):
        return TlsConfig(**tls)
    if isinstance(tls, (str, os.PathLike)):
        return TlsConfig(ca=os.fspath(tls))
    raise TypeError(f"tls must be a TlsConfig, a dict of its fields, a CA file or True, not {type(tls).__name__}")
