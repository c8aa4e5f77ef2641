"""`allspark http`: an HTTP server in front of a group or a pool."""
from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path

from allspark_server.options import add_arguments, options_of

from ..group.http_server import HttpOptions, http_server
from ..output import write_whole
from ..pool.members import default_address, environment_addresses
from . import AddCommand

EPILOG = """\
Answers /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/models, /v1/messages (Anthropic's),
/tokenize, /detokenize, /health, /metrics and /openapi.json. The server keeps no state: run any number of them,
anywhere. Groups may come and go: requests continue on other groups, as those of any client do. allspark serve --http
starts the same server beside a group.

Clients need a key of the token file, sent as 'Authorization: Bearer KEY' or 'x-api-key: KEY'. The rules for addresses
are those of allspark serve.

examples:
  allspark http --address unix:/run/allspark/a --insecure
  allspark http --address 10.0.0.1:50051 --address 10.0.0.2:50051 --pool-token-file group-token \\
      --http 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --token-file keys --workers 4"""
#: its workers log as text
_FLAGS = [declared for declared in options_of(HttpOptions) if declared.name != "log_format"]


def add_command(command: AddCommand) -> None:
    """Adds `http` to the parser."""
    p = command("http", _http, "serve OpenAI's API over HTTP, in front of a group or a pool", epilog=EPILOG)
    p.add_argument("--ready-file", metavar="FILE", help="a JSON file that is written once connections are accepted")
    add_arguments(p, _FLAGS, lambda declared: declared.default)


def _http(parsed: argparse.Namespace) -> int:
    options = HttpOptions(**{declared.name: getattr(parsed, declared.name) for declared in _FLAGS})
    options.pool = options.pool or environment_addresses() or [default_address()]
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with http_server(options) as running:
        if parsed.ready_file:
            write_whole(Path(parsed.ready_file), json.dumps({"address": running.address}) + "\n")
        stop.wait()
    return 0
