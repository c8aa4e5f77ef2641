"""`allspark bench serving`: latencies and throughput under the load of users."""
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
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from allspark_client import AbstractEngine
from allspark_client.config import AsModelConfig

from ..group.background import background_group, shipped_model
from ..options import set_fields
from ..progress import Progress
from .arguments import checked, list_of
from .latencies import METRICS, SCHEMA, Figures, Target as Slo, plot, table
from .load import Limits, Point, drive
from .targets import Group, InProcess, OpenAI, Target, failures
from .workload import Arrivals, Shape, distribution, read_trace, sessions

Number = TypeVar("Number", int, float)

MODEL = "bench"
WARM_UP = 1 << 31    # the round number in the seed of the warm-up

DESCRIPTION = """\
Measures what users of a server see: time to first token (ttft), time between tokens (itl), end to end (e2e), tokens/s,
and with --slo the requests per second that meet a target (goodput).

closed loop (--clients 1,4,16): so many users, each with one request at a time: throughput at a concurrency.
open loop (--rate 1,2,4): so many sessions arrive per second, whether or not earlier ones have ended, as at a public
  server. Latencies count from when a request was due, so they show when a server falls behind.
Each value of the list is a load. All loads are measured in turn, for all targets, --rounds times, so that a machine
whose speed drifts treats all alike. The table has the median round.

targets (--target, repeatable; NAME= in front names it in the table):
  engine           an Engine of --model in this process. Its threads share the Python interpreter with the load's
                   threads; for a server's figures use group
  group            a server group of --model, started for this run (the default)
  ADDRESS[,…]      a running group or pool: host:port or unix:/path; $ALLSPARK_TOKEN_FILE has its token
  http://…         an OpenAI-compatible endpoint (needs httpx): /v1/completions with ids, or /v1/chat/completions with
                   words if sessions have several turns (or with --chat). Each chunk counts as a token; the total is the
                   usage that the endpoint reports
All targets get the same requests: lengths, ids, sessions and arrivals depend only on --seed and the round.

lengths (--prompt, --output, --turns): a number, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA, exp:MEAN,
choice:A:B:…; or --trace FILE, JSON lines {"timestamp": ms, "input_length": n, "output_length": n}, with their
arrivals (--rate 2: twice as fast). Prompts are random ids. Output is greedy and ends at its length."""

EPILOG = """\
examples:
  allspark bench serving                                            the model that ships, 1, 4 and 16 clients
  allspark bench serving --model DIR --rate 1,2,4,8 --slo ttft=500,itl=50 --plot load.png --json load.json
  allspark bench serving --target unix:/run/allspark.sock --rate 4 --arrivals burst:16 --prompt lognormal:300:1
  allspark bench serving --model DIR --clients 32 --turns 6 --prefix 512 --prefixes 4     chats with system prompts
  allspark bench serving --target ours=http://127.0.0.1:8000 --target llama=http://127.0.0.1:8080 --vocab-size 32000 \\
      --clients 1,4,16 --rounds 3                                   two servers, interleaved"""


def _above_zero(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError(f"{text} must be above 0")
        return value
    return parse


def add_serving(modes: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `serving` to the modes of `allspark bench` (argparse's subparsers)."""
    p = modes.add_parser("serving", help="latencies and throughput under load, of groups, pools and OpenAI endpoints",
                         description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(handler=run_serving)
    g = p.add_argument_group("load")
    g.add_argument("--clients", type=list_of(_above_zero(int)), metavar="LIST", help="closed loop (default 1,4,16)")
    g.add_argument("--rate", type=list_of(_above_zero(float)), metavar="LIST", help="open loop: sessions a second")
    g.add_argument("--arrivals", type=checked(Arrivals.parse), default=Arrivals("poisson"), metavar="KIND",
                   help="arrivals of the open loop: poisson (default), constant, burst:N, gamma:SHAPE")
    g.add_argument("--requests", type=checked(_above_zero(int)), metavar="N",
                   help="requests of a load in a round (default: 8 per client, or 20 s of the rate; at least 16)")
    g.add_argument("--duration", type=checked(_above_zero(float)), metavar="S",
                   help="send requests for so long instead, then wait for those in progress")
    g.add_argument("--rounds", type=checked(_above_zero(int)), default=1, metavar="N", help="default %(default)s")
    g.add_argument("--warmup", type=int, default=2, metavar="N",
                   help="requests to each target before the measurement (default %(default)s)")
    g.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the workload (default %(default)s)")
    g = p.add_argument_group("requests")
    g.add_argument("--prompt", type=checked(distribution), default=distribution("128"), metavar="DIST",
                   help="tokens of a turn's prompt (default 128)")
    g.add_argument("--output", type=checked(distribution), default=distribution("64"), metavar="DIST",
                   help="tokens of the answer (default 64)")
    g.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths from a file instead")
    g.add_argument("--prefix", type=int, default=0, metavar="N",
                   help="tokens that first prompts share, in addition to --prompt")
    g.add_argument("--prefixes", type=checked(_above_zero(int)), default=1, metavar="N",
                   help="how many such prefixes there are (default 1)")
    g.add_argument("--turns", type=checked(distribution), default=distribution("1"), metavar="DIST",
                   help="turns of a session; each continues the conversation (default 1)")
    g.add_argument("--think", type=float, default=0.0, metavar="S",
                   help="seconds between an answer and the next turn (default 0)")
    g.add_argument("--schema", type=Path, metavar="FILE",
                   help="constrained decoding: answers must match this JSON schema")
    g.add_argument("--guided", type=float, default=1.0, metavar="PART",
                   help="the part of the requests with --schema (default 1: all)")
    g.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    g = p.add_argument_group("targets")
    g.add_argument("--target", action="append", default=[], metavar="[NAME=]WHAT", help="see above; repeatable")
    g.add_argument("--model", metavar="DIR", help="the model of engine and group (default: the shipped model)")
    g.add_argument("--ranks", type=int, default=0, metavar="N", help="ranks of group (default: one per NUMA node)")
    g.add_argument("--threads", type=int, default=0, metavar="N",
                   help="threads of each rank (default: every physical core)")
    g.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of AsModelConfig")
    g.add_argument("--model-name", default="", metavar="NAME",
                   help="the model at addresses and endpoints (default: the one that is served there)")
    g.add_argument("--chat", action="store_true", help="endpoints: use chat completions, with words instead of ids")
    g.add_argument("--vocab-size", type=checked(_above_zero(int)), default=0, metavar="N",
                   help="prompts consist of ids below this (default: the smallest vocabulary of the targets; 32000 "
                        "for endpoints, which do not report theirs)")
    g.add_argument("--key-env", default="OPENAI_API_KEY", metavar="NAME",
                   help="endpoints' API key (default %(default)s)")
    g.add_argument("--body", type=checked(json.loads), default={"ignore_eos": True}, metavar="JSON",
                   help="endpoints: fields that are added to each request (default: %(default)s)")
    g = p.add_argument_group("output")
    g.add_argument("--slo", type=checked(Slo.parse), default=Slo({}), metavar="LIST",
                   help=f"goodput's target in ms, such as ttft=200,itl=50; of {', '.join(METRICS)} (itl: a request's "
                        "own 99th percentile)")
    g.add_argument("--json", type=Path, metavar="FILE", help="write all figures of all rounds")
    g.add_argument("--plot", type=Path, metavar="FILE",
                   help="latency against load (.png, .svg or .pdf; needs matplotlib)")


def points_of(options: argparse.Namespace) -> list[Point]:
    """The loads."""
    if options.clients and options.rate:
        raise ValueError("--clients (closed loop) and --rate (open loop) are two different loads: give one of them")
    if options.rate or (options.trace and not options.clients):
        return [Point(rate=rate) for rate in options.rate or [1.0]]
    return [Point(clients=clients) for clients in options.clients or [1, 4, 16]]


def requests_of(point: Point, options: argparse.Namespace) -> int:
    """The number of requests in a round of a load."""
    if options.duration:
        return sys.maxsize
    return options.requests or max(16, 8 * point.clients or round(20 * point.rate))


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape of sessions."""
    if options.prefix < 0 or options.think < 0 or not 0 <= options.guided <= 1:
        raise ValueError("--prefix and --think must be at least 0, --guided between 0 and 1")
    schema = json.loads(options.schema.read_text(encoding="utf-8")) if options.schema else None
    trace = read_trace(options.trace, options.requests or sys.maxsize) if options.trace else []
    return Shape(options.prompt, options.output, options.turns, options.prefix, options.prefixes, schema,
                 options.guided, trace)


def run_serving(options: argparse.Namespace) -> int:
    """Runs the command. 1 if a target answered no request."""
    points, shape = points_of(options), shape_of(options)
    if "ALLSPARK_LOG" not in os.environ:
        logging.getLogger().setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        targets = [_target(text, options, points, stack) for text in options.target or ["group"]]
        if len({target.name for target in targets}) < len(targets):
            raise ValueError("two targets have one name: write --target NAME=WHAT")
        results = asyncio.run(_measure(targets, points, shape, options))
    print(table(results, options.slo))
    if options.json:
        options.json.write_text(json.dumps(_report(results, options), indent=1) + "\n", encoding="utf-8")
    if options.plot and not plot(results, options.plot):
        print(f"{options.plot} was not drawn: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    return 0 if all(any(r["requests"] for r in figures.rounds) for figures in results) else 1


async def _measure(targets: list[Target], points: list[Point], shape: Shape,
                   options: argparse.Namespace) -> list[Figures]:
    results = [Figures(target.name, point) for target in targets for point in points]
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
                    label = f"{target.name}, {point}"
                    progress.show(label)

                    def count(label: str = label) -> None:
                        if bounded:
                            progress.advance()
                            progress.show(label)

                    seed = [options.seed, number, order]
                    limits = Limits(totals[order], options.duration or 0, options.think, 60)
                    run = await drive(target, point, options.arrivals, sessions(shape, seed, vocab_size), seed, limits,
                                      bool(shape.trace), count)
                    figures = next(f for f in results if (f.target, f.point) == (target.name, point))
                    figures.add(run.answers, run.seconds, options.slo)
                    if not bounded:
                        progress.advance()
    finally:
        progress.close()
        for target in targets:
            await target.close()
    return results


def _without_trace(shape: Shape) -> Shape:
    if not shape.trace:
        return shape
    _, prompt, output = shape.trace[0]
    return Shape(lambda rng: prompt, lambda rng: output, lambda rng: 1, shape.prefix, shape.prefixes)


def _target(text: str, options: argparse.Namespace, points: list[Point], stack: contextlib.ExitStack) -> Target:
    name, place = text, text
    label, equals, rest = text.partition("=")
    if equals and label and not set(label) & set(":/"):
        name, place = label, rest
    if place.startswith(("http://", "https://")):
        chat = options.chat or _has_turns(options)
        key = os.environ.get(options.key_env, "")
        return OpenAI(name, place, options.model_name, options.temperature, chat, 0, key, options.body)
    if place == "engine":
        from allspark_server import Engine
        engine = stack.enter_context(Engine())
        _load(engine, options, points)
        return InProcess(name, engine, MODEL, options.temperature)
    if place == "group":
        from allspark_client import ClientEngine
        words = ["--ranks", str(options.ranks)] if options.ranks else []
        words += ["--threads", str(options.threads)] if options.threads else []
        group = stack.enter_context(background_group(words))
        with ClientEngine(group.addresses[0]) as engine:
            _load(engine, options, points)
        return Group(name, group.addresses[0], MODEL, options.temperature)
    return Group(name, place, options.model_name, options.temperature)


def _has_turns(options: argparse.Namespace) -> bool:
    import numpy as np
    rng = np.random.default_rng(0)
    return any(options.turns(rng) > 1 for _ in range(100))


def _load(engine: AbstractEngine, options: argparse.Namespace, points: list[Point]) -> None:
    checkpoint = Path(options.model).expanduser().resolve() if options.model else shipped_model()
    if not checkpoint.exists():
        raise ValueError(f"--model {options.model}: there is no such file or directory")
    fields = {"model_name": MODEL, "model_path": str(checkpoint),
              "engine_max_batch": max(32, *(point.clients for point in points))}
    if options.threads:
        fields["num_threads"] = options.threads
    engine.install_model(AsModelConfig.from_dict(fields | set_fields(options.set)).validate())
    engine.start_model(MODEL)


def _report(results: list[Figures], options: argparse.Namespace) -> dict:
    plain = {key: str(value) if isinstance(value, (Path, Arrivals)) else value for key, value in vars(options).items()
             if not callable(value) and key not in ("slo", "handler", "command", "mode")}
    return {"schema": SCHEMA, "benchmark": "serving", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count()}, "words": sys.argv[1:],
            "settings": plain, "slo": options.slo.limits, "results": [figures.to_dict() for figures in results]}
