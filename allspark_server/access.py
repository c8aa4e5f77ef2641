"""Roles: who may call what over a server group's listeners, and which paths clients may name.

It imports nothing heavy: the launcher uses it to check options before it starts processes, and the service before it
listens.
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

#: characters that a token should have: 16 letters and digits cannot be guessed
SAFE_TOKEN = 16
TCP_ADDRESS = "127.0.0.1:50051"
_ADDRESS = "http:"  # of tenants that an HTTP server without keys names: an address follows


class Role(enum.Enum):
    """What a client may do. Each role includes the ones before it."""

    READ = "read"           # information and statistics
    GENERATE = "generate"   # also requests
    DOOR = "door"           # also requests for tenants that it names: for an HTTP server in front
    ADMIN = "admin"         # everything

    def includes(self, other: Role) -> bool:
        """Whether this role allows everything that `other` allows."""
        return _RANKS[self] >= _RANKS[other]


_RANKS = {role: rank for rank, role in enumerate(Role)}


@dataclass(frozen=True)
class RateLimit:
    """How much a token may ask an HTTP server for in a minute; 0: any number."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Client:
    """The client of a call: its role, and the tenant whose shares and limits its requests count for.

    `tenant` is empty if clients differ only by their connections. `limit`: None without a limit. `models`: those that
    it may use; None: all.
    """

    role: Role
    tenant: str = ""
    limit: RateLimit | None = None
    models: frozenset[str] | None = None

    def tenant_of(self, named: str, connection: str) -> str:
        """The tenant of a request that names `named` or "". Raises AllSparkError if the role does not allow it."""
        own = self.tenant or connection
        if not named or named == own:
            return own
        if self.role not in (Role.DOOR, Role.ADMIN):
            raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                                f"a request for tenant {named[:80]!r} needs the role {Role.DOOR.value} or "
                                f"{Role.ADMIN.value}; this client's is {self.role.value}")
        return named

    def may_use(self, *names: str) -> bool:
        """Whether it may use a model with these names."""
        return self.models is None or not self.models.isdisjoint(names)

    def check_model(self, name: str) -> None:
        """Raises AllSparkError unless it may use a model."""
        if not self.may_use(name):
            raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                                f"this client's token does not allow model {name!r}; allowed: "
                                f"{', '.join(sorted(self.models or ()))}")

    def cache_scope(self, named: str) -> str:
        """The tenant whose requests alone share cached prefixes with one that names `named` or "". Clients that are
        known by a connection or an address only have the scope "", which they share.
        """
        tenant = named or self.tenant
        return "" if tenant.startswith(_ADDRESS) else tenant


# --- tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grant:
    """What a token allows; see Client."""

    role: Role
    limit: RateLimit | None = None
    models: frozenset[str] | None = None


def read_tokens(path: str | os.PathLike[str]) -> dict[str, Role]:
    """The tokens of a file, and the role of each; see `read_grants`."""
    return {token: grant.role for token, grant in read_grants(path).items()}


def read_grants(path: str | os.PathLike[str]) -> dict[str, Grant]:
    """The tokens of a file, and what each allows.

    Each line is `ROLE TOKEN` with a role of read, generate, door or admin, perhaps with requests_per_minute=N,
    tokens_per_minute=N and models=NAME,NAME,… behind it; blank lines and lines that begin with # are skipped. A file
    with a single token and no role gives it the role admin. Raises ValueError naming file and line.
    """
    known = ", ".join(role.value for role in Role)
    tokens: dict[str, Grant] = {}
    short = []
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
        if len(words) < 2:
            raise ValueError(f"{where} must be 'ROLE TOKEN', with a role of {known}")
        name, token, *options = words
        if name not in roles:       # not shown, since it may be a token
            raise ValueError(f"{where} does not begin with a role; known: {known}")
        if not (token.isascii() and token.isprintable()):
            raise ValueError(f"the token in {where} must be of printable ASCII characters")
        if token in tokens:
            raise ValueError(f"{where} has a token that an earlier line has already")
        tokens[token] = _grant(Role(name), options, where)
        if len(token) < SAFE_TOKEN:
            short.append(str(number))
    if short:
        logger.warning("the token file has tokens of fewer than %d characters, which can be guessed (line %s): make "
                       "tokens with 'openssl rand -hex 32'", SAFE_TOKEN, ", ".join(short))
    if os.stat(path).st_mode & stat.S_IROTH:
        logger.warning("the token file %s can be read by every user of this machine: chmod o= %s", path, path)
    return tokens


def _grant(role: Role, words: list[str], where: str) -> Grant:
    """What a token allows, with the words behind it."""
    found: dict[str, int] = {}
    models: frozenset[str] | None = None
    for word in words:
        name, _, value = word.partition("=")
        if name == "models" and models is None:
            models = frozenset(filter(None, value.split(",")))
            if not models or role not in (Role.READ, Role.GENERATE):
                raise ValueError(f"models in {where} must name the models that a token of the role read or generate "
                                 "may use, with commas between them")
            continue
        unit = name.removesuffix("_per_minute")
        if unit not in ("requests", "tokens") or name == unit or unit in found:     # not shown: it may be a token
            raise ValueError(f"{where} must be 'ROLE TOKEN', and may go on with requests_per_minute=N, "
                             "tokens_per_minute=N and models=NAME,NAME")
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 1 << 53):
            raise ValueError(f"{name} in {where} must be a whole number, at least 1")
        found[unit] = int(value)
    return Grant(role, RateLimit(**found) if found else None, models)


def pool_token(path: str | None) -> tuple[str, bool]:
    """The token that is shown to groups, and whether it may name tenants.

    The file's first token of the role door is taken; without one the first of admin, then the first of generate.
    """
    tokens = read_tokens(path) if path else {}
    for role in (Role.DOOR, Role.ADMIN, Role.GENERATE):
        for token, its_role in tokens.items():
            if its_role is role:
                return token, role is not Role.GENERATE
    if tokens:
        raise ValueError(f"the token file {path} has no token of the role door, admin or generate")
    return "", True


# --- listeners ---------------------------------------------------------------------------------------------------


def check_listener(address: str, *, token: bool, tls: bool, client_ca: bool, insecure: bool) -> None:
    """Raises ValueError unless it is safe to listen on `address` with the protection that the other arguments name.

    Unix sockets are protected by their mode. TCP needs TLS with tokens or client certificates; on a loopback address
    tokens are enough. `insecure` allows everything.
    """
    if is_unix(address) or insecure:
        return
    if (tls and (token or client_ca)) or (token and is_loopback(address)):
        return
    reason = ("clients need neither a token nor a certificate" if not token and not client_ca else
             "the token would cross the network in clear text" if not tls else "")
    raise ValueError(
        f"refusing to serve on {address}: {reason}. Serve on a Unix socket (--address unix:/path), with a token "
        "(--token-file FILE; beyond this machine with --tls-cert and --tls-key too), to clients' certificates "
        "(--tls-cert, --tls-key and --tls-ca), or, if everyone who reaches the port may do everything, with --insecure")


def is_unix(address: str) -> bool:
    """Whether an address is the path of a Unix socket."""
    return address.startswith("unix:")


def is_loopback(address: str) -> bool:
    """Whether a host:port can be reached only from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_address(guarded: bool) -> str:
    """The address of a group for which none was given.

    It is a loopback TCP address if `guarded` (clients need a token or a certificate, or --insecure was given),
    otherwise a Unix socket that only this user can open.
    """
    return TCP_ADDRESS if guarded else f"unix:{_private_directory()}/allspark.sock"


def _private_directory() -> str:
    """$XDG_RUNTIME_DIR, or this user's directory in the temporary one. Raises ValueError if others can use that."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and len(os.fsencode(runtime)) < 80 and _is_private(runtime):
        return runtime
    path = os.path.join(tempfile.gettempdir(), f"allspark-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    if not _is_private(path):
        raise ValueError(f"{path} is not a directory that only this user can open: give --address unix:/path")
    return path


def _is_private(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def socket_mode(text: str) -> int:
    """The mode that a text such as "0660" means. Raises ValueError."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise ValueError(f"socket_mode {text!r} must be an octal mode such as 0600 or 0660")
    return mode


def mode_of(mode: str, group: str) -> int:
    """The mode of Unix sockets by the options: `mode`, or by default for this user, and for `group` if it is set."""
    return socket_mode(mode) if mode else 0o660 if group else 0o600


#: how often the token file is checked for changes, s
TOKEN_LOOK_SECONDS = 1.0


@dataclass
class Access:
    """What clients must show, and the role that they then have.

    With tokens, a client has the role of its token. Otherwise clients with a certificate have `tls_role`, and clients
    of Unix sockets and of unprotected listeners are admin.
    """

    tokens: Mapping[str, Role] = field(default_factory=dict)
    tls: TlsConfig | None = None
    #: the role of clients with a certificate, if there are no tokens
    tls_role: Role = Role.ADMIN
    insecure: bool = False
    #: the file of the tokens, instead of `tokens`; it is read again when it changes
    token_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        #: how often the tokens have changed
        self.changes = 0
        self._version, self._next_look = file_version(self.token_file), 0.0
        given = {token: Grant(role) for token, role in self.tokens.items()}
        self._take(read_grants(self.token_file) if self.token_file is not None else given)

    def _take(self, tokens: Mapping[str, Grant]) -> None:
        if any(not token for token in tokens):
            raise ValueError("an empty token would admit everyone")
        self.tokens = {token: grant.role for token, grant in tokens.items()}
        # Digests have the same length: the time of a comparison reveals nothing about a token.
        self._digests = [(_digest(f"Bearer {token}".encode()), grant) for token, grant in tokens.items()]

    def look(self) -> int:
        """Read the token file again if it has changed, checked once a second; returns `changes`.

        A file that cannot be read, or has no token, changes nothing: half an edit neither admits nor excludes anyone.
        """
        now = time.monotonic()
        if self.token_file is None or now < self._next_look:
            return self.changes
        self._next_look = now + TOKEN_LOOK_SECONDS
        version = file_version(self.token_file)
        if version != self._version:
            self._version = version
            try:
                self._take(read_grants(self.token_file))
            except OSError as error:
                logger.error("the tokens stay as they were: their file cannot be read: %s", error.strerror)
            except ValueError as error:
                logger.error("the tokens stay as they were: %s", str(error).replace(f" {self.token_file}", ""))
            else:
                self.changes += 1
                logger.info("the token file was read again: %d tokens", len(self.tokens))
        return self.changes

    def check_listener(self, address: str) -> None:
        """As the function check_listener; also warns about listeners without protection."""
        check_listener(address, token=bool(self.tokens), tls=self.tls is not None,
                       client_ca=self.tls is not None and self.tls.ca is not None, insecure=self.insecure)
        if not is_unix(address) and not is_loopback(address) and (self.tls is None or not self.guarded):
            logger.warning("everyone who reaches %s can %s", address,
                           "read the tokens of clients" if self.tokens else "do everything with this group")

    @property
    def guarded(self) -> bool:
        """Whether clients need a token or a certificate."""
        return bool(self.tokens) or (self.tls is not None and self.tls.ca is not None)

    def client(self, context: Any) -> Client | None:
        """The client of a gRPC call; None if it needs a token and shows no valid one."""
        names = b",".join(context.peer_identities() or ()).decode(errors="replace")
        return self.known(dict(context.invocation_metadata() or ()).get("authorization", ""),
                          is_unix(context.peer()), names)

    def known(self, authorization: str | bytes, unix: bool, names: str = "") -> Client | None:
        """The client with this authorization header; None if it needs a token and shows no valid one.

        `unix`: whether it uses a Unix socket; `names`: the names in its certificate.
        """
        if self._digests:
            self.look()
            return self.bearer(authorization)
        if self.tls is not None and self.tls.ca is not None and not unix:
            return Client(self.tls_role, f"certificate:{names[:200]}" if names else "")
        return Client(Role.ADMIN)

    def bearer(self, header: str | bytes) -> Client | None:
        """The client with this authorization header; None if there is no such token."""
        digest, found = _digest(header.encode() if isinstance(header, str) else header), None
        for expected, known in self._digests:   # all of them: the time does not reveal which one matched
            if hmac.compare_digest(digest, expected):
                found = known
        return Client(found.role, _tenant(digest), found.limit, found.models) if found is not None else None

    def models_of(self, tenant: str) -> frozenset[str] | None:
        """The models that a tenant's token allows now, None: all. For requests that are sent later than they came."""
        return next((grant.models for digest, grant in self._digests if _tenant(digest) == tenant), None)


def file_version(path: str | os.PathLike[str] | None) -> tuple[int, ...]:
    """Values that differ once a file has changed."""
    try:
        status = os.stat(path) if path is not None else None
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev) if status is not None else ()


def _tenant(digest: bytes) -> str:
    return f"token:{digest.hex()[:16]}"


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()


# --- paths -------------------------------------------------------------------------------------------------------


class ModelRoots:
    """The paths that clients may name: those of the operator's models, and everything below a root directory.

    Symbolic links are resolved first, also those in a checkpoint. Users who can write below a root are trusted not to
    replace files between the check and the use.

    Args:
        roots: directories; "/" allows every path. Raises ValueError for one that does not exist.
        models: the operator's models.
    """

    def __init__(self, roots: Iterable[str | os.PathLike[str]] = (), models: Iterable[AsModelConfig] = ()):
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
        """Raises AllSparkError (denied) unless an adapter may be loaded for the model `name`, if that is installed."""
        for model in models:
            if model.name == name:
                self.check_adapter(lora, model.config)

    def check_adapter(self, lora: str, config: AsModelConfig) -> None:
        """Raises AllSparkError (denied) unless an adapter's directory may be opened.

        Directories inside of the checkpoints of the operator's models may.
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
    for name in ("model_path", "weights_path", "draft_model", "host_cache_dir", "chat_template"):
        if path := os.fspath(getattr(config, name)):
            yield name, path


def _inside(path: str, directory: str) -> bool:
    return os.path.commonpath((path, directory)) == directory


def _parts(path: str) -> Iterator[str]:
    """Other paths that loading `path` may open: symbolic links beside it, and the directories of its tokenizer."""
    folders = [Path(path)] if os.path.isdir(path) else [Path(path).parent, Path(path).with_suffix(".tokenizer")]
    for folder in folders:
        for part in (folder, folder / "additional_chat_templates"):
            yield str(part)
            try:
                with os.scandir(part) as entries:
                    yield from (entry.path for entry in entries if entry.is_symlink() and not entry.is_dir())
            except OSError:     # missing or not readable: the loader cannot open it either
                continue
