"""The pictures of docs/architecture, drawn from the code.

A request is traced through a running engine, a step is the op list of a model, and memory is what the graph says each
rank holds.

They are committed (a trace needs the native library); `scripts/docs --check` compares them.
"""
from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from .paths import DOCS, ROOT, import_from_source
from .svg import Drawing

FOLDER = DOCS / "architecture"
#: Qwen2.5-0.5B's config.json
QWEN = {"architecture": "Qwen2ForCausalLM", "hidden_size": 896, "intermediate_size": 4864, "num_layers": 24,
        "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "attention_bias": True}
RANKS = 2
CALLER, ENGINE_THREAD = "MainThread", "allspark-engine"


# --- how a request runs ---------------------------------------------------------------------------------------------


def trace() -> dict[str, list[tuple[str, str]]]:
    """By thread, every module of the packages that a request enters, in order, with the first function of it.

    A chat is answered by an `Engine` in this process with the model that ships; the caller's thread is traced until
    start_request returns, the engine's until the answer ends.
    """
    import_from_source()
    seen: dict[tuple[str, str], str] = {}
    recording = False

    def hook(frame: Any, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if not recording or event != "call" or not module.startswith("allspark_"):
            return
        function = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if function.startswith("__create_fn__") or function.startswith("<"):
            return
        seen.setdefault((threading.current_thread().name, module), function)

    threading.setprofile(hook)
    try:
        from allspark_client import AsModelConfig
        from allspark_server import Engine
        folder = ROOT / "allspark_server" / "assets" / "fable"
        with Engine() as engine:
            engine.install_model(AsModelConfig(model_name="m", model_path=str(folder), engine_max_length=512))
            engine.start_model("m")
            recording = True
            sys.setprofile(hook)
            _, handle, queue = engine.start_request("m", {"messages": [{"role": "user", "content": "Hi"}]},
                                                    {"max_new_tokens": 4, "top_k": 1})
            sys.setprofile(None)
            for _ in queue:
                pass
            recording = False
            engine.release_request("m", handle)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    found: dict[str, list[tuple[str, str]]] = {CALLER: [], ENGINE_THREAD: []}
    for (thread, module), function in seen.items():
        if thread in found:
            found[thread].append((module, function))
    return found


def _fill(module: str) -> str:
    if module.startswith("allspark_client"):
        return "caller"
    if ".runtime" in module:
        return "native"
    if ".cache" in module or ".scheduler" in module:
        return "engine"
    return "plain"


def request() -> str:
    """The modules that a request enters, as two columns of boxes."""
    picture = Drawing("How a request runs: through the modules of one process")
    width, height, step = 330, 36, 44
    columns = [(CALLER, "Caller's thread: the input stage, until start_request returns"),
               (ENGINE_THREAD, "Engine's thread: schedule, plan, step, output")]
    traced = trace()
    for number, (thread, head) in enumerate(columns):
        x = 12 + number * (width + 60)
        picture.text(x, 24, head, 13, True)
        for i, (module, function) in enumerate(traced[thread]):
            y = 40 + i * step
            picture.box(x, y, width, height, [f"{i + 1}. {module}", function], _fill(module))
            if i:
                picture.arrow(x + width / 2, y - step + height, x + width / 2, y)
    last = 40 + (len(traced[CALLER]) - 1) * step + height / 2
    picture.arrow(12 + width, last, 12 + width + 60, 40 + height / 2, "queue")
    return picture.svg()


# --- how a step runs -----------------------------------------------------------------------------------------------


def _graph() -> Any:
    import_from_source()
    from allspark_server.models import ModelConfig, build_graph
    return build_graph(ModelConfig(**QWEN))


def _op_lines(graph: Any, op: Any) -> list[str]:
    tensors = [graph.tensors[name] for name in op.outputs]
    whole, here = (" + ".join(str(tensor.width_of(0, world)) for tensor in tensors) for world in (1, RANKS))
    shape = f"[rows, {here}] of {whole}" if here != whole else f"[rows, {whole}]" if whole else ""
    weight = op.weights[0].replace("model.layers.0.", "").removesuffix(".weight") if op.weights else ""
    return [op.type, "   ".join(filter(None, (weight, shape)))]


def _layer_of(op: Any) -> int | None:
    found = re.search(r"layers\.(\d+)\.", op.weights[0]) if op.weights else None
    return int(found[1]) if found else None


def step() -> str:
    """The op list of Qwen2.5-0.5B: what comes before the layers, one layer, and what follows."""
    picture = Drawing(f"How a step runs: the op list of Qwen2.5-0.5B, widths of rank 0 of {RANKS}")
    graph = _graph()
    ops = graph.ops
    begin, end = (next(i for i, op in enumerate(ops) if _layer_of(op) == layer) for layer in (0, 1))
    tail = next(i for i, op in enumerate(ops) if op.type == "select_rows")
    width, height, gap = 340, 36, 44
    parts = [("Before the layers", ops[:begin]), (f"Layer 0 of {QWEN['num_layers']}; the others are alike",
                                                  ops[begin:end]), ("After the last layer", ops[tail:])]
    for number, (head, part) in enumerate(parts):
        x = 12 + number * (width + 40)
        picture.text(x, 24, head, 13, True)
        for i, op in enumerate(part):
            y = 40 + i * gap
            fill = "exchange" if op.type == "all_reduce" else "engine" if op.type == "span_attention" else "plain"
            picture.box(x, y, width, height, _op_lines(graph, op), fill)
            if i:
                picture.arrow(x + width / 2, y - gap + height, x + width / 2, y)
    return picture.svg()


# --- ranks and memory --------------------------------------------------------------------------------------------


def _groups(graph: Any, rank: int) -> list[tuple[str, int]]:
    """Elements of the weights that a rank holds, by what they belong to."""
    found: dict[str, int] = {}
    for name, weight in graph.weights.items():
        key = ("attention" if "self_attn" in name else "MLP" if ".mlp." in name
               else "norms" if "norm" in name else "embedding and head")
        found[key] = found.get(key, 0) + weight.elements_of(rank, RANKS)
    return list(found.items())


def memory() -> str:
    """Two ranks of one host: what each holds, and what they share."""
    graph = _graph()
    picture = Drawing("Ranks and memory: Qwen2.5-0.5B in bfloat16 on two NUMA nodes")
    for rank in range(RANKS):
        x = 12 + rank * 470
        picture.box(x, 12, 400, 34, [f"rank {rank}: one process, pinned to NUMA node {rank}"], "head")
        y = 56
        for name, elements in _groups(graph, rank):
            picture.box(x, y, 400, 36, [f"weights: {name}", f"{2 * elements / 2**20:,.1f} MiB in bfloat16"], "plain")
            y += 44
        begin, end = graph.kv_heads.units_of(rank, RANKS)
        span = 2 * (end - begin) * QWEN["head_dim"] * QWEN["num_layers"] * 2
        heads = f"heads {begin} to {end - 1}" if end - begin > 1 else f"head {begin}"
        picture.box(x, y, 400, 36, [f"KV cache: KV {heads}, in spans",
                                    f"{span / 1024:,.0f} KiB a token: keys and values of all layers"], "engine")
        y += 44
        if rank == 0:
            picture.box(x, y, 400, 36, ["scheduler, prefix cache, service", "plans steps; holds no tensors"], "caller")
        else:
            picture.box(x, y, 400, 36, ["worker", "waits on a futex between steps; runs each plan"], "caller")
    y += 56
    picture.box(12, y, 870, 52, ["shared memory of the host (MPI allocates it; native/comm reads and writes it)",
                                 "step plans from rank 0   ·   partial sums of every rank, added in rank order   ·   "
                                 "candidates of every rank for sampling"], "exchange")
    for rank in range(RANKS):
        x = 12 + rank * 470 + 200
        picture.arrow(x, y - 20, x, y)
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {"request": request, "step": step, "memory": memory}


def write() -> None:
    """Writes all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


def _callers_modules(svg: str) -> list[str]:
    """The modules of the left column of the picture of a request. The right one depends on the number of processors."""
    return re.findall(r"<text x='22' [^>]*>\d+\. ([\w.]+)<", svg)


def differing() -> list[str]:
    """The pictures that are not as the code draws them now."""
    found = []
    for name, draw in PICTURES.items():
        path = FOLDER / f"{name}.svg"
        committed, drawn = path.read_text() if path.exists() else "", draw()
        if name == "request":
            committed, drawn = (" ".join(_callers_modules(text)) for text in (committed, drawn))
        if committed != drawn:
            found.append(name)
    return found
