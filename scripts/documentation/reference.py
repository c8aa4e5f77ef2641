"""Reference tables that are made from the code when the site is built.

A page asks for one by a line `<!-- generated: NAME -->`; `render(NAME)` returns its Markdown.
"""
from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from . import figures, http_fields
from .markdown import cell, code, fenced, table
from .paths import import_from_source

# --- commands ----------------------------------------------------------------------------------------------------


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command of `allspark` with its parser, such as ("allspark pool install", …), in the order of --help."""
    import_from_source()
    from allspark_launch.cli import build_parser
    yield from _with_subcommands("allspark", build_parser())


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _with_subcommands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for word, child in _subcommands(parser).items():
        yield from _with_subcommands(f"{name} {word}", child)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help text of an option, with its choices and default filled in."""
    if action.help is None:
        text = ""
    else:
        values = {**vars(action), "prog": parser.prog}
        text = action.help % {k: getattr(v, "__name__", v) for k, v in values.items() if v is not argparse.SUPPRESS}
    if action.choices:
        text = f"{text}{'; ' if text else ''}one of {', '.join(code(choice) for choice in action.choices)}"
    return text


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return code(action.metavar or action.dest)
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(code(option + value) for option in action.option_strings)


def _summary(parser: argparse.ArgumentParser) -> str:
    """The first sentence of a command's description."""
    return re.split(r"(?<=\.)\s", " ".join((parser.description or "").split()))[0]


def commands() -> str:
    """Every command with its options."""
    parts = []
    for name, parser in parsers():
        if _subcommands(parser):
            continue
        depth = "##" if name.count(" ") < 2 else "###"
        options = [(_names(action), _help(parser, action)) for action in parser._actions
                   if action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)]
        parts.append(f"{depth} `{name}`\n\n{cell(_summary(parser))}")
        if "\n" in (parser.description or ""):
            parts.append(fenced(parser.description or ""))
        if options:
            parts.append(table(("Option", "Meaning"), options))
        if parser.epilog:
            parts.append(fenced(parser.epilog))
    return "\n\n".join(parts)


def commands_overview() -> str:
    """Every command in one line."""
    rows = []
    for name, parser in parsers():
        if not _subcommands(parser):
            rows.append((f"[`{name}`](#{name.replace(' ', '-')})", _summary(parser)))
    return table(("Command", "What it does"), rows)


# --- fields of dataclasses ---------------------------------------------------------------------------------------


def field_comments(kind: type) -> dict[str, str]:
    """The `#:` comments, or trailing `#` comments, of a class body's fields, by field name."""
    found: dict[str, str] = {}
    pending: list[str] = []
    for line in textwrap.dedent(inspect.getsource(kind)).splitlines()[1:]:
        text = line.strip()
        if text.startswith("#:"):
            pending.append(text[2:].strip())
            continue
        if match := re.match(r" {4}(\w+)\s*(?::[^=]+)?=?", line):
            trailing = re.search(r"\s#:?\s+(.*)$", line)
            name = match[1]
            if pending or trailing:
                found.setdefault(name, " ".join([*pending, *([trailing[1]] if trailing else [])]))
        if text:
            pending = []
    return found


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    value = getattr(value, "default", value) if type(value).__name__.endswith("Field") else value
    if isinstance(value, enum.Enum):
        return code(value.name)
    return code(repr(value))


def _value_default(kind: type, name: str) -> str:
    """The default as an instance has it: the checked configs keep theirs in descriptors."""
    value = getattr(kind(), name)
    return code(value.name if isinstance(value, enum.Enum) else repr(value))


def config_fields(kind: type) -> str:
    """A table of a configuration class: field, type, default, meaning."""
    comments = field_comments(kind)
    rows = []
    for field in dataclasses.fields(kind):
        try:
            default = _value_default(kind, field.name)
        except (TypeError, AttributeError):
            default = _default(field)
        rows.append((code(field.name), code(field.type), default, comments.get(field.name, "")))
    return table(("Field", "Type", "Default", "Meaning"), rows)


def _client_config(name: str) -> Callable[[], str]:
    def render_it() -> str:
        import_from_source()
        from allspark_client import config
        return config_fields(getattr(config, name))
    return render_it


# --- configuration of a group ------------------------------------------------------------------------------------


def group_keys() -> list[tuple[str, str, str, str, str]]:
    """Key, flag, type, default and meaning of every key of `allspark serve --config`."""
    import_from_source()
    from allspark_launch.options import GroupOptions
    from allspark_server.options import options_of
    rows = []
    for declared in options_of(GroupOptions):
        flags = ", ".join(code(flag) for flag in (declared.flag, *declared.aliases)) if declared.help else ""
        meaning = declared.help
        if declared.choices:
            meaning += f"; one of {', '.join(code(choice) for choice in declared.choices)}"
        if declared.environment:
            meaning += f"; without it, {code('$' + declared.environment)}"
        if declared.reloadable:
            meaning += "; takes effect on SIGHUP"
        rows.append((code(declared.name), flags, code(declared.kind), code(repr(declared.effective_default)), meaning))
    return rows


def group_configuration() -> str:
    """The keys of a group's configuration file."""
    return table(("Key", "Flag", "Type", "Default", "Meaning"), group_keys())


# --- metrics -----------------------------------------------------------------------------------------------------


def _rank_sample() -> dict[str, Any]:
    return {"steps": 1, "step_seconds": 1.0, "exchange_seconds": 0.5, "wait_seconds": 0.1, "bytes_on_node": {0: 1},
            "misplaced_bytes": 0, "gpu": {"index": 0, "total": 2, "free": 1}, "expert_messages": 1, "expert_rows": 1,
            "expert_hits": 1, "expert_uses": 2}


class _NoModel:
    """What the collector of a group asks an installed model for."""

    name = "m"

    def __init__(self) -> None:
        from allspark_client import AsEngineStat, AsModelConfig, ModelInfo
        from allspark_server.engine.adapters import Adapter
        from allspark_server.engine.handover import HandoverCounters
        from allspark_server.engine.statistics import Timings
        from allspark_server.scheduler import Counters

        self._stat, self.timings, self.info, self.config = AsEngineStat(), Timings(), ModelInfo(), AsModelConfig()
        self.scheduler = type("Scheduler", (), {"counters": Counters()})()
        self.handover = HandoverCounters()
        self.adapters, self.live = [Adapter("a", "", 0, "")], set()

    def stat(self) -> Any:
        """Empty counters."""
        return self._stat


def metric_families() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Name -> (type, labels, text) of every metric, as Prometheus sees it: of a group, and of the HTTP server."""
    import_from_source()
    from prometheus_client.parser import text_string_to_metric_families

    from allspark_server import metrics as group_metrics
    from allspark_server.http import metrics as http_metrics
    engine = type("NoEngine", (), {"failures": lambda self: [], "served_models": lambda self: [_NoModel()]})()
    group = group_metrics.render(engine, {"ranks": [_rank_sample()]}, requests=0, draining=False,
                                 certificate_expires=1.0)
    server = http_metrics.Metrics()
    server.request("chat", 200, 0.1)
    server.generated("m", 1, 1, 1, 0.1)
    server.certificate(1.0)
    texts = [http_metrics.of_members({"a": group}).decode(), server.text().decode()]
    found = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if not name.endswith("_created"):
                found[name] = (family.type, tuple(sorted(labels)), family.documentation)
    return dict(sorted(found.items()))


def metrics() -> str:
    """The table of metrics."""
    return table(("Metric", "Type", "Labels", "Meaning"),
                 [(code(name), kind, ", ".join(map(code, labels)), text)
                  for name, (kind, labels, text) in metric_families().items()])


# --- Python ------------------------------------------------------------------------------------------------------


def _signature(function: Any, name: str) -> str:
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        text = "(…)"
    text = re.sub(r"\((?:self|cls)(?:, )?", "(", text, count=1)
    return f"{name}{re.sub('<function [^>]*>+', '…', text.replace(chr(39), ''))}"


def _paragraphs(doc: str | None) -> str:
    """A docstring as Markdown: `name: text` lines of arguments stay lines of their own."""
    return inspect.cleandoc(doc or "").replace("<", "&lt;")


def _public_methods(kind: type) -> Iterator[tuple[str, Any, str]]:
    for name in dir(kind):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(kind, name)
        function = getattr(value, "__func__", value)
        if isinstance(value, property):
            yield name, value.fget, name
        elif inspect.isfunction(function):
            yield name, function, _signature(function, name)


def _class(kind: type, depth: int = 3) -> str:
    mark = "#" * depth
    parts = [f"{mark} `{kind.__name__}`\n\n{_paragraphs(kind.__doc__)}"]
    if issubclass(kind, enum.Enum):
        comments = field_comments(kind)
        parts.append(table(("Name", "Value", "Meaning"),
                           [(code(item.name), item.value, comments.get(item.name, "")) for item in kind]))
        return "\n\n".join(parts)
    if dataclasses.is_dataclass(kind):
        parts.append(config_fields(kind))
    elif "__init__" in vars(kind):
        constructor = vars(kind)["__init__"]
        parts.append(fenced(_signature(constructor, kind.__name__).removesuffix(" -> None"), "python"))
        parts.append(_paragraphs(constructor.__doc__))
    for name, function, signature in _public_methods(kind):
        doc = inspect.getdoc(function) or inspect.getdoc(getattr(kind, name, None))
        if doc:
            parts.append(f"{mark}# `{name}` {{#{kind.__name__.lower()}-{name.lower()}}}\n\n"
                         f"{fenced(signature, 'python')}\n\n{_paragraphs(doc)}")
    return "\n\n".join(parts)


#: what the page of the Python API shows of allspark_client, in this order; the rest follows alphabetically
_FIRST = ("ClientEngine", "AsyncClientEngine", "AbstractEngine", "ResultQueue", "Generation", "GeneratedElements")


def python_client() -> str:
    """Every public name of allspark_client."""
    import_from_source()
    import allspark_client
    names = [*_FIRST, *(name for name in sorted(allspark_client.__all__) if name not in _FIRST)]
    parts = []
    for name in names:
        value = getattr(allspark_client, name)
        if isinstance(value, type):
            if name in ("ClientEngine",):
                parts.append(_own(value))
            else:
                parts.append(_class(value))
        elif callable(value):
            parts.append(f"### `{name}`\n\n{fenced(_signature(value, name), 'python')}\n\n{_paragraphs(value.__doc__)}")
    return "\n\n".join(parts)


def _head(kind: type) -> list[str]:
    """A class without its methods."""
    parts = [f"### `{kind.__name__}`\n\n{_paragraphs(kind.__doc__)}"]
    constructor = vars(kind).get("__init__")
    if constructor is not None:
        parts.append(fenced(_signature(constructor, kind.__name__).removesuffix(" -> None"), "python"))
        parts.append(_paragraphs(constructor.__doc__))
    return parts


def _own(kind: type) -> str:
    """A class with the methods that its base does not describe already."""
    parts = _head(kind)
    described = {name for base in kind.__mro__[1:] for name in vars(base)}
    for name, function, signature in _public_methods(kind):
        if name not in described and function.__doc__:
            parts.append(f"#### `{name}` {{#{kind.__name__.lower()}-{name.lower()}}}\n\n"
                         f"{fenced(signature, 'python')}\n\n{_paragraphs(function.__doc__)}")
    return "\n\n".join(parts)


def python_server() -> str:
    """Engine and HuggingFaceModel."""
    import_from_source()
    from allspark_server import Engine, HuggingFaceModel
    parts = [*_head(Engine), "Its methods are those of [`AbstractEngine`](#abstractengine).", _class(HuggingFaceModel)]
    return "\n\n".join(parts)


# --- families ----------------------------------------------------------------------------------------------------


def families() -> str:
    """The table of served architectures, as the code has it."""
    import_from_source()
    from allspark_server.models.registry import served_table
    return served_table()


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "commands-overview": commands_overview,
    "model-config": _client_config("AsModelConfig"),
    "generate-config": _client_config("GenerateConfig"),
    "group-configuration": group_configuration,
    "metrics": metrics,
    "python-client": python_client,
    "python-server": python_server,
    "families": families,
    "http-endpoints": http_fields.endpoints,
    "http-fields": http_fields.fields,
    **{f"figures-{name}": (lambda name=name: figures.table_of(name)) for name in figures.names()},
}
_MARK = re.compile(r"^<!-- generated: ([\w.-]+) -->$", re.MULTILINE)


def fill(page: str) -> str:
    """The page with every mark replaced by what is generated for it. Raises KeyError for an unknown name."""
    return _MARK.sub(lambda match: GENERATED[match[1]](), page)
