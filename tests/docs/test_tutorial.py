"""The programs of the tutorial and of README answer with the model that ships."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = "allspark_server/assets/fable"


def program(page: str, containing: str) -> str:
    """The Python block of a page that contains a text."""
    found = [text for text in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
             if containing in text]
    assert len(found) == 1
    return found[0]


def run(text: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, env=os.environ | environment, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorials_engine_answers():
    text = program("docs/tutorial.md", "from allspark_server import Engine")
    assert SHIPPED in text
    assert run(text).strip() == "42"


@pytest.mark.parametrize("name", ["Engine", "ClientEngine"])
def test_the_readmes_ten_lines_answer(name):
    text = program("README.md", "with ClientEngine() as engine")
    text = text.replace("/models/Qwen2.5-0.5B-Instruct", SHIPPED).replace("Why is the sky blue?", "What is 12+30?")
    if name == "Engine":
        text = text.replace("ClientEngine", "Engine").replace("AsModelConfig, Engine", "AsModelConfig")
        text = f"from allspark_server import Engine\n{text}"
    assert run(text, AS_NUMA_NUM="2").strip() == "42"
