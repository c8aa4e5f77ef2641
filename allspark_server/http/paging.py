"""Parts of long lists, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from .call import Call
from .errors import bad_value


def page_limit(call: Call, most: int = 100) -> int:
    """The query's `limit`. Raises ApiError."""
    limit = call.query("limit") or "20"
    if not limit.isdigit() or not 1 <= int(limit[:9]) <= most:
        raise bad_value("limit", f"it is {limit!r:.80}; it must be 1 to {most}")
    return int(limit)


def page_of(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A part of a list in OpenAI's form."""
    return {"object": "list", "data": data, "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None, "has_more": more}
