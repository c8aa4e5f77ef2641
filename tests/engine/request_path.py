"""Prints the modules that a request enters between Engine.start_request and the engine's queue.

    python tests/engine/request_path.py

A module is entered when code of another module of allspark_server calls into it; consecutive calls into the same module
count once. Several kinds of requests are printed, each with its modules in the order of entry.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import allspark_server
from allspark_client import AsModelConfig
from allspark_server.engine.engine import Engine

ROOT = str(Path(allspark_server.__file__).parent)
_TOOL = {"type": "function", "function": {"name": "look", "strict": True, "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}}}
_CHAT = {"messages": [{"role": "user", "content": "the quick brown fox"}]}
_JSON = {"response_format": {"type": "json_object"}}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ids": ({"input_ids": [5, 6, 7, 8]}, {}),
    "text": ({"text": "the quick brown fox"}, {}),
    "text with response_format": ({"text": "the quick brown fox"}, _JSON),
    "two samples with stop strings": ({"text": "the quick brown fox"}, {"n": 2, "logprobs": True, "stop": ["lazy"]}),
    "chat": (_CHAT, {}),
    "chat with response_format": ({**_CHAT, "tool_choice": "auto"}, _JSON),
    "chat with tools": ({**_CHAT, "tools": [_TOOL], "tool_choice": "required"}, {}),
}


def entries(engine: Engine, name: str, inputs: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """The modules that a request of the model `name` enters, in order."""
    entered: list[str] = []
    queued = False

    def module_of(frame: Any) -> str | None:
        file = frame.f_code.co_filename
        module = file[len(ROOT) + 1 :] if file.startswith(ROOT) else None
        return module if module != "engine/threads.py" else None  # checks of debug builds

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal queued
        if event != "call" or queued or (module := module_of(frame)) is None:
            return
        queued = frame.f_code.co_name == "post"
        caller = frame.f_back
        while caller is not None and module_of(caller) is None:
            caller = caller.f_back
        if not queued and (caller is None or module_of(caller) != module):
            entered.append(module)

    sys.setprofile(profile)
    try:
        _, handle, _ = engine.start_request(name, inputs, {"max_new_tokens": 2, **config})
    finally:
        sys.setprofile(None)
    engine.release_request(name, handle)
    return [module for module, _ in groupby(entered)]


def entered_again(order: list[str]) -> int:
    """How many entries go to modules that were entered before."""
    return len(order) - len(set(order))


def main() -> None:
    """Prints a table for the model that ships with the package."""
    with Engine() as engine:
        engine.install_model(AsModelConfig("fable", str(Path(ROOT, "assets", "fable")), weight_dtype="float32"))
        engine.start_model("fable")
        for kind, (inputs, config) in REQUESTS.items():
            entries(engine, "fable", inputs, config)  # what happens once in a process
            order = entries(engine, "fable", inputs, config)
            print(f"{kind}: {len(set(order))} modules, {entered_again(order)} entered again")
            again = {module for module, count in Counter(order).items() if count > 1}
            print("    " + " → ".join(f"{module}*" if module in again else module for module in order))


if __name__ == "__main__":
    main()
