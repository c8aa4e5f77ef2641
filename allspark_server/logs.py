"""The log format of all processes of a group: text or JSON, with priorities for systemd's journal."""

from __future__ import annotations

import json
import logging
import os
import sys

FORMATS = ("text", "json")
#: the logger of ended requests, one line each; off by default
REQUESTS = "allspark_server.requests"
#: the logger of answered HTTP requests, one line each; off by default
HTTP_REQUESTS = "allspark_server.http.requests"
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
#: attributes of a record that JSON has besides the message
_FIELDS = ("request", "model", "tenant", "prompt_tokens", "cached_tokens", "generated_tokens", "queue_seconds",
           "first_token_seconds", "seconds", "reason", "client", "method", "path", "status")


class TextFormatter(logging.Formatter):
    """Formats records as text. `process`: its name in the log, such as "rank 0"."""

    def __init__(self, process: str):
        super().__init__(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")
        self._journal = "JOURNAL_STREAM" in os.environ

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line, followed by its traceback if it has one."""
        text = super().format(record)
        if not self._journal:
            return text
        mark = f"<{_PRIORITIES.get(record.levelno, 6)}>"     # sd-daemon(3)
        return mark + text.replace("\n", "\n" + mark)


class JsonFormatter(TextFormatter):
    """Formats a record as a JSON object in a line: time (Unix time, s), level, process, logger, message, fields."""

    def __init__(self, process: str):
        super().__init__(process)
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line."""
        entry = {"time": round(record.created, 6), "level": record.levelname.lower(), "process": self._process,
                 "logger": record.name, "message": record.getMessage()}
        entry |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        line = json.dumps(entry, ensure_ascii=False)
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{line}" if self._journal else line


def set_up(process: str, level: str = "info", form: str = "text", requests: bool = False) -> None:
    """Log to standard error. `form`: one of FORMATS; `requests`: also log a line for each ended request, of a group or
    of HTTP.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if form == "json" else TextFormatter)(process))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in (REQUESTS, HTTP_REQUESTS):
        logging.getLogger(name).setLevel(logging.INFO if requests else logging.WARNING)


def log_request(name: str, model: str, tenant: str, stat: dict[str, float], reason: str) -> None:
    """Log that a request has ended. `stat`: values of RequestStatInfo, times in ms; `reason`: why it ended."""
    logger = logging.getLogger(REQUESTS)
    if not logger.isEnabledFor(logging.INFO):
        return
    seconds = {key: round(stat[name] / 1e3, 6) for key, name in
               (("queue_seconds", "time_in_queue"), ("first_token_seconds", "time_to_first_token"),
                ("seconds", "finish_time")) if name in stat}
    fields = {"request": name, "model": model, "tenant": tenant, "prompt_tokens": stat["context_token_length"],
              "cached_tokens": stat["context_cached_length"], "generated_tokens": stat["generated_token_length"],
              "reason": reason, **seconds}
    logger.info("request %s ended: %s, %d tokens after %d in %.3f s", name, reason, fields["generated_tokens"],
                fields["prompt_tokens"], seconds.get("seconds", 0.0), extra=fields)


def log_http_request(client: str, method: str, path: str, status: int, seconds: float, request: str, tenant: str
                     ) -> None:
    """Log that an HTTP request was answered, or that its client has gone (status 499). `request`: its x-request-id."""
    logger = logging.getLogger(HTTP_REQUESTS)
    if logger.isEnabledFor(logging.INFO):
        fields = {"client": client, "method": method, "path": path, "status": status, "seconds": round(seconds, 6),
                  "request": request, "tenant": tenant}
        logger.info("%s %s %s: %d in %.3f s, request %s", client, method, ascii(path)[1:-1][:200], status, seconds,
                    request, extra=fields)
