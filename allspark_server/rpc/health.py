"""Health checks of rank 0's service (grpc.health.v1), and its calls to itself."""
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger(__name__)

SERVICE_NAME = "allspark.Allspark"
#: the name of a model in grpc.health.v1 is this prefix and the model's name
MODEL_HEALTH = "allspark.Model/"
_INTERVAL_SECONDS = 1.0     # between looks at the engine, and between the service's calls to itself
_OWN_CALL_SECONDS = 10.0    # time limit of a call to itself


class Health:
    """The states that health checks report: of the service, and of each model."""

    def __init__(self, engine: Engine, draining: Callable[[], bool]):
        self._engine, self._draining = engine, draining
        self.servicer = health.aio.HealthServicer()
        self._reported: dict[str, bool | None] = {}     # None: the name is no longer known
        #: when a call of the service to itself was last answered, on the monotonic clock; 0.0: it makes none
        self.answered = 0.0

    async def update(self) -> None:
        """Report the current states.

        The service is healthy while it takes requests and nothing that should serve has failed; a model, while it runs
        or a request would load it.
        """
        failures = self._engine.failures()
        healthy = not failures and not self._draining()
        states: dict[str, bool | None] = dict.fromkeys(self._reported)
        states |= {"": healthy, SERVICE_NAME: healthy}
        states |= {MODEL_HEALTH + model.name: model.running or model.on_demand for model in self._engine.list_models()}
        if healthy is not self._reported.get("") and failures:
            logger.error("health checks now say NOT_SERVING: %s",
                         "; ".join(f"{name or 'engine'}: {why}" for name, why in failures.items()))
        status = health_pb2.HealthCheckResponse
        for name, serving in states.items():
            if name not in self._reported or serving is not self._reported[name]:
                await self.servicer.set(name, status.SERVICE_UNKNOWN if serving is None else
                                        status.SERVING if serving else status.NOT_SERVING)
        self._reported = states

    async def watch(self) -> None:
        """Update the states every second."""
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            try:
                await self.update()
            except Exception:   # the loop must continue
                logger.exception("updating the state of health checks failed")

    async def call_itself(self, address: str) -> None:
        """Make health calls to the service as a client does, to verify that it still answers clients."""
        self.answered = time.monotonic()
        async with grpc.aio.insecure_channel(address, [("grpc.default_authority", "localhost")]) as channel:
            check = channel.unary_unary(f"/{health.SERVICE_NAME}/Check",
                                        health_pb2.HealthCheckRequest.SerializeToString,
                                        health_pb2.HealthCheckResponse.FromString)
            while True:
                try:
                    await check(health_pb2.HealthCheckRequest(), timeout=_OWN_CALL_SECONDS)
                    self.answered = time.monotonic()
                except grpc.aio.AioRpcError as error:
                    logger.warning("a health call to this server itself failed: %s", error.details())
                await asyncio.sleep(_INTERVAL_SECONDS)
