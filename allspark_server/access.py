"""Roles: who may call what over a server group's listeners, and which paths clients may name.

Imports nothing heavy: the launcher checks with it what it is about to start, the service what it is about to open.
"""
from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import TlsConfig

from .engine.adapters import adapter_directory, check_lora

if TYPE_CHECKING:
    from allspark_client.config import AsModelConfig

    from .engine.served_model import ServedModel

logger = logging.getLogger(__name__)

TCP_ADDRESS = "127.0.0.1:50051"


class Role(enum.Enum):
    """What a client may do."""

    READ = "read"           # information and statistics
    GENERATE = "generate"   # that, and requests
    DOOR = "door"           # that, and requests for tenants that it names: an HTTP server in front of the group
    ADMIN = "admin"         # everything

    def includes(self, other: Role) -> bool:
        """Whether who has this role may do what `other` may."""
        return _RANKS[self] >= _RANKS[other]


_RANKS = {role: rank for rank, role in enumerate(Role)}


@dataclass(frozen=True)
class Client:
    """Who a call comes from: what it may do, and whose shares and limits its requests count for. `tenant` is empty
    where nothing tells clients apart but their connections.
    """

    role: Role
    tenant: str = ""

    def tenant_of(self, named: str, connection: str) -> str:
        """The tenant of a request of this client's, which may name one. AllSparkError if it may not."""
        own = self.tenant or connection
        if not named or named == own:
            return own
        if self.role not in (Role.DOOR, Role.ADMIN):
            raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                                f"a request for tenant {named[:80]!r} needs the role {Role.DOOR.value} or "
                                f"{Role.ADMIN.value}; this client's is {self.role.value}")
        return named


# --- tokens ------------------------------------------------------------------------------------------------------


def read_tokens(path: str | os.PathLike) -> dict[str, Role]:
    """The tokens of a file and the role of each.

    One `ROLE TOKEN` a line, roles read, generate, door and admin; blank lines and lines that begin with # do not count.
    A file that holds one token and nothing else is an administrator's. Raises ValueError naming file and line.
    """
    known = ", ".join(role.value for role in Role)
    tokens: dict[str, Role] = {}
    entries = [(number, line.split()) for number, line in enumerate(Path(path).read_text().splitlines(), 1)
               if line.strip() and not line.lstrip().startswith("#")]
    if not entries:
        raise ValueError(f"the token file {path} holds no token; write one line 'ROLE TOKEN' for each, "
                         f"with a role of {known}")
    for number, words in entries:
        where = f"line {number} of the token file {path}"
        roles = {role.value for role in Role}
        if len(words) == 1 and len(entries) == 1 and words[0] not in roles:
            words = [Role.ADMIN.value, *words]
        if len(words) != 2:
            raise ValueError(f"{where} must be 'ROLE TOKEN', with a role of {known}")
        name, token = words
        if name not in roles:       # which may be a token, so it is not shown
            raise ValueError(f"{where} does not begin with a role; known: {known}")
        if not (token.isascii() and token.isprintable()):
            raise ValueError(f"the token in {where} must be of printable ASCII characters")
        if token in tokens:
            raise ValueError(f"{where} has a token that stands in the file already")
        tokens[token] = Role(name)
    if os.stat(path).st_mode & stat.S_IROTH:
        logger.warning("the token file %s can be read by every user of this machine: chmod o= %s", path, path)
    return tokens


# --- listeners -------------------------------------------------------------------------------------------------------


def check_listener(address: str, *, token: bool, tls: bool, client_ca: bool, insecure: bool) -> None:
    """ValueError unless it is safe to serve on `address` with what clients must have. Unix sockets are guarded by
    their mode. TCP needs TLS, with a token or a client's certificate; on this machine alone a token is enough.
    """
    if is_unix(address) or insecure:
        return
    if (tls and (token or client_ca)) or (token and is_loopback(address)):
        return
    lacks = ("clients need neither a token nor a certificate" if not token and not client_ca else
             "the token would cross the network in clear text" if not tls else "")
    raise ValueError(
        f"refusing to serve on {address}: {lacks}. Serve on a Unix socket (--address unix:/path), with a token "
        "(--token-file FILE; beyond this machine with --tls-cert and --tls-key too), to clients' certificates "
        "(--tls-cert, --tls-key and --tls-ca), or, where whoever reaches the port may do everything, with --insecure")


def is_unix(address: str) -> bool:
    """Whether an address is a Unix socket's path."""
    return address.startswith("unix:")


def is_loopback(address: str) -> bool:
    """Whether a host:port is reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_address(guarded: bool) -> str:
    """Where a group serves that was given no address: TCP on this machine when `guarded` (clients need a token or a
    certificate, or the operator wants none), otherwise a Unix socket that only this user can open.
    """
    return TCP_ADDRESS if guarded else f"unix:{_private_directory()}/allspark.sock"


def _private_directory() -> str:
    """$XDG_RUNTIME_DIR, or a directory of this user's in the temporary one. Raises ValueError if that is not safe."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and len(os.fsencode(runtime)) < 80 and _is_private(runtime):
        return runtime
    path = os.path.join(tempfile.gettempdir(), f"allspark-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    if not _is_private(path):
        raise ValueError(f"{path} is not a directory of this user's alone: give --address unix:/path")
    return path


def _is_private(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def socket_mode(text: str) -> int:
    """The mode of "0660". Raises ValueError."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise ValueError(f"socket_mode {text!r} must be an octal mode such as 0600 or 0660")
    return mode


def mode_of(mode: str, group: str) -> int:
    """The mode of Unix sockets that options ask for: this user's alone, or its group's too where one is named."""
    return socket_mode(mode) if mode else 0o660 if group else 0o600


#: s between two looks at whether the token file has changed
TOKEN_LOOK_SECONDS = 1.0


@dataclass
class Access:
    """What clients need, and what they may do with it: the role of their token, where there are tokens; otherwise of
    the way by which they come.
    """

    tokens: Mapping[str, Role] = field(default_factory=dict)
    tls: TlsConfig | None = None
    #: of clients that show a certificate, where there are no tokens
    tls_role: Role = Role.ADMIN
    insecure: bool = False
    #: where the tokens are, instead; read again whenever it changes
    token_file: str | os.PathLike | None = None

    def __post_init__(self) -> None:
        #: how often the tokens have changed
        self.changes = 0
        self._version, self._next_look = _version(self.token_file), 0.0
        self._take(read_tokens(self.token_file) if self.token_file is not None else self.tokens)

    def _take(self, tokens: Mapping[str, Role]) -> None:
        if any(not token for token in tokens):
            raise ValueError("an empty token would let everyone in")
        self.tokens = tokens
        # Digests have one length: comparing them tells nothing of a token.
        self._digests = [(_digest(f"Bearer {token}".encode()), role) for token, role in tokens.items()]

    def look(self) -> int:
        """Reads the token file if it has changed, a second ago at most; returns `changes`. One that cannot be read, or
        holds no token, changes nothing: nobody is let in or shut out by half an edit.
        """
        now = time.monotonic()
        if self.token_file is None or now < self._next_look:
            return self.changes
        self._next_look = now + TOKEN_LOOK_SECONDS
        version = _version(self.token_file)
        if version != self._version:
            self._version = version
            try:
                self._take(read_tokens(self.token_file))
            except OSError as error:
                logger.error("the tokens are as they were: their file cannot be read: %s", error.strerror)
            except ValueError as error:
                logger.error("the tokens are as they were: %s", str(error).replace(f" {self.token_file}", ""))
            else:
                self.changes += 1
                logger.info("the token file was read again: %d tokens", len(self.tokens))
        return self.changes

    def check_listener(self, address: str) -> None:
        """As the function of this name; warns of a listener without protection."""
        check_listener(address, token=bool(self.tokens), tls=self.tls is not None,
                   client_ca=self.tls is not None and self.tls.ca is not None, insecure=self.insecure)
        if not is_unix(address) and not is_loopback(address) and (self.tls is None or not self.guarded):
            logger.warning("whoever reaches %s may %s", address,
                           "read clients' tokens on the way" if self.tokens else "do everything with this group")

    @property
    def guarded(self) -> bool:
        """Whether clients need a token or a certificate."""
        return bool(self.tokens) or (self.tls is not None and self.tls.ca is not None)

    def client(self, context: Any) -> Client | None:
        """Behind a gRPC call; None if it shows no valid token where one is needed."""
        names = b",".join(context.peer_identities() or ()).decode(errors="replace")
        return self.known(dict(context.invocation_metadata() or ()).get("authorization", ""),
                          is_unix(context.peer()), names)

    def known(self, authorization: str | bytes, unix: bool, names: str = "") -> Client | None:
        """Who shows this authorization header, over a Unix socket or not, and these names in a certificate; None if
        there is no such token where one is needed.
        """
        if self._digests:
            self.look()
            return self.bearer(authorization)
        if self.tls is not None and self.tls.ca is not None and not unix:
            return Client(self.tls_role, f"certificate:{names[:200]}" if names else "")
        return Client(Role.ADMIN)

    def bearer(self, header: str | bytes) -> Client | None:
        """Who shows this authorization header; None if there is no such token."""
        digest, role = _digest(header.encode() if isinstance(header, str) else header), None
        for expected, its_role in self._digests:    # all of them: the time does not tell which one it was
            if hmac.compare_digest(digest, expected):
                role = its_role
        return Client(role, f"token:{digest.hex()[:16]}") if role is not None else None


def _version(path: str | os.PathLike | None) -> tuple[int, ...]:
    """What changes with a file."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev) if found is not None else ()


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()


# --- paths -------------------------------------------------------------------------------------------------------


class ModelRoots:
    """Which paths clients may name: those of the models that the operator named, and what lies below a root.

    Links are resolved first, those inside of a checkpoint too. Whoever can write below a root is trusted not to
    exchange files meanwhile.
    """

    def __init__(self, roots: Iterable[str | os.PathLike] = (), models: Iterable[AsModelConfig] = ()):
        """`roots`: directories, "/" for no limit; ValueError for one that is not there. `models`: the operator's."""
        self._roots = []
        for root in roots:
            if not os.path.isdir(root):
                raise ValueError(f"--model-root {root}: there is no such directory")
            self._roots.append(os.path.realpath(root))
        named = [Path(path) for config in models for _, path in _paths(config)]
        beside = [path.with_suffix(".asparam") for path in named if path.suffix == ".asgraph"]
        self._named = {os.path.realpath(path) for path in named + beside}

    @property
    def everywhere(self) -> bool:
        """Whether clients may name any path."""
        return "/" in self._roots

    def check_model(self, config: AsModelConfig) -> None:
        """Raises AllSparkError (denied) unless all paths of a model may be opened."""
        for name, path in _paths(config):
            self.check(name, path)
        for lora in config.lora_names:
            self.check_adapter(lora, config)

    def check_load(self, models: Iterable[ServedModel], name: str, lora: str) -> None:
        """Raises AllSparkError (denied) unless an adapter may be loaded for the model of that name, if there is one."""
        for model in models:
            if model.name == name:
                self.check_adapter(lora, model.config)

    def check_adapter(self, lora: str, config: AsModelConfig) -> None:
        """Raises AllSparkError (denied) unless an adapter's directory may be opened: those below a model's that the
        operator named may.
        """
        directory, model = adapter_directory(config, check_lora(lora)), os.path.realpath(config.model_path)
        if model not in self._named or not _inside(os.path.realpath(directory), model):
            self.check("lora_name", directory)

    def check(self, name: str, path: str) -> None:
        """Raises AllSparkError (denied) unless `path`, given by a client as `name`, may be opened."""
        resolved = os.path.realpath(path)
        if resolved in self._named:
            return
        within = [root for root in self._roots if _inside(resolved, root)]
        if not within:
            raise _denied(f"{name}={path!r} is outside of the directories that clients of this server may name")
        for part in _parts(resolved):
            if not any(_inside(os.path.realpath(part), root) for root in self._roots):
                raise _denied(f"{name}={path!r}: {os.path.basename(part)!r} is a link to outside of the "
                              "directories that clients of this server may name")


def _denied(why: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED, f"{why}; its --model-root DIR allows more")


def _paths(config: AsModelConfig) -> Iterator[tuple[str, str]]:
    for name in ("model_path", "weights_path", "draft_model", "host_cache_dir"):
        if path := os.fspath(getattr(config, name)):
            yield name, path


def _inside(path: str, directory: str) -> bool:
    return os.path.commonpath((path, directory)) == directory


def _parts(path: str) -> Iterator[str]:
    """What loading `path` may open besides it: links to files in its directory, and the folders of a tokenizer."""
    folders = [Path(path)] if os.path.isdir(path) else [Path(path).parent, Path(path).with_suffix(".tokenizer")]
    for folder in folders:
        for part in (folder, folder / "additional_chat_templates"):
            yield str(part)
            try:
                with os.scandir(part) as entries:
                    yield from (entry.path for entry in entries if entry.is_symlink() and not entry.is_dir())
            except OSError:     # it is not there, or cannot be read: then not by the loader either
                continue
