"""The shipped model with a chat template that has reasoning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import allspark_server

FABLE = Path(allspark_server.__file__).parent / "assets/fable"
_BEGUN = ("{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
          "{% else %}{{ '<think>\\n' }}{% endif %}")


def reasoning_model(folder: Path) -> Path:
    """Copies the model into a folder; its template begins reasoning, unless the variable `enable_thinking` is false."""
    folder = folder / "thinking"
    shutil.copytree(FABLE, folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    begun = "{{ '<|im_start|>assistant\\n' }}"
    assert config["chat_template"].count(begun) == 1
    config["chat_template"] = config["chat_template"].replace(begun, begun + _BEGUN)
    file.write_text(json.dumps(config))
    return folder
