"""What the members of a pool count."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ._proto import allspark_pb2 as pb
from .connection import ATTEMPT_SECONDS, Member, Unavailable
from .errors import AllSparkError

if TYPE_CHECKING:
    from .client import ClientEngine


def member_metrics(engine: ClientEngine) -> dict[str, str | None]:
    """Each member's metrics in Prometheus' text format, by address; None of those that do not answer."""
    def ask(member: Member) -> str | None:
        try:
            return member.call("GetMetrics", pb.MetricsRequest(), pb.Metrics, ATTEMPT_SECONDS).text
        except (Unavailable, AllSparkError):
            return None

    members = engine._members
    with ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="allspark-metrics") as pool:
        return dict(zip((member.address for member in members), pool.map(ask, members)))
