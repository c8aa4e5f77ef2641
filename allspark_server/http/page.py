"""/, a page to try the models and to watch the pool, and /pool, data of that page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .call import Call
from .errors import ApiError

_PAGE = (Path(__file__).parent / "page.html").read_bytes()


def _hashes(element: str) -> bytes:
    """CSP's sources for the page's elements of this name: the hashes of their texts."""
    texts = re.findall(f"<{element}>(.*?)</{element}>".encode(), _PAGE, re.DOTALL)
    return b" ".join(b"'sha256-" + base64.b64encode(hashlib.sha256(text).digest()) + b"'" for text in texts)


#: the page runs its own script alone, loads nothing from elsewhere, and makes no markup of text (trusted types, in the
#: browsers that know them); other pages may not embed it
_HEADERS = [
    (b"content-security-policy", b"; ".join((
        b"default-src 'none'", b"style-src " + _hashes("style"), b"script-src " + _hashes("script"),
        b"connect-src 'self'", b"frame-ancestors 'none'", b"base-uri 'none'", b"form-action 'none'",
        b"require-trusted-types-for 'script'", b"trusted-types 'none'"))),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
_INFO = ("name", "architecture", "max_length", "max_batch", "ranks", "isa", "weight_dtype", "cache_dtype",
         "weight_bytes", "cache_bytes", "chat_format", "sees_images", "sampling_defaults")


async def page(call: Call, _: None) -> None:
    """A page to try the models and to watch the pool; it asks for a key if one is needed."""
    await call.reply(_PAGE, kind=b"text/html; charset=utf-8", headers=_HEADERS)


async def pool(call: Call, _: None) -> None:
    """The groups behind this server, and the load of their models."""
    members = await call.pool.members()
    names = dict.fromkeys(model.name for member in members for model in member.models if model.running)
    models = await asyncio.gather(*(_model(call, name) for name in names))
    await call.reply({"members": [asdict(member) for member in members],
                      "models": [model for model in models if model is not None]})


async def _model(call: Call, name: str) -> dict[str, Any] | None:
    try:
        info, stat = await asyncio.gather(call.pool.info(name), call.pool.stat(name))
    except ApiError:    # the model was released meanwhile
        return None
    return {**{field: getattr(info, field) for field in _INFO}, "stat": asdict(stat)}
