"""Options of a server group, each declared once.

A field of a dataclass declares an option. Its name is the key in a configuration file and, with hyphens, the flag on a
command line; its annotation is the type; `option()` gives the default, the help text and what else must be known. The
parsers of `allspark serve`, `allspark http` and the processes that they start, the reader of configuration files, the
arguments of those processes and the reference page all read these fields.

This module has the options that ranks take. `allspark_launch.options` adds those that only the launcher needs.
"""
from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass
from typing import Any

from . import access, logs

#: values of `Option.ranks`
FIRST_RANK, EVERY_RANK = "first", "every"
#: those for which kernels exist: setup.py lists them, too
INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "sve512", "sve256",
                    "neon_dotprod", "neon")
LOG_LEVELS = ("debug", "info", "warning", "error")
#: the help text of a flag of `allspark serve` and of `allspark http`
OPEN_METRICS = ("GET /metrics of the HTTP server needs no token, for scrapers that have none, such as a gateway's "
                "endpoint picker")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_HOSTS_RULE = "hosts separated by commas, each a name, *.NAME or *"


def image_hosts(text: str) -> list[str]:
    """The hosts of --allow-image-hosts. Raises ValueError for what is none."""
    hosts = [host.strip() for host in text.split(",")] if text else []
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is no host; allowed: {_HOSTS_RULE}")
    return hosts


def _are_image_hosts(text: str) -> bool:
    """Whether `image_hosts` can read it."""
    try:
        image_hosts(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Option:
    """One option.

    name, kind, default: of the dataclass' field; `kind` is its annotation without "| None", such as "int".
    help: shown by --help and on the reference page; "" hides the option from both. `section` groups options there.
    flag_name: the flag without hyphens in front; "": the name. `aliases` are further flags.
    parse: the value of a flag's text, for types that argparse does not know; raises ValueError.
    choices; accepts, rule: the allowed values; or a test of a value, and what a value must be, for the error.
    implied: the value that the default stands for, if that is another one.
    ranks: which ranks get it as an argument: FIRST_RANK, EVERY_RANK or "" (none).
    worker: whether workers of the HTTP server get it as an argument.
    reloadable: whether a running group takes over a new value on SIGHUP.
    environment: the environment variable that is read where neither flag nor key is given.
    reads_file: whether it names a file that the group reads.
    model_field: the field of AsModelConfig that it sets.
    """

    name: str
    kind: str
    default: Any
    help: str
    section: str = ""
    metavar: str | None = None
    flag_name: str = ""
    aliases: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    accepts: Callable[[Any], bool] | None = None
    rule: str = ""
    implied: Any = None
    ranks: str = ""
    worker: bool = False
    reloadable: bool = False
    environment: str = ""
    reads_file: bool = False
    model_field: str = ""

    @property
    def flag(self) -> str:
        """The flag, such as --token-file."""
        return "--" + (self.flag_name or self.name.replace("_", "-"))

    @property
    def effective_default(self) -> Any:
        """The value that holds where none is given."""
        return self.default if self.implied is None else self.implied

    def help_text(self) -> str:
        """The help text with the default and the environment variable."""
        value = self.effective_default
        text = f"{self.help} (default {value})" if value and not isinstance(value, bool) else self.help
        return f"{text} [${self.environment}]" if self.environment else text

    def add_to(self, parser: argparse._ActionsContainer, default: Any) -> None:
        """Adds the flag to a parser. `default`: of the parsed value where the flag is absent."""
        details: dict[str, Any] = {"default": default, "dest": self.name,
                                   "help": self.help_text() if self.help else argparse.SUPPRESS}
        if self.kind == "bool":
            details["action"] = "store_true"
        else:
            details |= {"metavar": self.metavar, "choices": self.choices or None}
            if self.parse is None and self.kind.startswith("list["):
                details["action"] = "append"
            else:
                details["type"] = self._parsed if self.parse else {"int": int, "float": float}.get(self.kind)
        parser.add_argument(self.flag, *self.aliases, **details)

    def _parsed(self, text: str) -> Any:
        assert self.parse is not None
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def words(self, value: Any) -> list[str]:
        """The arguments that give the option this value; [] for the default."""
        if value == self.default or (value in (None, "", 0, []) and self.kind != "float"):
            return []
        if self.kind == "bool":
            return [self.flag]
        if self.kind == "list[int]":
            return [self.flag, ",".join(map(str, value))]
        return [word for item in (value if isinstance(value, list) else [value])
                for word in (self.flag, json.dumps(item) if isinstance(item, dict) else str(item))]

    def check(self, value: Any, where: str) -> None:
        """Raises ValueError, which begins with `where`, for a value of the right type that is not allowed."""
        if self.choices and value != self.default and value not in self.choices:
            raise ValueError(f"{where}: {self.name} is {value!r}; allowed: {', '.join(self.choices)}")
        if self.accepts is not None and not self.accepts(value):
            raise ValueError(f"{where}: {self.name} is {value}; it must be {self.rule}")


def option(default: Any, help: str, **details: Any) -> Any:
    """A dataclass field that declares an option; `details` are further fields of Option."""
    given = {"default_factory": default} if callable(default) else {"default": default}
    return dataclasses.field(**given, metadata={"help": help, **details})


def options_of(declared: type) -> list[Option]:
    """The options that a dataclass declares, with those of its bases first."""
    return [Option(field.name, str(field.type).removesuffix(" | None"),
                   field.default if field.default_factory is MISSING else field.default_factory(), **field.metadata)
            for field in dataclasses.fields(declared)]


def add_arguments(parser: argparse.ArgumentParser, options: Iterable[Option],
                  default: Callable[[Option], Any]) -> None:
    """Adds the flags of these options, by sections, with the defaults that `default` gives."""
    sections: dict[str, argparse._ActionsContainer] = {"": parser}
    for declared in options:
        if declared.section not in sections:
            sections[declared.section] = parser.add_argument_group(declared.section)
        declared.add_to(sections[declared.section], default(declared))


_access = functools.partial(option, section="access", ranks=FIRST_RANK)
_file = functools.partial(_access, reads_file=True, worker=True)
_logs = functools.partial(option, section="logs", ranks=EVERY_RANK, worker=True)
_handover = functools.partial(option, section="prefill in other groups", ranks=FIRST_RANK)
_limit = functools.partial(option, section="limits", metavar="N", ranks=FIRST_RANK)
#: options of `allspark http`, and of `allspark serve` for the HTTP server beside the group
allowed_image_hosts = functools.partial(
    option, "", "fetch images that requests name by http and https URLs from these hosts, if their addresses are "
    "public; *.NAME: all hosts below NAME, *: any host (default: none are fetched)", section="access",
    metavar="HOST[,HOST...]", accepts=_are_image_hosts, rule=_HOSTS_RULE)
largest_image = functools.partial(option, 0, "the largest image of a request, as an encoded file", section="limits",
                                  metavar="N", implied=20)


@dataclass
class ListenerOptions:
    """Options of a process that clients connect to: a group, or a worker of the HTTP server."""

    token_file: str = _file("", "clients must present a token of this file: a line 'ROLE TOKEN' for each, with the "
                            "role read, generate, door or admin, over HTTP perhaps with requests_per_minute=N and "
                            "tokens_per_minute=N; a file with one token alone gives it the role admin",
                            metavar="FILE")
    tls_cert: str = _file("", "the server's certificate", metavar="PEM")
    tls_key: str = _file("", "the key of that certificate", metavar="PEM")
    tls_ca: str = _file("", "require client certificates that these certificates have signed", metavar="PEM")
    tls_role: str = _access("", "the role of clients with a certificate if there is no token file", worker=True,
                            choices=tuple(role.value for role in access.Role), implied=access.Role.ADMIN.value)
    insecure: bool = _access(False, "serve a TCP address even if everybody who reaches it may do everything")
    socket_mode: str = _access("", "the mode of Unix sockets (default 0600: this user alone; 0660 with --socket-group)",
                               metavar="MODE")
    socket_group: str = _access("", "the group that Unix sockets belong to", metavar="NAME")
    log_level: str = _logs("info", "log messages from this level on", choices=LOG_LEVELS, reloadable=True)
    log_format: str = _logs("text", "how to log: text for people, json for programs", choices=logs.FORMATS)


@dataclass
class WorkerOptions(ListenerOptions):
    """Options of the HTTP server that its workers take as arguments. `pool`: the addresses of the groups behind it."""

    drain_limit: float = option(5.0, "how long responses may continue after a stop is requested, while no new "
                                "connections are accepted (inf: until they have ended); a second request to stop ends "
                                "them at once", metavar="SECONDS", worker=True, accepts=lambda value: value >= 0,
                                rule="a number of seconds, at least 0, or inf")
    wait_limit: float = option(0.0, "how long requests wait while no group takes any, such as until one is started for "
                               "them; without it they are refused", metavar="SECONDS", worker=True,
                               accepts=lambda value: 0 <= value < float("inf"), rule="a number of seconds, at least 0")
    heartbeat: float = option(15.0, "a stream that was silent for so long gets a comment, which clients skip, so that "
                              "proxies keep the connection (0: never)", metavar="SECONDS", worker=True,
                              accepts=lambda value: 0 <= value < float("inf"), rule="a number of seconds, at least 0")
    allow_origin: list[str] = option(list, "web pages of this origin, such as https://chat.example, may read answers "
                                     "(CORS); repeatable; *: all pages", section="access", metavar="ORIGIN",
                                     worker=True)
    access_log: bool = option(False, "log a line for each answered HTTP request", section="logs", worker=True)
    trusted_proxy: list[str] = option(list, "a proxy in front, an address or a network such as 10.0.0.0/8, whose "
                                      "X-Forwarded-For names the clients; repeatable", section="access",
                                      metavar="ADDRESS", worker=True)
    strict_fields: bool = option(False, "refuse requests with unknown fields; otherwise these are ignored, and a "
                                 "header of the answer names them", worker=True)
    open_metrics: bool = option(False, OPEN_METRICS, section="access", worker=True)
    store: str = option("", "keep responses, files and batches, so that clients can fetch and continue them: a file "
                        "of SQLite, or a URL of SQLAlchemy for several hosts (default: nothing is kept)",
                        section="store", metavar="FILE", worker=True)
    store_days: float = option(30.0, "how long they are kept", section="store", metavar="DAYS", worker=True,
                               accepts=lambda value: 0 < value < float("inf"), rule="a number of days above 0")
    store_mib: int = option(0, "how much they may take together; the oldest are deleted", section="store",
                            metavar="N", implied=4096, worker=True)
    max_file_mib: int = _limit(0, "the largest file that may be uploaded", implied=200, worker=True)
    allow_image_hosts: str = allowed_image_hosts(worker=True)
    max_image_mib: int = largest_image(worker=True)
    max_body_mib: int = _limit(0, "the largest request body that is accepted", implied=16, worker=True)
    pool: list[str] = option(list, "the address of a group, or dns:NAME:PORT or file:PATH for groups that come and go; "
                             "repeatable (default: $ALLSPARK_ADDRESS, or the address of a group without one)",
                             section="groups", flag_name="address", metavar="ADDRESS", worker=True)
    pool_token_file: str = option("", "present a token of this file to groups: one with the role door if there is one, "
                                  "else admin or generate", section="groups", metavar="FILE", worker=True)
    pool_tls_ca: str = option("", "connect to groups with TLS and trust these certificates", section="groups",
                              metavar="PEM", worker=True)


@dataclass
class RankOptions(ListenerOptions):
    """Options of a group that its ranks take as arguments. An empty value or 0 lets the program choose."""

    log_requests: bool = option(False, "log a line for each request that has ended", section="logs", ranks=FIRST_RANK)
    models: list[dict | str] = option(list, "a checkpoint to load and start: a directory, or org/name on the Hub; "
                                      "repeatable; without one, clients install what they need", flag_name="model",
                                      metavar="DIR", ranks=FIRST_RANK)
    address: list[str] = option(list, "host:port or unix:/path to serve on; repeatable (default: a Unix socket of this "
                                "user; 127.0.0.1:50051 with a token file, --tls-ca or --insecure)", ranks=FIRST_RANK)
    state_file: str = option("", "keep the list of models in this file (default: a temporary file)", metavar="FILE",
                             ranks=FIRST_RANK)
    drain_limit: float = option(0.0, "how long requests may continue after a stop is requested, while no new ones are "
                                "accepted (default 0; inf: until they have ended); a second request to stop ends them "
                                "at once", metavar="SECONDS", ranks=FIRST_RANK, reloadable=True,
                                accepts=lambda value: value >= 0, rule="a number of seconds, at least 0, or inf")
    model_root: list[str] = option(list, "clients may install models from below this directory; repeatable (default: "
                                   "only those that --model names)", section="access", metavar="DIR", ranks=FIRST_RANK)
    share_prefixes: bool = option(False, "all tenants share one prefix cache; otherwise each token, certificate and "
                                  "tenant that an HTTP server names has its own, so that none learns what others "
                                  "asked", section="access", ranks=FIRST_RANK)
    max_message_mib: int = _limit(0, "the largest message that is accepted from a client", implied=16)
    max_requests: int = _limit(0, "how many requests of all clients may wait or run; one with n samples counts as n "
                               "(default: only the limits of the models)")
    max_tenant_requests: int = _limit(0, "how many requests of one tenant may wait or run; a tenant is a token, a "
                                      "certificate, or otherwise a connection")
    prefill_from: list[str] = option(list, "the address of a group that computes long prompts for this one, which "
                                     "takes the spans of its KV cache; repeatable (default: none does)",
                                     metavar="ADDRESS", section="prefill in other groups", ranks=FIRST_RANK)
    prefill_tokens: int = _handover(0, "the least number of tokens of a prompt that are worth it, without those in "
                                    "this group's caches", metavar="N", implied=2048,
                                    accepts=lambda value: value >= 0, rule="a number of tokens, at least 0")
    prefill_timeout: float = _handover(120.0, "compute a prompt here if its spans have not come after this time",
                                       metavar="SECONDS", accepts=lambda value: 0 < value < float("inf"),
                                       rule="a number of seconds above 0")
    prefill_token_file: str = _handover("", "present a token of this file to these groups, with the role door or admin",
                                        metavar="FILE", reads_file=True)
    prefill_tls_ca: str = _handover("", "connect to these groups with TLS and trust these certificates", metavar="PEM",
                                    reads_file=True)
    strict: bool = option(False, "do not serve a model if its memory is on the wrong NUMA nodes", section="placement",
                          ranks=EVERY_RANK)
    isa: str = option("", "the instruction set of CPUs to compute with, such as avx512_vnni; members of a pool resume "
                      "each other's requests only if theirs is equal (default: the fastest)", section="processor",
                      metavar="NAME", ranks=EVERY_RANK, environment="ALLSPARK_ISA",
                      choices=INSTRUCTION_SETS)


def rank_words(values: RankOptions, ranks: str) -> list[str]:
    """The arguments of FIRST_RANK or EVERY_RANK for options that are not at their default."""
    return [word for declared in options_of(RankOptions) if declared.ranks == ranks
            for word in declared.words(getattr(values, declared.name))]


def worker_words(values: WorkerOptions) -> list[str]:
    """The arguments of an HTTP worker for options that are not at their default."""
    return [word for declared in options_of(WorkerOptions) if declared.worker
            for word in declared.words(getattr(values, declared.name))]
