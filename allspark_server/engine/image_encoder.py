"""Computes the rows of images with a model's vision tower, between the model's steps, and keeps them.

Rows are computed once while they are kept, by content and scope, whatever the batch. A large image is computed in
parts, so that streams do not wait for it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus

from ..runtime.plan import (
    PART,
    SEGMENTS,
    Flag,
    NewSlot,
    SamplingParams,
    WorkItem,
    WorkTable,
    encode_plan,
    part_of_step,
    positions_section,
    rows_section,
)
from ..runtime.rank_models import tower_name
from .image_parts import PART_SECONDS, Pace
from .threads import one_thread

if TYPE_CHECKING:
    from allspark_client.types import GenerateRequestStatus

    from ..images import ImageInput
    from ..runtime.tower import TowerRunner

_SAMPLING = SamplingParams(do_sample=False).encode()


@dataclass(eq=False)
class _Job:
    """An image to compute. `wanted()`: whether a request still waits for it."""

    key: tuple[str, bytes]
    image: ImageInput
    order: _Order
    future: Future[np.ndarray] = field(default_factory=Future)
    wanted: list[Callable[[], bool]] = field(default_factory=list)


@dataclass
class EncoderStep:
    """A part of a step of the tower: its plan, and the images whose rows the last part gives. `work`: the operations of
    each op.
    """

    jobs: list[_Job]
    plan: bytes
    last: bool
    work: np.ndarray
    masked: tuple[()] = ()      # as a step of a model that samples

    def encode(self) -> bytes:
        """The wire form of the step plan."""
        return self.plan


@dataclass
class _Current:
    """The step that is being planned: its images, the operations of each op, and where the next part begins."""

    jobs: list[_Job]
    work: np.ndarray
    begin: int = 0


class ImageEncoder:
    """The vision tower of a model as the pipeline sees it; `request` is for any thread.

    `failure`: why it computes no more images, until its model is loaded again. `most_tokens`: the most embedding rows
    of a view. `vision`: the tower's description. `row_end`: the row that ends a row of an image, float32 [width]; None
    if the model has none.
    """

    has_quarantined = has_others = False    # images are not quarantined
    lost = False

    def __init__(self, model: str, tower: TowerRunner, most_bytes: int, wake: Callable[[Callable[[], None]], None]):
        """`tower`: rank 0's. `most_bytes`: of rows that are kept without a request that needs them. `wake`: runs a
        command on the engine's thread.
        """
        self.name = tower_name(model)
        self.failure: str | None = None
        self._model, self.vision, self._rows, self._most = model, tower.vision, tower.rows, most_bytes
        self.row_end = tower.row_end
        self.most_tokens, self._pace = tower.tokens, Pace(tower.costs, tower.rate)
        self._wake = wake
        self._lock = threading.Lock()       # of the next three
        self._kept: OrderedDict[tuple[str, bytes], np.ndarray] = OrderedDict()
        self._bytes = 0
        self._jobs: dict[tuple[str, bytes], _Job] = {}
        self._queue: deque[_Job] = deque()      # on the engine's thread, as the rest
        self._current: _Current | None = None   # the step of which parts are left
        self._live = 0      # slots of the last step, which the next one frees
        self.encoded = self.reused = 0      # images computed, and found

    # --- any thread ---

    def kept(self, scope: str, digest: bytes) -> np.ndarray | None:
        """The rows of an image that are kept, float32 [tokens, width]."""
        with self._lock:
            rows = self._kept.get((scope, digest))
            if rows is not None:
                self._kept.move_to_end((scope, digest))
                self.reused += 1
            return rows

    def request(self, scope: str, image: ImageInput, wanted: Callable[[], bool]) -> Future[np.ndarray]:
        """The rows of an image, float32 [tokens, width]. Requests of one `scope` share them. The image may be left out
        once `wanted()` of all its requests is false. AllSparkError if the tower has failed.
        """
        if self.failure is not None:
            raise self._failed()
        key = (scope, image.digest)
        if (rows := self.kept(scope, image.digest)) is not None:
            found: Future[np.ndarray] = Future()
            found.set_result(rows)
            return found
        with self._lock:
            job = self._jobs.get(key)
            if job is not None:
                job.wanted.append(wanted)
                return job.future
            job = self._jobs[key] = _Job(key, image, _Order.of(image, self.vision), wanted=[wanted])
        self._wake(lambda: self._queue.append(job))
        return job.future

    # --- the engine's thread ---

    @property
    def has_work(self) -> bool:
        """Whether a step might be planned."""
        return self.failure is None and bool(self._queue or self._current is not None)

    @one_thread
    def plan(self) -> EncoderStep | None:
        """The next part of a step."""
        if self._current is None:
            self._begin()
        current = self._current
        if current is None:
            return None
        begin, end = current.begin, self._pace.cut(current.work, current.begin)
        current.begin, last = end, end == self._pace.end
        plan = part_of_step(begin, end) if begin else self._plan(current.jobs, 0 if last else end)
        if last:
            self._current = None
        return EncoderStep(current.jobs, plan, last, self._pace.of_part(current.work, begin, end))

    @one_thread
    def complete(self, step: EncoderStep, result: Any, seconds: float) -> None:
        """Takes the results of the oldest running part, which took `seconds`."""
        self._pace.learn(step.work, seconds)
        if not step.last:
            return
        hidden, begin = result.hidden, 0
        for job in step.jobs:
            rows = np.empty((job.image.tokens, hidden.shape[1]), np.float32)
            rows[job.order.units] = hidden[begin:begin + job.image.tokens]
            rows.flags.writeable = False
            begin += job.image.tokens
            self._keep(job, rows)

    @one_thread
    def end_all(self, status: GenerateRequestStatus, error: AllSparkError | None = None) -> None:
        """Fails the requests that wait for images."""
        error = self._failed() if self.failure is not None else error or AllSparkError(
            AsStatus.ALLSPARK_RUNTIME_ERROR, f"model {self._model!r} was stopped")
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        self._queue.clear()
        self._current = None
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)

    def release_masks(self) -> None:
        """As of a model that samples: there are none."""

    # --- internals ---

    def _failed(self) -> AllSparkError:
        return AllSparkError(
            AsStatus.ALLSPARK_RUNTIME_ERROR,
            f"the vision tower of model {self._model!r} has failed ({self.failure}); release and install the model to "
            "load it again")

    def _work(self, jobs: list[_Job]) -> np.ndarray:
        """The operations of each op that images take."""
        return self._pace.work([len(job.image.patches) for job in jobs], self.vision.merge)

    def _begin(self) -> None:
        """Plans a step with the next images that are still wanted: one, or several as long as they take no more than a
        part of a step.
        """
        from ..runtime.tower import MAX_IMAGES

        jobs: list[_Job] = []
        rows = 0
        while self._queue and len(jobs) < MAX_IMAGES:
            job = self._queue[0]
            if not any(wanted() for wanted in job.wanted):
                self._queue.popleft()
                self._drop(job)
                continue
            count = len(job.image.patches)
            if jobs and (rows + count > self._rows or self._pace.seconds(self._work([*jobs, job])) > PART_SECONDS):
                break
            jobs.append(self._queue.popleft())
            rows += count
        if jobs:
            self._current = _Current(jobs, self._work(jobs))

    def _plan(self, jobs: list[_Job], end: int) -> bytes:
        """The plan of a step, or of its first part, which ends at `end`; 0: it is not divided."""
        from ..runtime.tower import SPAN_SIZE

        new, work, span = [], [], 0
        sections: list[tuple[int, Any]] = []
        for slot, job in enumerate(jobs):
            patches, order = job.image.patches, job.order
            count = len(patches)
            spans = list(range(span, span + -(-count // SPAN_SIZE)))
            span += len(spans)
            new.append(NewSlot(slot, np.zeros(count, np.int32), _SAMPLING))  # type: ignore[arg-type]
            work.append(WorkItem(slot, count, int(Flag.HIDDEN), spans=spans, outputs=count // self.vision.merge))
            sections.append(positions_section(slot, order.places, 0))
            if order.ends is not None:
                sections.append((SEGMENTS, np.concatenate([np.array([slot], np.int32), order.ends])))
            sections.append(rows_section(slot, 0, patches[order.rows]))
        if end:
            sections.append((PART, [0, end]))
        free, self._live = list(range(self._live)), len(jobs)
        return encode_plan(free, new, WorkTable.of(work), sections)

    def _keep(self, job: _Job, rows: np.ndarray) -> None:
        with self._lock:
            self._jobs.pop(job.key, None)
            self.encoded += 1
            if rows.nbytes <= self._most:
                self._kept[job.key] = rows
                self._bytes += rows.nbytes
            while self._bytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        if not job.future.done():
            job.future.set_result(rows)

    def _drop(self, job: _Job) -> None:
        """Leaves out an image that nobody waits for, unless a request has asked for it just now."""
        with self._lock:
            if any(wanted() for wanted in job.wanted):
                self._queue.append(job)
                return
            self._jobs.pop(job.key, None)
        job.future.cancel()


@dataclass(frozen=True)
class _Order:
    """In which order the tower takes an image's patches. The processor has them in raster order of units, the patches
    that are merged.

    rows: int64 [patches], the processor's row of each of the tower's. units: int64 [outputs], likewise for outputs.
    places: int32 [patches, 3], time, height and width of each row. ends: int32, where segments of attention end; None
    for one.
    """

    rows: np.ndarray
    units: np.ndarray
    places: np.ndarray
    ends: np.ndarray | None

    @staticmethod
    def of(image: ImageInput, vision: Any) -> _Order:
        """The order for an image of a tower."""
        frames, height, width = image.grid
        side = math.isqrt(vision.merge)
        shape = (frames, height // side, side, width // side, side)
        places = np.indices(image.grid).reshape(3, -1).T.reshape(*shape, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 3)
        if vision.leading:
            places = np.concatenate([np.zeros((vision.leading, 3), np.int64), places])
        units, ends = np.arange(len(places) // vision.merge), None
        if vision.window:
            units, ends = _windows(frames, height // side, width // side, vision.window // side, vision.merge)
        rows = (units[:, None] * vision.merge + np.arange(vision.merge)).reshape(-1)
        return _Order(rows, units, np.ascontiguousarray(places[rows], np.int32), ends)


def _windows(frames: int, height: int, width: int, side: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """The units of an image by windows of side x side units, and where each window's rows end: Qwen2.5-VL's
    get_window_index.
    """
    index = np.arange(frames * height * width).reshape(frames, height, width)
    windows = [index[t, y:y + side, x:x + side].reshape(-1) for t in range(frames) for y in range(0, height, side)
               for x in range(0, width, side)]
    return np.concatenate(windows), np.cumsum([merge * len(window) for window in windows]).astype(np.int32)
