"""The metrics of a pool's members."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ._proto import allspark_pb2 as pb
from .connection import ATTEMPT_SECONDS, Member
from .errors import AllSparkError
from .session import Unavailable

if TYPE_CHECKING:
    from .client import ClientEngine


def member_metrics(engine: ClientEngine) -> dict[str, str | None]:
    """Each member's metrics in Prometheus' text format, by its address; None for a member that does not answer."""
    def ask(member: Member) -> str | None:
        try:
            return member.call("GetMetrics", pb.MetricsRequest(), pb.Metrics, ATTEMPT_SECONDS).text
        except (Unavailable, AllSparkError):
            return None

    members = engine._pool.members
    with ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="allspark-metrics") as pool:
        return dict(zip((member.address for member in members), pool.map(ask, members)))
