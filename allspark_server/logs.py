"""How all processes of a group log: text for people or JSON for programs, with priorities where the journal reads it."""

from __future__ import annotations

import json
import logging
import os
import sys

FORMATS = ("text", "json")
#: a line for each request that has ended; off unless asked for
REQUESTS = "allspark_server.requests"
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
#: attributes of a record that go into JSON beside the message
_FIELDS = ("request", "model", "tenant", "prompt_tokens", "cached_tokens", "generated_tokens", "queue_seconds",
           "first_token_seconds", "seconds", "reason")


class TextFormatter(logging.Formatter):
    """`who`: the process, such as "rank 0"."""

    def __init__(self, who: str):
        super().__init__(f"%(asctime)s {who} %(levelname)s %(name)s: %(message)s")
        self._journal = "JOURNAL_STREAM" in os.environ

    def format(self, record: logging.LogRecord) -> str:
        """A line, or several with a traceback."""
        text = super().format(record)
        if not self._journal:
            return text
        mark = f"<{_PRIORITIES.get(record.levelno, 6)}>"     # sd-daemon(3)
        return mark + text.replace("\n", "\n" + mark)


class JsonFormatter(TextFormatter):
    """One object a line: time (s since 1970), level, process, logger, message, and what of a request is known."""

    def __init__(self, who: str):
        super().__init__(who)
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        entry = {"time": round(record.created, 6), "level": record.levelname.lower(), "process": self._who,
                 "logger": record.name, "message": record.getMessage()}
        entry |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        line = json.dumps(entry, ensure_ascii=False)
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{line}" if self._journal else line


def set_up(who: str, level: str = "info", form: str = "text", requests: bool = False) -> None:
    """Log to standard error from now on. `requests`: a line for each, too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if form == "json" else TextFormatter)(who))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(REQUESTS).setLevel(logging.INFO if requests else logging.WARNING)


def log_request(name: str, model: str, tenant: str, stat: dict[str, float], reason: str) -> None:
    """A request has ended. `stat`: values of RequestStatInfo, in ms."""
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
