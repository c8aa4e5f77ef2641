"""The options of `allspark serve`, each declared once: as a flag, and most also as a key of the configuration file."""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from allspark_client.config import AsModelConfig
from allspark_server import access
from allspark_server.options import (
    OPEN_METRICS,
    ListenerOptions,
    Option,
    RankOptions,
    add_arguments,
    allowed_image_hosts,
    largest_image,
    option,
    options_of,
)

from .group.http_server import HttpOptions
from .machine.topology import parse_list, parse_sequence
from .tables import Location, Table

#: environment variables of DashInfer: the number of ranks, and the first NUMA node that is used
NUMA_NUM, NUMA_OFFSET = "AS_NUMA_NUM", "AS_NUMA_OFFSET"
#: environment variable of a pool's members: a digest of the unit that they were started from
UNIT_KEY = "ALLSPARK_UNIT"


Options = TypeVar("Options", bound=ListenerOptions)


def from_table(kind: type[Options], values: dict, where: Location) -> Options:
    """The options of a table that is at `where` in a file. ValueError names file, line and key of what is wrong."""
    known = {declared.name: declared for declared in options_of(kind)}
    values = dict(values)
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where.at(key)}: unknown key {key!r}; known: {', '.join(known)}")
        wanted = known[key].kind
        if wanted == "list[str]" and isinstance(value, str):
            values[key] = value = [value]
        if not _is_a(value, wanted):
            raise ValueError(f"{where.at(key)}: {key} is {value!r}; it must be of type {wanted}")
        known[key].check(value, where.at(key))
    return kind(**values)


def given_flags(kind: type, parsed: argparse.Namespace, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """The options that the flags of a command line give; see add_flags. Raises ValueError."""
    given = {}
    for declared in options_of(kind):
        value = None if declared.name in leave_out else getattr(parsed, declared.name)
        if value not in (None, 0, False, []) or (declared.kind == "float" and value is not None):
            declared.check(value, declared.flag)
            given[declared.name] = value
    return given


def changed(options: ListenerOptions) -> dict[str, Any]:
    """The options that are not at their default."""
    default = type(options)()
    return {name: value for name, value in asdict(options).items() if value != getattr(default, name)}


@dataclass
class GroupOptions(RankOptions):
    """Options of a group, which are also the keys of a configuration file and of pool.toml's members. An empty value or
    0 lets the program choose.
    """

    http: str = option("", "also serve OpenAI's API at this address, in processes of its own; see allspark http",
                       metavar="HOST:PORT")
    http_workers: int = option(1, "how many processes serve HTTP", metavar="N")
    open_metrics: bool = option(False, OPEN_METRICS, section="access")
    allow_image_hosts: str = allowed_image_hosts()
    max_image_mib: int = largest_image()
    hosts: str = option("", "spread the group over these hosts, of which this is one: a file with a line 'NAME' or "
                        "'NAME slots=N' for each, names separated by commas, or auto (the Slurm allocation, the "
                        "LeaderWorkerSet, or the host file of the Kubernetes MPI operator); there is one rank per "
                        "NUMA node, or per slot, or --ranks in all", section="hosts", aliases=("--hostfile",),
                        metavar="FILE|NAMES")
    remote_shell: str = option("", "the command that runs a command on another host: it gets the host's name and the "
                               "command (default: ssh; srun in a Slurm allocation)", section="hosts", metavar="WORDS")
    ranks: int = option(0, "server processes (default: one per NUMA node)", section="placement", metavar="N",
                        environment=NUMA_NUM)
    numa_nodes: list[int] | None = option(None, "the NUMA nodes to use, such as 0,1", section="placement",
                                          metavar="LIST", parse=parse_list, environment=NUMA_OFFSET)
    memory_nodes: list[int] = option(list, "NUMA nodes without CPUs (CXL, for example) whose memory ranks may use once "
                                     "that of their own node is full (default: none)", section="placement",
                                     metavar="LIST", parse=parse_list)
    gpus: list[int] | None = option(None, "compute on these GPUs, such as 0,1: one rank per GPU, on the CPUs of its "
                                    "NUMA node", section="placement", metavar="LIST", parse=parse_sequence)
    experts_on: str = option("", "cpu: a mixed group: the GPUs of --gpus (a rank each), or rank 0 on CPUs, compute the "
                             "model, and one rank per NUMA node its routed experts (see the guide of mixed groups)",
                             section="placement", metavar="cpu", choices=("cpu",))
    cpus_per_rank: int = option(0, "compute threads of each rank (default: every physical core of its share)",
                                section="placement", aliases=("--threads",), metavar="N")
    use_siblings: bool = option(False, "also put threads on second hardware threads", section="placement")
    share_cpus: bool = option(False, "other groups may use the same CPUs: threads are not pinned, and sleep instead of "
                              "spinning", section="placement")

    @classmethod
    def from_file(cls, path: str) -> GroupOptions:
        """The options of a .toml or .json file. ValueError names file, line and key of what is wrong."""
        table = Table.read(path)
        return cls.from_table(table.values, table.location())

    @classmethod
    def from_table(cls, values: dict, where: Location) -> GroupOptions:
        """The options of a table that is at `where` in a file. Raises as from_file."""
        options = from_table(cls, values, where)
        for i, model in enumerate(values.get("models", [])):
            if isinstance(model, dict):
                try:
                    AsModelConfig.from_dict(model).validate()
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{where.at('models', i)}: models: {error}") from None
        return options

    def with_flags(self, parsed: argparse.Namespace) -> GroupOptions:
        """These options with the flags of a command line in their place. Raises ValueError."""
        return replace(self, **given_flags(GroupOptions, parsed, leave_out=("models",)))

    def changed(self) -> dict[str, Any]:
        """The options that are not at their default."""
        return changed(self)

    def addresses(self) -> list[str]:
        """The addresses to serve on. Raises ValueError for an address that would be open to everybody who reaches it,
        and for other errors in the options of listeners.
        """
        access.mode_of(self.socket_mode, self.socket_group)
        guarded = bool(self.token_file or self.tls_ca)
        addresses = self.address or [access.default_address(guarded or self.insecure)]
        for address in [*addresses, self.http] if self.http else addresses:
            access.check_listener(address, token=bool(self.token_file), tls=bool(self.tls_cert),
                              client_ca=bool(self.tls_ca), insecure=self.insecure)
        return addresses

    def http_options(self, group: str) -> HttpOptions:
        """Options of the HTTP server beside this group, which it reaches at the address `group`."""
        shared = {f.name: getattr(self, f.name) for f in fields(HttpOptions) if hasattr(self, f.name)}
        return HttpOptions(**{**shared, "address": self.http, "workers": self.http_workers, "pool": [group],
                              "drain_limit": HttpOptions.drain_limit,   # all responses end when the group has ended
                              "max_body_mib": self.max_message_mib, "pool_token_file": self.token_file})


#: the options that a group takes over on SIGHUP while it runs; others need a restart
RELOADABLE = tuple(declared.name for declared in options_of(GroupOptions) if declared.reloadable)
#: of them, those that place ranks: flags of several commands
PLACEMENT = tuple(declared for declared in options_of(GroupOptions)
                  if declared.section == "placement" and declared.name not in ("strict", "share_cpus"))


@dataclass
class ModelOptions:
    """Flags for the fields of AsModelConfig of a model that a command names."""

    model_name: str | None = option(None, "what clients call the model (default: the directory's name)",
                                    section="model", metavar="NAME")
    max_length: int | None = option(None, "tokens of prompt and output together (default 2048)", section="model",
                                    metavar="N", model_field="engine_max_length")
    max_batch: int | None = option(None, "sequences computed together (default 32)", section="model", metavar="N",
                                   model_field="engine_max_batch")
    weight_dtype: str | None = option(None, "auto (as stored), float32, bfloat16, int8, int4, w8a8, w4a8; on GPUs also "
                                      "float16, float8", section="model", metavar="TYPE", model_field="weight_dtype")
    weight_group_size: int | None = option(None, "of quantized weights: 32 to 512 input features; 0: per output "
                                           "channel (default)", section="model", metavar="K",
                                           model_field="weight_group_size")
    chat_template: str | None = option(None, "the Jinja template of chats (default: the checkpoint's)", section="model",
                                       metavar="FILE", model_field="chat_template")
    trust_request_chat_template: bool | None = option(
        None, "requests may bring a chat template of their own, which is rendered in a sandbox", section="model",
        model_field="trust_request_chat_template")
    set: list[str] = option(list, "any field of AsModelConfig; repeatable", section="model", metavar="FIELD=VALUE")

    @staticmethod
    def fields_of(parsed: argparse.Namespace) -> dict[str, Any]:
        """The fields of AsModelConfig that a command line sets, without the name. Raises ValueError."""
        values = {declared.model_field: getattr(parsed, declared.name) for declared in options_of(ModelOptions)
                  if declared.model_field and getattr(parsed, declared.name) is not None}
        return values | set_fields(parsed.set)


@dataclass
class ServeOptions:
    """Flags of `allspark serve` that are no keys of its configuration file."""

    config: str | None = option(None, "options from a file; flags take precedence over it", section="command",
                                metavar="FILE", reads_file=True)
    dry_run: bool = option(False, "print the mpirun line and stop", section="command")
    ready_file: str | None = option(None, "a JSON file that is written once the group serves", section="command",
                                    metavar="FILE")
    parent_pid: int = option(0, "stop when this process ends", section="command", metavar="PID")
    progress_lines: bool = option(False, "", section="command")
    report_file: str | None = option(None, "", section="command")


def add_flags(parser: argparse.ArgumentParser, declared: type | tuple[Option, ...]) -> None:
    """Adds the flags of a class of options, or of some. Absent flags are None, False, [] or 0."""
    empty: dict[str, Any] = {"int": 0, "bool": False}
    add_arguments(parser, options_of(declared) if isinstance(declared, type) else declared,
                  lambda o: o.default if o.default in (None, []) else empty.get(o.kind))


def set_fields(items: list[str]) -> dict[str, object]:
    """The fields that `--set FIELD=VALUE` flags give: values as JSON, or as text, such as bfloat16. Raises
    ValueError.
    """
    values: dict[str, object] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item!r} must be FIELD=VALUE")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def model_config(parsed: argparse.Namespace, directory: str) -> dict:
    """The fields of AsModelConfig for a --model directory, checked before anything starts."""
    from allspark_server.weights.hub import hub_name, is_hub_id, local_directory
    if is_hub_id(directory):
        path, name = Path(local_directory(directory)), hub_name(directory)
    else:
        path = Path(directory).expanduser().resolve()
        if not path.exists():
            raise ValueError(f"--model {directory}: there is no such file or directory")
        name = path.stem if path.suffix in (".asgraph", ".gguf") else path.name
    config = {"model_name": parsed.model_name or name, "model_path": str(path), **ModelOptions.fields_of(parsed)}
    AsModelConfig.from_dict(config).validate()
    return config


def group_options(parsed: argparse.Namespace) -> GroupOptions:
    """The options of `allspark serve`: those of the configuration file, with the flags' in their place."""
    group = GroupOptions.from_file(parsed.config) if parsed.config else GroupOptions()
    models: list[dict | str] = [model_config(parsed, directory) for directory in parsed.models]
    models = models or group.models
    if parsed.model_name and len(models) > 1:
        raise ValueError("--model-name names one model, but there are several; use --config with a models table")
    return replace(group.with_flags(parsed), models=models)


def _is_a(value: object, kind: str) -> bool:
    """Whether a value has a type such as "int" or "list[dict | str]". Text must not have control characters: it becomes
    part of command lines and units, where a line break would begin another setting.
    """
    if kind.startswith("list["):
        return isinstance(value, list) and all(any(_is_a(v, k) for k in kind[5:-1].split(" | ")) for v in value)
    if kind == "str":
        return isinstance(value, str) and value.isprintable()
    if kind == "float":
        return type(value) in (int, float)
    return type(value) is {"int": int, "bool": bool, "dict": dict}[kind]
