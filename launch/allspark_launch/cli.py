"""The `allspark` command."""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from allspark_server import access, logs

from . import bench
from .commands import batch, doctor, fastchat_worker
from .group import http_server as http
from .group.mpi import MpiNotFound
from .group.serving import PROGRESS_MARK, GroupPlan, agents_of, background_group, plan_group, shipped_model, supervise
from .group.supervisor import GroupFailed
from .machine import drawing, gpus
from .machine.placement import place, place_on_gpus
from .machine.topology import Topology, format_list, parse_list, parse_sequence, read_topology
from .options import GroupOptions, set_fields
from .pool import pool

logger = logging.getLogger(__name__)

EXIT_ERROR = 1
EXIT_CONFIG = 78            # of serve (sysexits' EX_CONFIG): starting it again would end alike; systemd's unit knows it
#: --weight-dtype of convert: customized_quant_config's weight_format and compute_method
QUANTIZED = {"int8": ("int8", "weight_only"), "int4": ("uint4", "weight_only"), "w8a8": ("int8", "activate_quant"),
             "w4a8": ("uint4", "activate_quant")}
DEFAULT_PROMPT = "Tell me a story about a fox."


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    logs.set_up("allspark", os.environ.get("ALLSPARK_LOG", "INFO"), _log_format(options))
    from allspark_client.errors import AllSparkError
    try:
        return options.handler(options) or 0
    except (ValueError, TypeError, OSError, MpiNotFound, GroupFailed, AllSparkError, RuntimeError) as error:
        print(f"allspark {options.command}: {error}", file=sys.stderr)
        repeats = (error.misconfigured if isinstance(error, GroupFailed) else
                   isinstance(error, (ValueError, TypeError, MpiNotFound, FileNotFoundError, PermissionError)))
        return EXIT_CONFIG if options.command == "serve" and repeats else EXIT_ERROR
    except KeyboardInterrupt:
        return 130


def _log_format(options: argparse.Namespace) -> str:
    """Of `allspark serve`; what is wrong with its config file is told later."""
    if getattr(options, "log_format", None) or options.command != "serve" or not options.config:
        return getattr(options, "log_format", None) or "text"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return GroupOptions.from_file(options.config).log_format
    return "text"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allspark",
        description="LLM inference with one pinned server process per NUMA node, behind a thin gRPC client.",
        epilog="Every command explains itself: allspark COMMAND --help. Start with: allspark run \"Tell me a story.\"")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, handler, summary: str, **details) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".",
                                formatter_class=argparse.RawDescriptionHelpFormatter, **details)
        p.set_defaults(handler=handler)
        return p

    p = command("run", run, "start a group, stream the answer to one prompt, stop the group", epilog="""\
examples:
  allspark run "What is 12+30?"                      the model that ships with the package
  allspark run --model ~/Qwen2.5-0.5B-Instruct --ranks 2 --greedy "Why is the sky blue?"
  echo "Once upon a time" | allspark run --raw -      no chat template, prompt from standard input""")
    p.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="the prompt; - reads standard input")
    p.add_argument("--model", metavar="DIR",
                   help="Hugging Face directory, NAME.gguf, NAME.asgraph, or org/name on the Hub (default: the shipped "
                        "model)")
    p.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    p.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default %(default)s")
    p.add_argument("--greedy", action="store_true", help="always the likeliest token")
    p.add_argument("--temperature", type=float, default=None)
    p.add_argument("--top-p", type=float, default=None)
    p.add_argument("--seed", type=int, default=None, help="same seed, same text (default: random)")
    p.add_argument("--address", help="use the group at this address instead of starting one")
    p.add_argument("-v", "--verbose", action="store_true", help="show where the ranks run, and what they log")
    _placement_options(p)
    _model_options(p)

    p = command("serve", serve, "run a group in the foreground, until SIGTERM or Ctrl-C", epilog="""\
The mpirun line is printed first; --dry-run prints only that. The group is watched: when a rank dies or hangs, all of
it is ended and started again with the models that were installed, also those that clients installed.

At each start of this command, models of the options and the config file are as they say: changed ones are loaded anew,
removed ones are gone, and those that clients had stopped or released are back. Models that clients installed are kept in
the state file; while one of them cannot be restored, the group serves the others and its health is NOT_SERVING, until
the model is installed or released. A model of the configuration that cannot be loaded ends the command.

Over several hosts (--hosts), agents that are started by ssh, or srun, place ranks there and watch over them; allspark
and the models must be at the same paths everywhere. A host that falls silent is lost after 4 s; what ran there ends by
itself within 5, and after 6 the group starts again on the others, with as many ranks if requests wait to go on. What
hosts exchange is not encrypted, and goes to any port: they are to be in a network of their own.

exit status: 0 after a stop that was asked for; 78 if a start would fail again until the configuration, or what it names,
is changed; 1 if the group could not be kept running.

Who may come in: a Unix socket is guarded by its mode. A TCP address needs TLS, with a token or a client's certificate;
on this machine alone (127.0.0.1) a token is enough. A token file has a line 'ROLE TOKEN' for each: read (information),
generate (that, and requests), admin (everything); a file of one token alone is an admin's.

examples:
  allspark serve --model ~/Qwen2.5-7B-Instruct --numa-nodes 0,1
  allspark serve --model ~/Qwen2.5-7B-Instruct --address 0.0.0.0:50051 --token-file tokens \
      --tls-cert cert.pem --tls-key key.pem
  allspark serve --model ~/Qwen2.5-72B-Instruct --hosts node1,node2
  allspark serve --config group.toml

keys of the config file (TOML or JSON): models (a list of directories, or tables of AsModelConfig's fields), address,
ranks, numa_nodes, memory_nodes, gpus, hosts, remote_shell, cpus_per_rank, use_siblings, strict, token_file, tls_cert,
tls_key, tls_ca, tls_role, insecure, socket_mode, socket_group, model_root, max_message_mib, max_requests,
max_tenant_requests, state_file, drain_limit, log_level, log_format, log_requests, http, http_workers. SIGHUP has it
read again: drain_limit and log_level count at once,
the rest from the next start; tokens are read again whenever their file changes.""")
    p.add_argument("--model", action="append", default=[], metavar="DIR",
                   help="a checkpoint (a directory, or org/name on the Hub) to load and start; repeatable; without one, "
                        "clients install what they need")
    p.add_argument("--address", action="append", default=[],
                   help="host:port or unix:/path; repeatable (default: a Unix socket of this user's; 127.0.0.1:50051 "
                        "with a token file or --insecure)")
    p.add_argument("--http", metavar="HOST:PORT",
                   help="serve OpenAI's API there, too, in processes of their own; see allspark http")
    p.add_argument("--http-workers", type=int, default=0, metavar="N", help="how many processes (default 1)")
    p.add_argument("--config", metavar="FILE", help="options from a file; flags win over it")
    p.add_argument("--dry-run", action="store_true", help="print the mpirun line and stop")
    p.add_argument("--ready-file", metavar="FILE", help="written as JSON once the group serves")
    p.add_argument("--progress-lines", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--parent-pid", type=int, default=0, metavar="PID", help="stop when this process ends")
    p.add_argument("--state-file", metavar="FILE", help="keep the list of models here (default: while serving)")
    p.add_argument("--token-file", metavar="FILE", help="clients must present a token of this file (see above)")
    p.add_argument("--tls-cert", metavar="PEM", help="the server's certificate")
    p.add_argument("--tls-key", metavar="PEM", help="its key")
    p.add_argument("--tls-ca", metavar="PEM", help="require client certificates signed by these")
    p.add_argument("--tls-role", choices=[role.value for role in access.Role], default=None,
                   help="of clients with a certificate, where there is no token file (default admin)")
    p.add_argument("--insecure", action="store_true",
                   help="serve TCP addresses though whoever reaches them may do everything")
    p.add_argument("--socket-mode", default=None, metavar="MODE", help="of Unix sockets (default 0600: only this user)")
    p.add_argument("--socket-group", metavar="NAME", help="the group that a Unix socket belongs to (mode 0660 then)")
    p.add_argument("--drain-limit", type=float, default=None, metavar="SECONDS",
                   help="when a stop is asked for, running requests have so long to end, and no new ones are taken; "
                        "inf: as long as they take (default 0); asked a second time, it stops at once")
    p.add_argument("--model-root", action="append", default=[], metavar="DIR",
                   help="clients may install models from below this directory; repeatable (default: only those named "
                        "by --model)")
    p.add_argument("--max-message-mib", type=int, default=0, metavar="N",
                   help="the largest message taken from a client (default 16)")
    p.add_argument("--max-requests", type=int, default=0, metavar="N",
                   help="that may wait or run, of all clients together (default: no limit but those of the models)")
    p.add_argument("--max-tenant-requests", type=int, default=0, metavar="N",
                   help="the same of one tenant: whoever shows a token, or a certificate, or else a connection")
    p.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default=None)
    p.add_argument("--log-format", choices=logs.FORMATS, default=None, help="default text")
    p.add_argument("--log-requests", action="store_true", help="log a line for each request that has ended")
    p.add_argument("--hosts", "--hostfile", metavar="FILE|NAMES",
                   help="spread the group over these hosts, of which this is one: a file with a line 'NAME' or 'NAME "
                        "slots=N' for each, names with commas between them, or auto: the Slurm allocation, or the host "
                        "file of the Kubernetes MPI operator; ranks are one for each NUMA node, or slots, or --ranks "
                        "in all")
    p.add_argument("--remote-shell", metavar="WORDS",
                   help="run a command on a host of --hosts by these words, its name and the command (default: ssh, in "
                        "a Slurm allocation srun)")
    p.add_argument("--strict", action="store_true", help="refuse to serve with memory on other nodes than it should be")
    _placement_options(p)
    _model_options(p)

    p = command("convert", convert, "serialize a Hugging Face checkpoint to NAME.asgraph and NAME.asparam")
    p.add_argument("source", metavar="HF_DIR", help="directory with config.json and the weights, or NAME.gguf")
    p.add_argument("target", metavar="OUT", help="directory to write to")
    p.add_argument("--name", help="default: the source directory's name")
    p.add_argument("--weight-dtype", default="auto", metavar="TYPE",
                   help="auto (as stored), float32, bfloat16, float16, or quantized: int8, int4, w8a8, w4a8")
    p.add_argument("--weight-group-size", type=int, default=0, metavar="K",
                   help="of quantized weights: 32 to 512 input features; 0: per output channel (default)")
    p.add_argument(
        "--keep-head", action="store_true", help="quantize all but the embedding and the language-model head"
    )

    p = command("topology", topology, "what this machine has, and how ranks will be placed on it")
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--plot", metavar="FILE", help="draw it: an SVG file")
    _placement_options(p)

    doctor.add_command(command)
    pool.add_commands(command)
    bench.add_commands(command)
    http.add_command(command)
    batch.add_command(command, _own_group_options, _own_group)
    fastchat_worker.add_command(command, _own_group_options, _own_group)
    return parser


def _numbers(text: str, parse: Callable[[str], list[int]] = parse_list) -> list[int]:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _gpus(text: str) -> list[int]:
    return _numbers(text, parse_sequence)


def _placement_options(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("placement")
    g.add_argument("--ranks", type=int, default=0, metavar="N",
                   help="server processes (default: one per NUMA node; $AS_NUMA_NUM)")
    g.add_argument("--numa-nodes", type=_numbers, default=None, metavar="LIST", help="nodes to use, such as 0,1")
    g.add_argument("--memory-nodes", type=_numbers, default=[], metavar="LIST",
                   help="nodes of memory alone (CXL, say) that ranks may use once their own is full (default: none)")
    g.add_argument("--gpus", type=_gpus, default=None, metavar="LIST",
                   help="compute on these GPUs, such as 0,1: a rank for each, on the CPUs of its node")
    g.add_argument("--cpus-per-rank", "--threads", type=int, default=0, metavar="N",
                   help="compute threads of a rank (default: every physical core of its share)")
    g.add_argument("--use-siblings", action="store_true", help="put threads on second hardware threads too")


def _model_options(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("model")
    g.add_argument("--model-name", metavar="NAME", help="what clients call it (default: the directory's name)")
    g.add_argument("--max-length", type=int, metavar="N", help="prompt and output together (default 2048)")
    g.add_argument("--max-batch", type=int, metavar="N", help="sequences computed together (default 32)")
    g.add_argument("--weight-dtype", metavar="TYPE",
                   help="auto (as stored), float32, bfloat16, int8, int4, w8a8, w4a8; on GPUs also float16, float8")
    g.add_argument("--weight-group-size", type=int, metavar="K",
                   help="of quantized weights: 32 to 512 input features; 0: per output channel (default)")
    g.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of AsModelConfig")


def _model_config(options: argparse.Namespace, directory: str) -> dict:
    """AsModelConfig's fields for a --model directory; checked here, so that a slip is told before anything starts."""
    from allspark_client.config import AsModelConfig
    from allspark_server.weights.hub import hub_name, is_hub_id, local_directory
    if is_hub_id(directory):
        path, name = Path(local_directory(directory)), hub_name(directory)
    else:
        path = Path(directory).expanduser().resolve()
        if not path.exists():
            raise ValueError(f"--model {directory}: there is no such file or directory")
        name = path.stem if path.suffix in (".asgraph", ".gguf") else path.name
    config = {"model_name": options.model_name or name, "model_path": str(path)}
    for key, value in (("engine_max_length", options.max_length), ("engine_max_batch", options.max_batch),
                       ("weight_dtype", options.weight_dtype), ("weight_group_size", options.weight_group_size)):
        if value is not None:
            config[key] = value
    config |= set_fields(options.set)
    AsModelConfig.from_dict(config).validate()
    return config


def _group_options(options: argparse.Namespace) -> GroupOptions:
    """The config file's options with the flags' on top."""
    group = GroupOptions.from_file(options.config) if options.config else GroupOptions()
    models = [_model_config(options, m) for m in options.model] or group.models
    if options.model_name and len(models) > 1:
        raise ValueError("--model-name names one model, but there are several; use --config with a models table")
    names = [field.name for field in fields(GroupOptions) if field.name != "models"]
    flags = {name: getattr(options, name) for name in names}
    return replace(group, models=models, **{k: v for k, v in flags.items() if v not in (None, 0, False, [])})


def serve(options: argparse.Namespace) -> int:
    group = _group_options(options)
    if options.dry_run:
        with agents_of(group) as agents:
            plan = plan_group(group, agents=agents)
        print(plan.line)
        for warning in plan.placement.warnings:
            logger.warning("%s", warning)
        return 0

    def show(plan: GroupPlan) -> None:
        print(plan.line, flush=True)
        for line in plan.describe():
            logger.info("%s", line)

    progress = print_progress if options.progress_lines else show_progress if sys.stderr.isatty() else None
    supervise(group, ready_file=options.ready_file or "", parent_pid=options.parent_pid, show=show,
              on_progress=progress, reread=(lambda: _group_options(options)) if options.config else None)
    return 0


def run(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if options.address:
        from allspark_client import ClientEngine
        with ClientEngine(options.address) as engine:
            models = [m.name for m in engine.list_models() if m.running]
            name = options.model_name or (models[0] if models else "")
            if not name:
                raise ValueError(f"the group at {options.address} runs no model; allspark serve --model starts one")
            _answer(engine, name, prompt, options)
        return 0
    from allspark_client import ClientEngine
    with _own_group(options) as address, ClientEngine(address) as engine:
        _answer(engine, engine.list_models()[0].name, prompt, options)
    return 0


def _own_group_options(p: argparse.ArgumentParser) -> None:
    _placement_options(p)
    _model_options(p)


@contextlib.contextmanager
def _own_group(options: argparse.Namespace) -> Iterator[str]:
    """A group of the options' model for the length of a with block; yields its address."""
    model = _model_config(options, options.model or str(shipped_model()))
    if options.max_length is None:          # one short conversation: not more than the model was made for
        model.setdefault("engine_max_length", _positions(Path(model["model_path"]), 2048))
    arguments = ["--model", model["model_path"], "--model-name", model["model_name"]]
    for key, value in model.items():
        if key not in ("model_path", "model_name"):
            arguments += ["--set", f"{key}={json.dumps(value)}"]
    for flag in ("ranks", "cpus_per_rank"):
        if getattr(options, flag):
            arguments += [f"--{flag.replace('_', '-')}", str(getattr(options, flag))]
    if options.gpus:
        arguments += ["--gpus", ",".join(map(str, options.gpus))]
    if options.numa_nodes is not None:
        arguments += ["--numa-nodes", format_list(options.numa_nodes)]
    if options.memory_nodes:
        arguments += ["--memory-nodes", format_list(options.memory_nodes)]
    if options.use_siblings:
        arguments.append("--use-siblings")
    progress = show_progress if sys.stderr.isatty() else None
    with background_group(arguments, verbose=options.verbose, on_progress=progress) as group:
        yield group.addresses[0]


def _positions(path: Path, most: int) -> int:
    """The context length of a checkpoint, at most `most`."""
    try:
        found = json.loads((path / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError):
        return most         # whatever is wrong with it, loading will say so better
    return min(found, most) if isinstance(found, int) and found > 0 else most


def show_progress(name: str, part: float) -> None:
    """A bar on the terminal, removed when the load is complete."""
    bar = "#" * round(30 * part)
    sys.stderr.write("\r\033[K" if part >= 1 else f"\rloading {name} [{bar:<30}] {100 * part:3.0f} %")
    sys.stderr.flush()


def print_progress(name: str, part: float) -> None:
    """For the process that started this one; see serving.background_group."""
    sys.stdout.buffer.write(PROGRESS_MARK + f"{part:.4f} {name}\n".encode())
    sys.stdout.flush()


def _answer(engine, name: str, prompt: str, options: argparse.Namespace) -> None:
    """Stream one answer to standard output, its speed to standard error."""
    config = {"max_new_tokens": options.max_new_tokens}
    if options.greedy:
        config["do_sample"] = False
    for key in ("temperature", "top_p", "seed"):
        if getattr(options, key) is not None:
            config[key] = getattr(options, key)
    inputs = {"text": prompt} if options.raw else {"messages": [{"role": "user", "content": prompt}]}
    started = time.perf_counter()
    _, handle, queue = engine.start_request(name, inputs, config)
    first, early, count = 0.0, 0, 0
    for elements in queue:
        count += len(elements.ids_from_generate)
        if not first:       # the first message may bring several tokens, whose time is not known
            first, early = time.perf_counter(), count
        sys.stdout.write(elements.text)
        sys.stdout.flush()
    ended = time.perf_counter()
    print(flush=True)
    engine.release_request(name, handle)
    speed = f", then {(count - early) / (ended - first):.1f} tokens/s" if count > early else ""
    print(f"[{engine.get_rank_nums()} rank(s), {count} tokens, first after {1000 * (first - started):.0f} ms{speed}]",
          file=sys.stderr)


def convert(options: argparse.Namespace) -> int:
    from allspark_server import HuggingFaceModel
    source = Path(options.source).expanduser().resolve()
    name = options.name or (source.stem if source.suffix == ".gguf" else source.name)
    form, quant = options.weight_dtype, {}
    if form in QUANTIZED:
        weight_format, compute_method = QUANTIZED[form]
        quant = {"enable_quant": True, "customized_quant_config": {
            "weight_format": weight_format, "compute_method": compute_method, "group_size": options.weight_group_size,
            "quantize_head": not options.keep_head}}
        form = "auto"
    elif options.weight_group_size or options.keep_head:
        raise ValueError(
            f"--weight-group-size and --keep-head are for quantized weights, and --weight-dtype is {form}; use one of "
            f"{', '.join(QUANTIZED)}"
        )
    model = HuggingFaceModel(str(source), name, user_set_data_type=form)
    model.load_model()
    model.read_model_config()
    model.serialize_to_path(None, options.target, **quant)
    for path in sorted(Path(options.target).glob(f"{name}.as*")):
        print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def topology(options: argparse.Namespace) -> int:
    machine = read_topology()
    if options.gpus and options.numa_nodes is None:
        placement = place_on_gpus(machine, options.gpus, options.cpus_per_rank, options.use_siblings)
    else:
        placement = place(machine, options.ranks or int(os.environ.get("AS_NUMA_NUM") or 0), options.numa_nodes,
                          options.cpus_per_rank, options.use_siblings, options.memory_nodes)
    # Its numbers are not CUDA's where the environment hides some.
    told = "" if "CUDA_VISIBLE_DEVICES" in os.environ or not machine.gpus else gpus.nvidia_smi("topo", "-m")
    links = gpus.links(machine.gpus, gpus.nvlinks_of(told))
    if options.plot:
        drawing.save(options.plot, machine, placement)
    if options.json:
        ranks = [{"rank": r.rank, "node": r.node, "cpus": list(r.cpus), "bound_cpus": list(r.bound_cpus),
                  "memory_node": r.memory_node, "memory_nodes": list(r.memory_nodes), "gpu": r.gpu}
                 for r in placement.ranks]
        print(json.dumps({**machine.to_dict(), "gpu_links": [{"gpus": pair, "link": link}
                                                                  for pair, link in links.items()],
                          "ranks": ranks, "oversubscribed": placement.oversubscribed,
                          "warnings": placement.warnings}, indent=2))
        return 0
    print_topology(machine)
    print_gpus(machine, links)
    print(f"\n{'rank':>4}  {'node':>4}  {'threads':>7}  CPUs")
    for r in placement.ranks:
        print(f"{r.rank:>4}  {r.node:>4}  {len(r.cpus):>7}  {format_list(r.cpus)}")
    for warning in placement.warnings:
        print(f"note: {warning}")
    return 0


def print_gpus(machine: Topology, links: dict[tuple[int, int], str]) -> None:
    """The GPUs as a table, and how pairs of them are linked."""
    if not machine.gpus:
        return
    print(f"\n{'GPU':>4}  {'node':>4}  {'address':<14} {'link':<18} model")
    for gpu in machine.gpus:
        print(f"{gpu.index if gpu.index >= 0 else '-':>4}  {gpu.node if gpu.node >= 0 else '-':>4}  {gpu.address:<14} "
              f"{gpu.link or '-':<18} {gpu.model or 'no driver'}")
    for (a, b), link in links.items():
        print(f"GPU {a} - GPU {b}: {link} ({gpus.LINKS.get(link, 'NVLinks')})")


def print_topology(machine: Topology) -> None:
    """The nodes as a table, and what restricts this process."""
    print(f"{'node':>4}  {'cores':>5}  {'usable CPUs':<16} {'all CPUs':<16} {'memory':>9}  {'free':>9}  distances")
    for n in machine.nodes:
        memory = f"{n.memory_total / 2**30:.1f} GiB" if n.memory_total else "none"
        free = f"{n.memory_free / 2**30:.1f} GiB" if n.memory_total else ""
        print(f"{n.id:>4}  {len(n.cores):>5}  {format_list(n.usable_cpus) or '-':<16} {format_list(n.cpus) or '-':<16} "
              f"{memory:>9}  {free:>9}  {' '.join(str(d) for d in n.distances.values())}")
    if machine.offline_cpus:
        print(f"offline CPUs: {format_list(machine.offline_cpus)}")
    if machine.cpu_quota:
        print(f"cgroup quota: {machine.cpu_quota:g} CPUs")
    if machine.memory_limit:
        print(f"cgroup memory limit: {machine.memory_limit / 2**30:.1f} GiB")
