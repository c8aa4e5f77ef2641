"""The API description of the HTTP server, as OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from allspark_client.version import __version__

from .call import Endpoint

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}
#: errors of all endpoints, and further errors of those with a body
_FAILURES = {"401": "No valid key", "403": "The key does not allow this", "503": "The pool cannot serve now"}
_BODY_FAILURES = {
    "400": "A field is wrong; the error names it",
    "404": "There is no such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too many requests wait",
}


def describe(endpoints: list[tuple[str, str, Endpoint]]) -> dict[str, Any]:
    """The description of endpoints, each given with its method and path."""
    forms = {endpoint.form for _, _, endpoint in endpoints if endpoint.form is not None}
    ordered = sorted(forms, key=lambda form: form.__name__)
    schemas, definitions = models_json_schema([(form, "validation") for form in ordered], ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for method, path, endpoint in endpoints:
        paths.setdefault(path, {})[method.lower()] = _operation(path, endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "allspark", "version": __version__,
                 "description": "OpenAI's API, Anthropic's messages and vLLM's additions, before a pool of engines."},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"},
                                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
        },
        "security": [{"key": []}, {"header": []}],
    }


def _operation(path: str, endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {endpoint.kind: {}}
    if endpoint.form is not None and "stream" in endpoint.form.model_fields:
        answer["text/event-stream"] = {}
    failures = dict(_FAILURES) if endpoint.role is not None else {"503": _FAILURES["503"]}
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": (endpoint.handler.__doc__ or "").strip().splitlines()[0],
        "responses": {"200": {"description": "The answer", "content": answer}},
    }
    if endpoint.role is None:
        operation["security"] = []
    if endpoint.form is not None:
        schema = schemas[(endpoint.form, "validation")]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        failures |= _BODY_FAILURES
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        failures["404"] = "There is no such model"
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, text in sorted(failures.items()):
        operation["responses"][status] = {"description": text, "content": error}
    return operation
