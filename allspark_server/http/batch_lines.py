"""Lines of batches, in OpenAI's form: {"custom_id": "a", "method": "POST", "url": "/v1/…", "body": {…}}."""

from __future__ import annotations

import json
from typing import Any

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_LINE = 64 << 20


class NoRequest(ValueError):
    """A line that is not a request, with its custom_id if it has one."""

    def __init__(self, message: str, custom_id: str | None = None):
        super().__init__(message)
        self.custom_id = custom_id


def parse_line(line: bytes) -> tuple[str, str, dict[str, Any]]:
    """(custom_id, url, body) of a line. Raises NoRequest."""
    if len(line) > MAX_LINE:
        raise NoRequest(f"the line has {len(line)} bytes; at most {MAX_LINE} are taken")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NoRequest(f"the line is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise NoRequest(f"the line holds a {type(entry).__name__}, not an object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise NoRequest(f"custom_id is {custom_id!r:.80}; it must be text that names the line")
    method, url, body = entry.get("method", "POST"), entry.get("url"), entry.get("body")
    if method != "POST":
        raise NoRequest(f"method is {method!r:.80}; it must be 'POST'", custom_id)
    if url not in ENDPOINTS:
        raise NoRequest(f"url is {url!r:.80}; it must be one of {', '.join(ENDPOINTS)}", custom_id)
    if not isinstance(body, dict):
        raise NoRequest(f"body is {type(body).__name__}, not an object", custom_id)
    if body.get("stream"):
        raise NoRequest("body.stream must not be set: a batch's answers come whole", custom_id)
    return custom_id, url, body
