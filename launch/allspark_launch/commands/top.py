"""`allspark top` and `allspark pool status`: the state and the load of groups."""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

import grpc

from allspark_client._proto import allspark_pb2 as pb
from allspark_client.unlike import unlike_members

from ..pool.members import Member, add_target_options, placed_share, targets
from . import AddCommand


def add_command(command: AddCommand) -> None:
    """Adds `top` to the parser."""
    p = command("top", top, "live view of a pool's load")
    add_target_options(p)
    p.add_argument("--once", action="store_true", help="print one table and stop")
    p.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")


def status(options: argparse.Namespace) -> int:
    """`allspark pool status`: 0 if all members serve."""
    rows = [("member", "address", "state", "ranks", "placed", "requests", "restarts", "models")]
    bad, models_of = 0, []
    for target in targets(options):
        with Member(target) as member:
            try:
                info = member.info()
                state = "draining" if info.draining else "serving" if member.serves() else "not serving"
                models = [f"{m.name} ({', '.join(_facts(m))})" for m in info.models]
                rows.append((target.name, target.address, state, str(info.rank_nums), placed_share(info),
                             str(info.requests), str(info.restarts), ", ".join(models) or "-"))
                models_of.append((target.name, info.models))
                bad += state == "not serving"
            except grpc.RpcError as error:
                bad += 1
                refused = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                rows.append((target.name, target.address, "refused" if refused else "down", "", "", "", "",
                             f"{error.code().name}: {error.details()}"))
    print("\n".join([*table(rows), *unlike_members(models_of)]))
    return 1 if bad else 0


def _facts(model: pb.ModelState) -> list[str]:
    return ["running" if model.running else "stopped", f"load {model.load}", *([model.isa] if model.isa else [])]


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The rows as lines with aligned columns."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip() for row in rows]


def top(options: argparse.Namespace) -> int:
    """`allspark top`."""
    members = [Member(t) for t in targets(options)]
    try:
        while True:
            lines = _top_table(members)
            if sys.stdout.isatty() and not options.once:
                print("\033[H\033[2J", end="")
            print("\n".join(lines), flush=True)
            if options.once:
                return 0
            time.sleep(max(0.1, options.interval))
    finally:
        for member in members:
            member.__exit__()


def _shares(ranks: Sequence[pb.RankState]) -> tuple[list[str], list[str]]:
    """The parts of their steps' time that ranks exchange and wait, as texts, and notes about ranks of experts.

    In a mixed group, the parts are those of the model's first rank, which has the messages: ranks of experts wait for
    it by design, and those of its other GPUs count their waits as computing.
    """
    def parts(chosen: Sequence[pb.RankState]) -> list[float]:
        spent = [sum(getattr(rank, f"{part}_seconds") for rank in chosen) for part in ("compute", "exchange", "wait")]
        return [part / sum(spent) for part in spent] if sum(spent) else []

    experts = [rank for rank in ranks if rank.expert_messages]
    found = parts(ranks[:1] if experts else ranks)[1:]
    shares = [f"{100 * part:.1f}%" for part in found] or ["-", "-"]
    if not experts:
        return shares, []
    rows, messages = (sum(getattr(rank, f"expert_{name}") for rank in experts) for name in ("rows", "messages"))
    busy = parts(experts)
    hits, uses = (sum(getattr(rank, f"expert_{name}") for rank in ranks) for name in ("hits", "uses"))
    return shares, [(f"experts compute {100 * busy[0]:.0f}% of steps, " if busy else "")
                    + f"{rows / messages:.1f} rows a layer" + (f", {100 * hits / uses:.0f}% hot" if uses else "")]


def _top_table(members: list[Member]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("member", "model", "running", "waiting", "tokens/s", "prefill/s", "cache", "hits", "exchange", "wait", "")]
    for member in members:
        try:
            info = member.info()
            shares, experts = _shares(info.ranks)
            notes = ["draining"] * info.draining + [f"{info.restarts} restarts"] * (info.restarts > 0) + experts
            for model in info.models:
                if model.on_demand:
                    rows.append((member.target.name, model.name, *["-"] * 8, ", ".join(["not loaded", *notes])))
                    continue
                s = member.stat(model.name)
                prefill = max(0.0, s.process_token_persec - s.generate_token_persec)
                rows.append((member.target.name, model.name, str(s.running_request), str(s.pendding_request),
                             f"{s.generate_token_persec:.1f}", f"{prefill:.1f}", f"{s.token_usage_percentage:.1f}%",
                             f"{100 * s.prefix_cache_hit_rate:.1f}%", *shares, ", ".join(notes)))
        except grpc.RpcError as error:
            rows.append((member.target.name, f"{error.code().name}: {error.details()}", *[""] * 9))
    return table(rows)
