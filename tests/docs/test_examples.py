"""Examples of the documentation are true: commands, Python, configuration files and requests."""
from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from documentation import http_fields, reference

from allspark_client import AsModelConfig, GenerateConfig

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every code block of a language, without its indentation."""
    found = []
    for path in PAGES:
        for indent, text in re.findall(rf"^( *)```{language}\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line.removeprefix(indent) for line in text.splitlines()]
            found.append((str(path.relative_to(ROOT)), "\n".join(lines)))
    return found


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every `allspark …` in shell blocks and in code spans."""
    found = []
    for page, text in blocks("sh"):
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            if match := re.search(r"(?:^|[;&|] *|^\w+=\S+ )(allspark \w.*)", line.strip()):
                found.append((page, match[1]))
    for path in PAGES:
        for line in re.findall(r"`(allspark [a-z][^`]* [^`]+)`", path.read_text()):
            found.append((str(path.relative_to(ROOT)), line))
    return sorted(set(found))


@pytest.mark.parametrize("page,line", commands())
def test_commands_are_accepted(page, line, capsys):
    """By the parser: every flag is there and takes what it is given. Mentioned commands may lack what is required."""
    from allspark_launch.cli import build_parser
    words = [{"N": "2", "…": ""}.get(word, word) for word in shlex.split(line.partition(" >")[0], comments=True)]
    if {"COMMAND", "--help"} & set(words):
        return
    try:
        build_parser().parse_args([word for word in words[1:] if word])
    except SystemExit:
        problem = capsys.readouterr().err
        assert "the following arguments are required" in problem, f"{page}: {line}\n{problem}"


@pytest.mark.parametrize("page,text", blocks("python"))
def test_python_compiles(page, text):
    code = re.sub(r"…, |, …|…", "", text)
    ast.parse(f"async def f():\n    pass\n{code}" if "await " in code else code, page)


@pytest.mark.parametrize("page,text", blocks("python"))
def test_python_imports_what_there_is(page, text):
    for node in ast.walk(ast.parse(re.sub(r"…, |, …|…", "", text))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allspark"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page}: {node.module} has no {alias.name}"
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            config = {"AsModelConfig": AsModelConfig, "GenerateConfig": GenerateConfig}.get(name)
            if config is not None:
                assert {k.arg for k in node.keywords} <= set(config.field_names()), f"{page}: fields of {name}"


@pytest.mark.parametrize("page,text", blocks("toml"))
def test_toml_is_that_of_a_group_or_a_pool(page, text, tmp_path):
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    values = tomllib.loads(text)
    path = tmp_path / "file.toml"
    path.write_text(text)
    if "member" in values:
        from allspark_launch.pool.pool import Pool
        assert Pool.from_file(str(path)).members
    else:
        from allspark_launch.options import GroupOptions
        assert GroupOptions.from_file(str(path)).models


@pytest.mark.parametrize("page,text", blocks("sh"))
def test_bodies_of_requests_are_taken(page, text):
    """Paths of the HTTP API that curl calls exist, and the bodies are valid."""
    forms = dict(http_fields.forms())
    for line in re.sub(r"\\\n\s*", "", text).split("curl ")[1:]:
        path = re.search(r"localhost:8000(/\S*)", line)
        body = re.search(r"-d '(.*?)'\s*$", line, re.DOTALL)
        assert path and path[1] in {p for _, p, _ in http_fields._endpoints()}, f"{page}: {line}"
        if body:
            forms[path[1]].model_validate(json.loads(body[1]))


def test_model_fields_in_flags_exist():
    text = "\n".join(path.read_text() for path in PAGES)
    fields = set(re.findall(r"--set '?(\w+)=", text)) - {"FIELD"}
    assert fields and fields <= set(AsModelConfig.field_names())


def test_every_page_of_commands_is_linked():
    overview = reference.commands_overview()
    assert all(f"`{name}`" in overview for name, parser in reference.parsers() if not reference._subcommands(parser))
