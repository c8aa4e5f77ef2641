"""`allspark run`: starts a group, answers one prompt and stops the group."""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from allspark_client import AbstractEngine, ClientEngine
from allspark_client.images import as_image

from . import AddCommand
from .own_group import add_group_flags, own_group

DEFAULT_PROMPT = "Tell me a story about a fox."
EPILOG = """\
examples:
  allspark run "What is 12+30?"                      the model that ships with the package
  allspark run --model ~/Qwen2.5-0.5B-Instruct --ranks 2 --greedy "Why is the sky blue?"
  allspark run --model ~/Qwen2.5-VL-3B-Instruct --image cat.jpg --image dog.png "What differs?"
  echo "Once upon a time" | allspark run --raw -      no chat template, prompt from standard input"""


def add_command(command: AddCommand) -> None:
    """Adds `run` to the parser."""
    p = command("run", run, "start a group, stream the answer to one prompt, stop the group", epilog=EPILOG)
    p.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="the prompt; - reads standard input")
    p.add_argument("--model", metavar="DIR",
                   help="Hugging Face directory, NAME.gguf, NAME.asgraph, or org/name on the Hub (default: the shipped "
                        "model)")
    p.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    p.add_argument("--image", action="append", default=[], metavar="FILE",
                   help="an image before the prompt, for models that see: PNG, JPEG, WebP or GIF; repeatable")
    p.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default %(default)s")
    p.add_argument("--greedy", action="store_true", help="always the most likely token")
    p.add_argument("--temperature", type=float, default=None)
    p.add_argument("--top-p", type=float, default=None)
    p.add_argument("--seed", type=int, default=None, help="same seed, same text (default: random)")
    p.add_argument("--address", help="use the group at this address instead of starting one")
    p.add_argument("-v", "--verbose", action="store_true", help="show where the ranks run, and their log")
    add_group_flags(p)


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    inputs = _inputs(prompt, parsed)
    if parsed.address:
        with ClientEngine(parsed.address) as engine:
            models = [m.name for m in engine.list_models() if m.running or m.on_demand]
            name = parsed.model_name or (models[0] if models else "")
            if not name:
                raise ValueError(f"the group at {parsed.address} runs no model; allspark serve --model starts one")
            _answer(engine, name, inputs, parsed)
        return 0
    with own_group(parsed) as address, ClientEngine(address) as engine:
        _answer(engine, engine.list_models()[0].name, inputs, parsed)
    return 0


def _inputs(prompt: str, parsed: argparse.Namespace) -> dict[str, Any]:
    """The prompt, with images in front of it. Raises ValueError for a file that is none."""
    if parsed.raw and parsed.image:
        raise ValueError("--image needs the chat template, which says where an image is; --raw leaves it out")
    if parsed.raw:
        return {"text": prompt}
    if not parsed.image:
        return {"messages": [{"role": "user", "content": prompt}]}
    # Read now: a wrong file must not cost the load of a model.
    parts = [{"type": "image", "image": as_image(Path(file))} for file in parsed.image]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]}


def _answer(engine: AbstractEngine, name: str, inputs: dict[str, Any], parsed: argparse.Namespace) -> None:
    """Streams one answer to standard output, and its speed to standard error."""
    config: dict[str, Any] = {"max_new_tokens": parsed.max_new_tokens}
    if parsed.greedy:
        config["do_sample"] = False
    for key in ("temperature", "top_p", "seed"):
        if getattr(parsed, key) is not None:
            config[key] = getattr(parsed, key)
    started = time.perf_counter()
    _, handle, queue = engine.start_request(name, inputs, config)
    first, early, count = 0.0, 0, 0
    for elements in queue:
        count += len(elements.ids_from_generate)
        if not first:       # the first message may have several tokens, whose times are not known
            first, early = time.perf_counter(), count
        sys.stdout.write(elements.text)
        sys.stdout.flush()
    ended = time.perf_counter()
    print(flush=True)
    engine.release_request(name, handle)
    speed = f", then {(count - early) / (ended - first):.1f} tokens/s" if count > early else ""
    print(f"[{engine.get_rank_nums()} rank(s), {count} tokens, first after {1000 * (first - started):.0f} ms{speed}]",
          file=sys.stderr)
