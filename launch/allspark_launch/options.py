"""What a group can be told: the options of `allspark serve`, by flags or by the keys of its config file."""
from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from allspark_client.config import AsModelConfig
from allspark_server import access, logs

from .group.http_server import HttpOptions
from .tables import Location, Table


def set_fields(items: list[str]) -> dict[str, object]:
    """What `--set FIELD=VALUE` flags say: values as JSON, or as the word they are, such as bfloat16. Raises
    ValueError.
    """
    found: dict[str, object] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item!r} must be FIELD=VALUE")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


@dataclass
class GroupOptions:
    """All options have a default; an empty text or 0 is chosen by the program."""

    models: list[dict | str] = field(default_factory=list)      # AsModelConfig keys, or a directory
    address: list[str] = field(default_factory=list)
    ranks: int = 0
    numa_nodes: list[int] | None = None
    memory_nodes: list[int] = field(default_factory=list)   # without CPUs, such as CXL, that ranks use as well
    gpus: list[int] | None = None       # one rank for each; models are theirs unless they say otherwise
    hosts: str = ""                 # a host file, names, or auto; "": this one
    remote_shell: str = ""          # words that start a command on one of them
    cpus_per_rank: int = 0
    use_siblings: bool = False
    strict: bool = False            # refuse to serve with memory on wrong nodes
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_role: str = ""
    insecure: bool = False
    socket_mode: str = ""
    socket_group: str = ""
    model_root: list[str] = field(default_factory=list)
    max_message_mib: int = 0
    max_requests: int = 0           # that may wait or run, 0: no limit but those of the models
    max_tenant_requests: int = 0
    state_file: str = ""
    drain_limit: float = 0.0        # s that requests have to end when a stop is asked for; inf: as long as they take
    log_level: str = "info"
    log_format: str = "text"        # or json
    log_requests: bool = False      # a line for each that has ended
    http: str = ""
    http_workers: int = 1

    @classmethod
    def from_file(cls, path: str) -> GroupOptions:
        """Options of a .toml or .json file; ValueError names a key that is unknown or of the wrong type."""
        table = Table.read(path)
        return cls.from_table(table.values, table.location())

    @classmethod
    def from_table(cls, values: dict, where: Location) -> GroupOptions:
        """Options by name; ValueError, which says `where`, names one that is unknown or of the wrong type."""
        known = {f.name: f for f in fields(cls)}
        values = dict(values)
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"{where.at(key)}: unknown key {key!r}; known: {', '.join(known)}")
            if key in ("address", "model_root") and isinstance(value, str):
                values[key] = value = [value]
            kind = known[key].type.removesuffix(" | None")
            if not _is_a(value, kind):
                raise ValueError(f"{where.at(key)}: {key} is {value!r}; it must be of type {kind}")
        for i, model in enumerate(values.get("models", [])):
            if isinstance(model, dict):
                try:
                    AsModelConfig.from_dict(model).validate()
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{where.at('models', i)}: models: {error}") from None
        found = cls(**values)
        if found.drain_limit < 0 or math.isnan(found.drain_limit):
            raise ValueError(f"{where.at('drain_limit')}: drain_limit is {found.drain_limit}; it must be a number of "
                             "seconds, at least 0, or inf")
        if found.log_format not in logs.FORMATS:
            raise ValueError(f"{where.at('log_format')}: log_format is {found.log_format!r}; allowed: text, json")
        return found

    def changed(self) -> dict[str, Any]:
        """The options that are not as by default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(GroupOptions(), name)}

    def addresses(self) -> list[str]:
        """What to serve on. Raises ValueError for an address that would be open to whoever reaches it, and for what
        else is wrong about the listeners.
        """
        if self.tls_role and self.tls_role not in (role.value for role in access.Role):
            raise ValueError(f"tls_role is {self.tls_role!r}; allowed: {', '.join(r.value for r in access.Role)}")
        access.mode_of(self.socket_mode, self.socket_group)
        guarded = bool(self.token_file or self.tls_ca)
        found = self.address or [access.default_address(guarded or self.insecure)]
        for address in [*found, self.http] if self.http else found:
            access.check_listener(address, token=bool(self.token_file), tls=bool(self.tls_cert),
                              client_ca=bool(self.tls_ca), insecure=self.insecure)
        return found

    def http_options(self, group: str) -> HttpOptions:
        """Of the HTTP server beside this group, which it reaches at the address `group`."""
        return HttpOptions(
            self.http, self.http_workers, self.token_file, self.tls_cert, self.tls_key, self.tls_ca, self.tls_role,
            self.insecure, self.socket_mode, self.socket_group, self.max_message_mib, self.log_level,
            self.log_format, [group], self.token_file)


def _is_a(value: object, kind: str) -> bool:
    """Whether a value has a type such as "int" or "list[dict | str]". Text has no control characters: it ends up in
    command lines and units, where a line break would begin another setting.
    """
    if kind.startswith("list["):
        return isinstance(value, list) and all(any(_is_a(v, k) for k in kind[5:-1].split(" | ")) for v in value)
    if kind == "str":
        return isinstance(value, str) and value.isprintable()
    if kind == "float":
        return type(value) in (int, float)
    return type(value) is {"int": int, "bool": bool, "dict": dict}[kind]
