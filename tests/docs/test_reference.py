"""The documentation says what the code does: reference pages against the code, tables against the results."""
from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from documentation import figures, http_fields, pictures, reference

from allspark_client import AsStatus

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def page(name: str) -> str:
    return (DOCS / name).read_text()


@cache
def sources() -> dict[str, str]:
    """The text of every source file, with the parts of strings that are written over several lines joined."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = listed.stdout.splitlines()
    found = {}
    for name in tracked:
        path = ROOT / name
        if name.startswith(("docs/", "tests/docs/")) or not path.is_file() or path.suffix in (".md", ".json"):
            continue
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh") or name.startswith(("tests/", "launch/", "setup")):
            try:
                found[name] = re.sub(r"\"\s*\n\s*f?\"", "", path.read_text())
            except UnicodeDecodeError:
                continue
    return found


# --- environment -------------------------------------------------------------------------------------------------


def read_variables() -> set[str]:
    """The project's environment variables that occur in the code."""
    statuses = {status.name for status in AsStatus} | {"ALLSPARK_ERROR"}
    found = set()
    for name, text in sources().items():
        found |= set(re.findall(r"\bALLSPARK_[A-Z]+(?:_[A-Z]+)*\b", text))
        if name.endswith(".py"):
            found |= set(re.findall(r"[\"$](AS_[A-Z]+(?:_[A-Z]+)*)\b", text))
    return {name for name in found - statuses if f"{name}_ERROR" not in statuses}


def test_environment_variables_are_those_of_the_code():
    documented = set(re.findall(r"^\| `((?:ALLSPARK|AS)_[A-Z_]+)` \|", page("reference/environment.md"), re.MULTILINE))
    in_code = read_variables()
    assert documented - in_code == set(), "documented, but nothing reads them"
    assert in_code - documented == set(), "read, but docs/reference/environment.md lacks them"


# --- metrics -----------------------------------------------------------------------------------------------------


def test_alerts_and_dashboard_use_known_metrics():
    known = set(reference.metric_families())
    known |= {f"{name}{end}" for name in known for end in ("_bucket", "_sum", "_count")}
    for name in ("alerts.yml", "dashboard.json"):
        text = (ROOT / "launch" / "monitoring" / name).read_text()
        used = set(re.findall(r"\ballspark_[a-z_]+", text))
        assert used - known == set(), name


def test_every_metric_has_a_text():
    families = reference.metric_families()
    assert len(families) >= 25
    assert [name for name, (_, _, text) in families.items() if not text] == []


# --- errors ------------------------------------------------------------------------------------------------------


def test_every_status_is_documented():
    documented = re.findall(r"^\| `(ALLSPARK_[A-Z_]+)` \|", page("reference/errors.md"), re.MULTILINE)
    assert sorted(documented) == sorted(status.name for status in AsStatus)


def quoted_texts() -> list[str]:
    parts = page("reference/errors.md").split("## Installing")[1]
    cells = re.findall(r"^\| (`.*?) \|", parts, re.MULTILINE)
    return [text for found in cells for text in re.findall(r"`([^`]+)`", found)]


@pytest.mark.parametrize("text", quoted_texts())
def test_quoted_errors_occur_in_the_code(text):
    assert any(text in source for source in sources().values()), "docs/reference/errors.md quotes what no code says"


# --- HTTP --------------------------------------------------------------------------------------------------------


FORMS = {form.__name__: form for _, form in http_fields.forms()}


@pytest.mark.parametrize("name", FORMS)
def test_fields_have_a_true_status(name):
    """A honoured field is read somewhere; fields that are listed exist; refusals are the endpoint's own."""
    form = FORMS[name]
    known = set(form.model_fields)
    assert set(http_fields.IGNORED.get(name, {})) <= known
    assert {field for kind, field in http_fields.CONDITIONS if kind == name} <= known
    assert set(http_fields.refusals(form)) <= known
    unread = [field for field in known if http_fields.status_of(form, field)[0] == "honoured"
              and not field.startswith("guided_") and not http_fields.reads(field)]
    assert unread == [], "honoured, it says, but nothing reads them"


def test_conditions_name_known_forms():
    assert {kind for kind, _ in http_fields.CONDITIONS} <= set(FORMS)
    assert set(http_fields.IGNORED) <= set(FORMS)


# --- models and formats ------------------------------------------------------------------------------------------


def test_schemes_and_types_of_checkpoints_are_those_of_the_code():
    from allspark_server.weights.gguf.blocks import TYPES
    from allspark_server.weights.schemes import SCHEMES
    text = page("guides/quantization.md")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert {name for name in SCHEMES if f"`{name}`" not in rows} == set()
    for name in ("guides/quantization.md", "guides/from-llama-cpp.md"):
        listed = re.search(r"F32(?:, [BF\d][F\d]+)+(?:, Q\d_\w+)+", page(name))
        assert listed and set(listed[0].split(", ")) == {kind.name for kind in TYPES.values()}


def test_formats_and_levels_are_those_of_the_code():
    import runpy

    from allspark_client.config import WEIGHT_DTYPES
    text = page("guides/quantization.md")
    assert [name for name in WEIGHT_DTYPES if f"`{name}`" not in text] == []
    levels = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["ISAS"]
    text = page("reference/models.md")
    assert [name for names in levels.values() for name in names if f"`{name}`" not in text] == []


# --- generated pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reference.GENERATED)
def test_generated_parts_can_be_made_and_are_used(name):
    assert reference.GENERATED[name]().strip()
    assert any(f"<!-- generated: {name} -->" in path.read_text() for path in PAGES), "no page has this part"


def test_every_option_has_a_help_text():
    lacking = [f"{command} {action.dest}" for command, parser in reference.parsers() for action in parser._actions
               if action.help is None and not action.choices]
    assert len(lacking) <= 8, lacking


def test_every_key_of_a_group_has_a_meaning():
    assert [key for key, _, _, _, meaning in reference.group_keys() if not meaning] == []


# --- figures and pictures ----------------------------------------------------------------------------------------


def test_readme_tables_are_those_of_the_results():
    text = (ROOT / "README.md").read_text()
    assert "<!-- figures: " in text
    assert figures.readme(text) == text, "scripts/docs --write makes README's tables"


@pytest.mark.parametrize("name", figures.names())
def test_results_are_whole(name):
    result = figures.read(name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert result["better"] in ("higher", "lower")
    pairs = [(one["row"], one["column"]) for one in result["cells"]]
    assert len(pairs) == len(set(pairs)), "a cell stands twice"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", ["step", "memory"])
def test_pictures_are_those_of_the_code(name):
    assert (pictures.FOLDER / f"{name}.svg").read_text() == pictures.PICTURES[name](), "scripts/docs --write draws it"


def test_the_picture_of_a_request_names_modules_that_are_there():
    text = (pictures.FOLDER / "request.svg").read_text()
    modules = re.findall(r">\d+\. (allspark_[\w.]+)<", text)
    assert len(modules) > 20
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


# --- paths and links ---------------------------------------------------------------------------------------------


def mentioned_paths() -> list[tuple[str, str]]:
    """(page, path) of every file of this repository that a current page names in a code span."""
    tops = ("allspark_client", "allspark_server", "launch", "native", "proto", "docs", "benchmarks", "tests", "tools",
            "scripts")
    found = []
    for path in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        if path.parent.name == "decisions":
            continue
        for text in re.findall(r"`([\w./-]+)`", path.read_text()):
            if text.split("/")[0] in tops and "/" in text:
                found.append((str(path.relative_to(ROOT)), text))
    return found


@pytest.mark.parametrize("name,path", sorted(set(mentioned_paths())))
def test_named_files_exist(name, path):
    assert (ROOT / path).exists(), f"{name} names it"


def test_navigation_has_every_page():
    listed = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in PAGES}


def test_nothing_is_fetched_from_elsewhere():
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config and "- offline" in config
    for path in PAGES:
        assert not re.search(r"!\[[^\]]*\]\(https?:", path.read_text()), path
