"""`allspark bench serving`: latencies and throughput under the load that users make."""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import platform
import sys
import time
from pathlib import Path

from ..group.background import background_group, shipped_model
from ..options import set_fields
from ..progress import Progress
from .latencies import METRICS, SCHEMA, Figures, Target as Slo, plot, table
from .load import Limits, Point, drive
from .targets import Group, InProcess, OpenAI, Target, failures
from .workload import Arrivals, Shape, distribution, read_trace, sessions

MODEL = "bench"
WARM_UP = 1 << 31    # in a seed, in the place of a round

DESCRIPTION = """\
Measures what users of a server see: time to first token (ttft), time between tokens (itl), end to end (e2e), tokens/s,
and with --slo how many requests a second meet a target (goodput).

closed loop (--clients 1,4,16): so many users, each with one request at a time: throughput at a concurrency.
open loop (--rate 1,2,4): sessions arrive so many a second, whatever became of those before: what a public server has to
  bear. Latencies count from when a request was due, so a server that falls behind shows it.
Each value of the list is a load; all are measured in turn, for all targets, --rounds times: the table has the median
round, and machines whose speed drifts treat all alike.

targets (--target, repeatable; NAME= before it names it in the table):
  engine           an Engine in this process, of --model. Its threads share the interpreter with the load's: a server's
                   figures are those of group
  group            a server group of --model, started for this run (the default)
  ADDRESS[,…]      a group or pool that runs: host:port, unix:/path; $ALLSPARK_TOKEN_FILE has its token
  http://…         an endpoint of OpenAI's form (needs httpx), by /v1/completions with ids, or /v1/chat/completions with
                   words where the sessions have several turns (or with --chat). Its tokens are its chunks; their sum is
                   the usage that it reports
All get the same requests: lengths, ids, sessions and arrivals depend on --seed alone, new in each round.

lengths (--prompt, --output, --turns): a number, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA, exp:MEAN,
choice:A:B:…; or --trace FILE, JSON lines {"timestamp": ms, "input_length": n, "output_length": n}, whose arrivals are
kept (--rate 2: twice as fast). Prompts are random ids; output is greedy and ends by its length alone."""

EPILOG = """\
examples:
  allspark bench serving                                            the model that ships, 1, 4 and 16 clients
  allspark bench serving --model DIR --rate 1,2,4,8 --slo ttft=500,itl=50 --plot load.png --json load.json
  allspark bench serving --target unix:/run/allspark.sock --rate 4 --arrivals burst:16 --prompt lognormal:300:1
  allspark bench serving --model DIR --clients 32 --turns 6 --prefix 512 --prefixes 4     chats with system prompts
  allspark bench serving --target ours=http://127.0.0.1:8000 --target llama=http://127.0.0.1:8080 --vocab-size 32000 \\
      --clients 1,4,16 --rounds 3                                   two servers, interleaved"""


def _list_of(parse):
    def convert(text: str) -> list:
        try:
            return [parse(part) for part in text.split(",") if part]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return convert


def _checked(parse):
    def convert(text: str):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return convert


def _above_zero(kind):
    def parse(text: str):
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError(f"{text} must be above 0")
        return value
    return parse


def add_serving(modes) -> None:
    """Adds `serving` to the modes of `allspark bench` (argparse's subparsers)."""
    p = modes.add_parser("serving", help="latencies and throughput under load, of groups, pools and OpenAI endpoints",
                         description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(handler=run_serving)
    g = p.add_argument_group("load")
    g.add_argument("--clients", type=_list_of(_above_zero(int)), metavar="LIST", help="closed loop (default 1,4,16)")
    g.add_argument("--rate", type=_list_of(_above_zero(float)), metavar="LIST", help="open loop: sessions a second")
    g.add_argument("--arrivals", type=_checked(Arrivals.parse), default=Arrivals("poisson"), metavar="KIND",
                   help="of the open loop: poisson (default), constant, burst:N, gamma:SHAPE")
    g.add_argument("--requests", type=_checked(_above_zero(int)), metavar="N",
                   help="of a load in a round (default: 8 a client, or 20 s of the rate; at least 16)")
    g.add_argument("--duration", type=_checked(_above_zero(float)), metavar="S",
                   help="send for so long instead; what is on its way then is waited for")
    g.add_argument("--rounds", type=_checked(_above_zero(int)), default=1, metavar="N", help="default %(default)s")
    g.add_argument("--warmup", type=int, default=2, metavar="N",
                   help="requests to each target before, not counted (default %(default)s)")
    g.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload (default %(default)s)")
    g = p.add_argument_group("requests")
    g.add_argument("--prompt", type=_checked(distribution), default=distribution("128"), metavar="DIST",
                   help="tokens of a turn's prompt (default 128)")
    g.add_argument("--output", type=_checked(distribution), default=distribution("64"), metavar="DIST",
                   help="tokens of the answer (default 64)")
    g.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths from a file instead")
    g.add_argument("--prefix", type=int, default=0, metavar="N", help="tokens that first prompts share, beside --prompt")
    g.add_argument("--prefixes", type=_checked(_above_zero(int)), default=1, metavar="N",
                   help="how many such beginnings there are (default 1)")
    g.add_argument("--turns", type=_checked(distribution), default=distribution("1"), metavar="DIST",
                   help="of a session: each continues what was said before (default 1)")
    g.add_argument("--think", type=float, default=0.0, metavar="S", help="between an answer and the next turn (default 0)")
    g.add_argument("--schema", type=Path, metavar="FILE", help="guided: answers must fit this JSON schema")
    g.add_argument("--guided", type=float, default=1.0, metavar="PART", help="of the requests (default 1: all)")
    g.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    g = p.add_argument_group("targets")
    g.add_argument("--target", action="append", default=[], metavar="[NAME=]WHAT", help="see above; repeatable")
    g.add_argument("--model", metavar="DIR", help="of engine and group (default: the shipped model)")
    g.add_argument("--ranks", type=int, default=0, metavar="N", help="of group (default: one per NUMA node)")
    g.add_argument("--threads", type=int, default=0, metavar="N", help="of each rank (default: every physical core)")
    g.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of AsModelConfig")
    g.add_argument("--model-name", default="", metavar="NAME",
                   help="at addresses and endpoints (default: the one that is served there)")
    g.add_argument("--chat", action="store_true", help="endpoints: chat completions with words instead of ids")
    g.add_argument("--vocab-size", type=_checked(_above_zero(int)), default=0, metavar="N",
                   help="ids that prompts are made of (default: the smallest of the targets'; endpoints do not tell "
                        "theirs: 32000)")
    g.add_argument("--key-env", default="OPENAI_API_KEY", metavar="NAME", help="endpoints' API key (default %(default)s)")
    g.add_argument("--body", type=_checked(json.loads), default={"ignore_eos": True}, metavar="JSON",
                   help="endpoints: what is added to each request (default: %(default)s)")
    g = p.add_argument_group("output")
    g.add_argument("--slo", type=_checked(Slo.parse), default=Slo({}), metavar="LIST",
                   help=f"goodput's target in ms, such as ttft=200,itl=50; of {', '.join(METRICS)} (itl: a request's own "
                        "99th percentile)")
    g.add_argument("--json", type=Path, metavar="FILE", help="everything, with each round's figures")
    g.add_argument("--plot", type=Path, metavar="FILE", help="latency against load (.png, .svg or .pdf; needs matplotlib)")


def points_of(options: argparse.Namespace) -> list[Point]:
    """The loads."""
    if options.clients and options.rate:
        raise ValueError("--clients (closed loop) and --rate (open loop) are two different loads: give one of them")
    if options.rate or (options.trace and not options.clients):
        return [Point(rate=rate) for rate in options.rate or [1.0]]
    return [Point(clients=clients) for clients in options.clients or [1, 4, 16]]


def requests_of(point: Point, options: argparse.Namespace) -> int:
    """How many requests a round of a load has."""
    if options.duration:
        return sys.maxsize
    return options.requests or max(16, 8 * point.clients or round(20 * point.rate))


def shape_of(options: argparse.Namespace) -> Shape:
    """What sessions are made of."""
    if options.prefix < 0 or options.think < 0 or not 0 <= options.guided <= 1:
        raise ValueError("--prefix and --think must be at least 0, --guided between 0 and 1")
    schema = json.loads(options.schema.read_text(encoding="utf-8")) if options.schema else None
    trace = read_trace(options.trace, options.requests or sys.maxsize) if options.trace else []
    return Shape(options.prompt, options.output, options.turns, options.prefix, options.prefixes, schema,
                 options.guided, trace)


def run_serving(options: argparse.Namespace) -> int:
    points, shape = points_of(options), shape_of(options)
    if "ALLSPARK_LOG" not in os.environ:
        logging.getLogger().setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        targets = [_target(text, options, points, stack) for text in options.target or ["group"]]
        if len({target.name for target in targets}) < len(targets):
            raise ValueError("two targets have one name: write --target NAME=WHAT")
        found = asyncio.run(_measure(targets, points, shape, options))
    print(table(found, options.slo))
    if options.json:
        options.json.write_text(json.dumps(_report(found, options), indent=1) + "\n", encoding="utf-8")
    if options.plot and not plot(found, options.plot):
        print(f"{options.plot} was not drawn: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    return 0 if all(any(r["requests"] for r in figures.rounds) for figures in found) else 1


async def _measure(targets: list[Target], points: list[Point], shape: Shape,
                   options: argparse.Namespace) -> list[Figures]:
    found = [Figures(target.name, point) for target in targets for point in points]
    totals = [min(requests_of(point, options), len(shape.trace) or sys.maxsize) for point in points]
    bounded = not options.duration
    progress = Progress(options.rounds * len(targets) * (sum(totals) if bounded else len(points)))
    try:
        for target in targets:
            progress.show(f"{target.name}: connecting")
            try:
                await target.open()
            except failures() as error:
                raise RuntimeError(f"{target.name}: {error or type(error).__name__}") from error
        vocab_size = options.vocab_size or min(target.vocab_size or 32000 for target in targets)
        for target in targets:
            progress.show(f"{target.name}: warming up")
            warm = Limits(options.warmup, 0, 0, 600)
            run = await drive(target, Point(clients=1), options.arrivals,
                              sessions(_without_trace(shape), [options.seed, WARM_UP], vocab_size), [], warm, False,
                              lambda: None)
            errors = [answer.error for answer in run.answers if answer.error]
            if errors:
                raise RuntimeError(f"{target.name}: {errors[0]}")
        for number in range(options.rounds):
            for order, point in enumerate(points):
                for target in targets:
                    progress.show(f"{target.name}, {point}")

                    def count() -> None:
                        if bounded:
                            progress.advance()
                            progress.show(f"{target.name}, {point}")

                    seed = [options.seed, number, order]
                    limits = Limits(totals[order], options.duration or 0, options.think, 60)
                    run = await drive(target, point, options.arrivals, sessions(shape, seed, vocab_size), seed, limits,
                                      bool(shape.trace), count)
                    figures = next(f for f in found if (f.target, f.point) == (target.name, point))
                    figures.add(run.answers, run.seconds, options.slo)
                    if not bounded:
                        progress.advance()
    finally:
        progress.close()
        for target in targets:
            await target.close()
    return found


def _without_trace(shape: Shape) -> Shape:
    if not shape.trace:
        return shape
    _, prompt, output = shape.trace[0]
    return Shape(lambda rng: prompt, lambda rng: output, lambda rng: 1, shape.prefix, shape.prefixes)


def _target(text: str, options: argparse.Namespace, points: list[Point], stack: contextlib.ExitStack) -> Target:
    name, what = text, text
    label, equals, rest = text.partition("=")
    if equals and label and not set(label) & set(":/"):
        name, what = label, rest
    if what.startswith(("http://", "https://")):
        chat = options.chat or _has_turns(options)
        return OpenAI(name, what, options.model_name, options.temperature, chat, 0, os.environ.get(options.key_env, ""),
                      options.body)
    if what == "engine":
        from allspark_server import Engine
        engine = stack.enter_context(Engine())
        _load(engine, options, points)
        return InProcess(name, engine, MODEL, options.temperature)
    if what == "group":
        from allspark_client import ClientEngine
        words = ["--ranks", str(options.ranks)] if options.ranks else []
        words += ["--threads", str(options.threads)] if options.threads else []
        group = stack.enter_context(background_group(words))
        with ClientEngine(group.addresses[0]) as engine:
            _load(engine, options, points)
        return Group(name, group.addresses[0], MODEL, options.temperature)
    return Group(name, what, options.model_name, options.temperature)


def _has_turns(options: argparse.Namespace) -> bool:
    import numpy as np
    rng = np.random.default_rng(0)
    return any(options.turns(rng) > 1 for _ in range(100))


def _load(engine, options: argparse.Namespace, points: list[Point]) -> None:
    from allspark_client.config import AsModelConfig
    checkpoint = Path(options.model).expanduser().resolve() if options.model else shipped_model()
    if not checkpoint.exists():
        raise ValueError(f"--model {options.model}: there is no such file or directory")
    fields = {"model_name": MODEL, "model_path": str(checkpoint),
              "engine_max_batch": max(32, *(point.clients for point in points))}
    if options.threads:
        fields["num_threads"] = options.threads
    engine.install_model(AsModelConfig.from_dict(fields | set_fields(options.set)).validate())
    engine.start_model(MODEL)


def _report(found: list[Figures], options: argparse.Namespace) -> dict:
    plain = {key: str(value) if isinstance(value, (Path, Arrivals)) else value for key, value in vars(options).items()
             if not callable(value) and key not in ("slo", "handler", "command", "mode")}
    return {"schema": SCHEMA, "benchmark": "serving", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count()}, "words": sys.argv[1:],
            "settings": plain, "slo": options.slo.limits, "results": [figures.to_dict() for figures in found]}
