"""`allspark http`: an HTTP server in front of a group or a pool."""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import textwrap
from dataclasses import replace
from pathlib import Path

from allspark_server.options import options_of
from allspark_server.signals import Signals

from ..group.http_server import HttpOptions, HttpServer, http_server
from ..group.notify import Notifier
from ..options import UNIT_KEY, add_flags, changed, from_table, given_flags
from ..output import write_whole
from ..pool.members import default_address, environment_addresses
from ..tables import Table
from . import AddCommand

logger = logging.getLogger(__name__)

EPILOG = """\
Answers /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/models, /v1/messages (Anthropic's),
/tokenize, /detokenize, /health, /metrics and /openapi.json. The server keeps no state: run any number of them,
anywhere. Groups may come and go: requests continue on other groups, as those of any client do. allspark serve --http
starts the same server beside a group.

Clients need a key of the token file, sent as 'Authorization: Bearer KEY' or 'x-api-key: KEY'. The rules for addresses
are those of allspark serve.

A request to stop closes the socket, so that load balancers choose another server, and lets responses continue for
--drain-limit. With --drain-delay, /health says so for a while before. With --config, SIGHUP reads the file again and
replaces the workers: connections are not lost, and the responses of the old ones may end. The certificate, its key and
the key file are read again when they change.

examples:
  allspark http --address unix:/run/allspark/a --insecure
  allspark http --address 10.0.0.1:50051 --address 10.0.0.2:50051 --pool-token-file group-token \\
      --http 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --token-file keys --workers 4 --drain-limit 60
  allspark http --config http.toml

exit status: 0 after a requested stop; 78 if every further start would fail until the options, or files that they name,
are changed.

keys of the configuration file (TOML or JSON): address is where HTTP is served, pool the list of groups; the others are
named as the flags are:
"""
_LOOK_SECONDS, _DRAIN_LOOK_SECONDS = 0.2, 0.05


def add_command(command: AddCommand) -> None:
    """Adds `http` to the parser."""
    keys = textwrap.fill(", ".join(declared.name for declared in options_of(HttpOptions)), 118, initial_indent="  ",
                         subsequent_indent="  ")
    p = command("http", _http, "serve OpenAI's API over HTTP, in front of a group or a pool", epilog=EPILOG + keys)
    p.add_argument("--config", metavar="FILE", help="options from a file; flags take precedence over it")
    p.add_argument("--report-file", metavar="FILE", help=argparse.SUPPRESS)
    p.add_argument("--ready-file", metavar="FILE", help="a JSON file that is written once a worker answers")
    add_flags(p, HttpOptions)


def _options(parsed: argparse.Namespace) -> HttpOptions:
    options = HttpOptions()
    if parsed.config:
        table = Table.read(parsed.config)
        options = from_table(HttpOptions, table.values, table.location())
    options = replace(options, **given_flags(HttpOptions, parsed))
    options.pool = options.pool or environment_addresses() or [default_address()]
    return options


def _http(parsed: argparse.Namespace) -> int:
    """Runs the command. Like every service of systemd it reports when it is ready, reloads and stops."""
    options, notifier = _options(parsed), Notifier.from_environment(os.environ)
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:       # nohup ignores it
        numbers.append(signal.SIGHUP)
    with contextlib.closing(Signals(*numbers)) as signals, http_server(options) as server:
        ready = draining = False
        _report(parsed.report_file, options)
        while not (draining and server.wait(0.0)):
            for number in signals.wait(_DRAIN_LOOK_SECONDS if draining else _LOOK_SECONDS):
                if number == signal.SIGHUP and parsed.config:
                    _reload(parsed, server, notifier)
                else:
                    notifier.stopping()
                    server.drain()
                    draining = True
            if not ready and server.serves:
                ready = True
                notifier.ready()
                if parsed.ready_file:
                    write_whole(Path(parsed.ready_file), json.dumps({"address": server.address}) + "\n")
            if server.watched or draining:
                notifier.alive()
    if parsed.ready_file:
        Path(parsed.ready_file).unlink(missing_ok=True)
    return 0


def _reload(parsed: argparse.Namespace, server: HttpServer, notifier: Notifier) -> None:
    notifier.reloading()
    try:
        server.reload(_options(parsed))
        _report(parsed.report_file, server.options)
    except (ValueError, TypeError, OSError) as error:
        logger.error("the configuration stays as it was: %s", error)
    notifier.ready()


def _report(file: str | None, options: HttpOptions) -> None:
    """Reports what the server runs with: to `allspark pool apply`, which compares it with what it should be."""
    if not file:
        return
    report = {"options": changed(options), UNIT_KEY: os.environ.get(UNIT_KEY, "")}
    try:
        write_whole(Path(file), json.dumps(report, indent=1) + "\n", 0o644)
    except OSError as error:
        logger.error("the report %s cannot be written: %s", file, error.strerror)
