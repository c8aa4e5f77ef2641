"""Deadlines of requests that have not begun."""

from __future__ import annotations

import heapq
import math
import time

from .request import Request


class Deadlines:
    """A heap of requests by deadline, on the engine's thread. Requests that have begun leave it lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Takes a request, if it has a deadline."""
        if request.deadline < math.inf:
            heapq.heappush(self._heap, (request.deadline, request.handle, request))

    def seconds_left(self) -> float | None:
        """The time until the next deadline; None if there is none."""
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None

    def take_missed(self, live: int) -> list[Request]:
        """Removes and returns the requests that have missed their deadline. `live`: the model's live requests."""
        heap, missed = self._heap, []
        while heap and (heap[0][2].begun or heap[0][0] <= time.monotonic()):
            request = heapq.heappop(heap)[2]
            if not request.begun:
                missed.append(request)
        if len(heap) > 2 * live + 64:  # requests that have begun may never reach the top
            heap[:] = [entry for entry in heap if not entry[2].begun]
            heapq.heapify(heap)
        return missed
