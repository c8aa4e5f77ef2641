"""Which fields of an HTTP request are honoured, ignored or refused, from the pydantic models and the checks beside
them.

A field is *refused* when the endpoint's own table of refusals names it, *ignored* when it is listed in IGNORED (it
changes no answer), and honoured otherwise; CONDITIONS says what of a honoured field is refused. tests/docs checks that
a listed field is read nowhere, and that every field that is not listed is read.
"""
from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from .markdown import code, table
from .paths import ROOT, import_from_source

INT32_MAX = 2**31 - 1
#: OpenAI's and Anthropic's fields that are accepted and have no effect on an answer, by request class
IGNORED: dict[str, dict[str, str]] = {
    "ChatRequest": {
        "user": "OpenAI only records it",
        "store": "nothing is stored",
        "metadata": "nothing is stored",
        "service_tier": "there is one tier",
        "safety_identifier": "OpenAI only records it",
        "prompt_cache_key": "the prefix cache needs no key; `cache_salt` separates tenants",
        "prompt_cache_retention": "`prefix_cache_ttl` of the model decides",
        "prompt_cache_options": "the prefix cache needs none",
        "spaces_between_special_tokens": "no blanks are added between special tokens",
    },
    "CompletionRequest": {
        "user": "OpenAI only records it",
        "spaces_between_special_tokens": "no blanks are added between special tokens",
    },
    "EmbeddingRequest": {"user": "OpenAI only records it"},
    "ResponsesRequest": {
        "prompt_cache_options": "the prefix cache needs none",
    },
    "MessagesRequest": {
        "cache_control": "every prefix is cached",
        "speed": "there is one speed",
        "user_profile_id": "Anthropic only records it",
        "workspace_id": "Anthropic only records it",
        "metadata": "nothing is stored",
        "service_tier": "there is one tier",
    },
    "TokenizeRequest": {},
    "DetokenizeRequest": {},
    "LoadRequest": {},
    "UnloadRequest": {},
    "BatchRequest": {},
}
#: fields of the Responses API that are only repeated in the answer
REPEATED = ("metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "max_tool_calls")
#: what of a honoured field is refused, or what it means here
CONDITIONS: dict[tuple[str, str], str] = {
    ("ChatRequest", "chat_template"): "needs `--trust-request-chat-template`",
    ("TokenizeRequest", "chat_template"): "needs `--trust-request-chat-template`",
    ("ChatRequest", "modalities"): 'only `["text"]`',
    ("ChatRequest", "verbosity"): "only `medium`",
    ("ChatRequest", "top_logprobs"): "needs `logprobs`",
    ("ChatRequest", "tool_choice"): "needs `tools`, unless it is `none`",
    ("ChatRequest", "parallel_tool_calls"): "needs `tools`",
    ("ChatRequest", "max_tokens"): "not together with `max_completion_tokens`",
    ("ChatRequest", "stream_options"): "needs `stream`",
    ("CompletionRequest", "stream_options"): "needs `stream`",
    ("ChatRequest", "prompt_logprobs"): "not together with `stream`",
    ("CompletionRequest", "prompt_logprobs"): "not together with `stream`",
    ("CompletionRequest", "suffix"): "needs a prompt of text, and a tokenizer with tokens for filling in; not with "
                                      "`echo`",
    ("CompletionRequest", "best_of"): "only equal to `n`",
    ("CompletionRequest", "max_tokens"): "default 16; 0 needs `echo`",
    ("MessagesRequest", "thinking"): "`budget_tokens` has no effect if the model has no reasoning",
    ("EmbeddingRequest", "dimensions"): "only the model's own",
    ("ResponsesRequest", "store"): "has no effect without `--store`: nothing is stored",
    ("ResponsesRequest", "previous_response_id"): "needs `--store`",
    ("ResponsesRequest", "background"): "needs `--store`",
    ("ResponsesRequest", "truncation"): "only `disabled`",
    ("ResponsesRequest", "text"): "`text.verbosity` only `medium`",
    ("ResponsesRequest", "tools"): "only of type `function`: the server runs no tools itself, and calls no MCP servers",
    ("ResponsesRequest", "structured_outputs"): "not together with `text.format`",
    ("ResponsesRequest", "tool_choice"): "needs `tools`, unless it is `none` or `auto`",
    ("ResponsesRequest", "stream_options"): "needs `stream`",
}
_OWN = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "cache_salt", "priority", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "structured_outputs", "min_tokens", "stop_token_ids", "return_token_ids",
        "bad_words", "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens",
        "spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "add_generation_prompt",
        "continue_final_message", "chat_template_kwargs", "chat_template", "pooling", "thinking_token_budget",
        "thinking_budget", "thinking_budget_tokens", "custom_params", "timings_per_token")


def forms() -> Iterator[tuple[str, type]]:
    """Path and request class of every endpoint that takes a body."""
    for _, path, endpoint in _endpoints():
        if endpoint.form is not None and path != "/v1/messages/count_tokens":
            yield path, endpoint.form


def _endpoints() -> list[tuple[str, str, Any]]:
    import_from_source()
    from allspark_server.http import app
    return app._endpoints(None)


def refusals(form: type) -> dict[str, str]:
    """Fields that are refused whatever they hold, with the reason, from the endpoint's own module."""
    from allspark_server.http import chat, messages, responses
    modules = {"ChatRequest": chat, "MessagesRequest": messages, "ResponsesRequest": responses}
    module = modules.get(form.__name__)
    return dict(module._REFUSED) if module else {}


def status_of(form: type, name: str) -> tuple[str, str]:
    """(honoured | ignored | refused, remark) of a field."""
    refused = refusals(form)
    if name in refused:
        return "refused", refused[name]
    if name in IGNORED.get(form.__name__, {}):
        return "ignored", IGNORED[form.__name__][name]
    if form.__name__ == "ResponsesRequest" and name in REPEATED:
        return "ignored", "repeated in the answer"
    remark = CONDITIONS.get((form.__name__, name), "")
    if name in _OWN and form.__name__ != "MessagesRequest":
        remark = f"{remark}{'; ' if remark else ''}this server's own"
    return "honoured", remark


def _type(annotation: Any) -> str:
    """A type as a reader knows it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(a) for a in arguments if a is not type(None)))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "object"
    if annotation is Any:
        return "any"
    names = {str: "text", int: "integer", float: "number", bool: "boolean"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(info: Any) -> str:
    found = []
    for item in info.metadata:
        for name, text in (("ge", "at least {}"), ("gt", "above {}"), ("le", "at most {}"),
                           ("min_length", "length at least {}"), ("max_length", "length at most {}")):
            limit = getattr(item, name, None)
            if limit is not None and abs(limit) < INT32_MAX:
                found.append(text.format(limit))
    return ", ".join(found)


def _parts(annotation: Any, found: dict[str, type]) -> None:
    """Adds the classes of messages that an annotation holds, and those of their fields."""
    if hasattr(annotation, "model_fields"):
        if annotation.__name__ not in found:
            found[annotation.__name__] = annotation
            for info in annotation.model_fields.values():
                _parts(info.annotation, found)
        return
    for argument in get_args(annotation):
        _parts(argument, found)


def _parts_of(form: type) -> str:
    """A table of the classes within a request: what fields each has."""
    found: dict[str, type] = {}
    for info in form.model_fields.values():
        _parts(info.annotation, found)
    rows = []
    for name, part in found.items():
        fields = [f"`{info.alias or field}`{'' if info.is_required() else ' (optional)'}: {_type(info.annotation)}"
                  for field, info in part.model_fields.items() if info.annotation is not type(None)]
        rows.append((f"`{name}`", "; ".join(fields)))
    return f"Parts of it:\n\n{table(('Part', 'Fields'), rows)}" if rows else ""


def fields() -> str:
    """For every endpoint with a body the table of its fields."""
    import_from_source()
    parts = []
    for path, form in forms():
        rows = []
        for name, info in form.model_fields.items():
            status, remark = status_of(form, name)
            remark = "; ".join(filter(None, (remark, info.description)))
            kind = "" if status == "refused" else "; ".join(filter(None, (_type(info.annotation), _limits(info))))
            rows.append((code(name) + (" (required)" if info.is_required() else ""), f"**{status}**", kind, remark))
        order = {"**honoured**": 0, "**ignored**": 1, "**refused**": 2}
        rows.sort(key=lambda row: order[row[1]])
        parts.append(f"### `{path}`\n\n" + table(("Field", "", "Value", "Remark"), rows).replace(r"\*\*", "**"))
        parts.append(_parts_of(form))
    return "\n\n".join(filter(None, parts))


def endpoints() -> str:
    """The endpoints, with the role that a key needs."""
    rows = []
    for method, path, endpoint in [*_endpoints(), ("GET", "/openapi.json", None)]:
        if endpoint is None:
            rows.append((method, code(path), "none", "The OpenAPI description of all endpoints"))
            continue
        summary = (endpoint.handler.__doc__ or "").strip().splitlines()[0]
        rows.append((method, code(path), code(endpoint.role.value) if endpoint.role else "none", summary))
    return table(("Method", "Path", "Role", "What it does"), rows)


def reads(name: str) -> bool:
    """Whether any module of the HTTP server reads a request's field of this name."""
    folder = ROOT / "allspark_server" / "http"
    pattern = re.compile(rf'(?:request|self\._request|form|options|given)\.{name}\b|"{name}"')
    return any(pattern.search(path.read_text()) for path in folder.rglob("*.py"))
