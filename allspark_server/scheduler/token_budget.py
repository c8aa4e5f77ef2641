"""The token budget of a step: how many rows a step may have, learned from what steps cost."""

from __future__ import annotations

import math


class TokenBudget:
    """How large steps may be. The output of requests does not depend on it.

    With a target, step times are kept below it. Without a target, and unless the number of rows is fixed, a step with
    prompts may take up to 50 ms, which readers of a stream do not notice. If decode alone takes more than 20 ms,
    prompts get time in proportion to their number: a few prompts make the inter-token latency at most two and a half
    times as long, whatever their length; many prompts are computed at nearly full speed.

    `shared_rows`: the most rows of a step in which sequences decode, where others may have more: as many as take a
    second, and at least so many. 0: all steps may have `max_rows`.

    The unit of cost is a row without context; each position of context adds `price` to it. Decode-only steps show the
    base cost of a step, other steps what prompt rows add to it. So the first prompt after a pause gets at once all the
    time that the target leaves.
    """

    _MEMORY = 0.95  # decay of the learned values with each step
    _MARGIN, _STRIDE = 0.9, 1.25  # fraction of the target to use; largest growth of the cost from one step to the next
    _FIRST = 4  # a step's cost while nothing is known, as a multiple of the fewest rows
    _UNNOTICED = 0.05  # seconds between tokens that readers do not notice
    _ALONE = 1.0  # seconds of a step without decoding
    _PART = 1.5  # time that few prompts may add to a decode step, relative to its own; less costs throughput

    def __init__(self, max_rows: int, min_rows: int, target_ms: float, fixed: bool = False, shared_rows: int = 0):
        self._shared = 0 if fixed or target_ms > 0 or shared_rows >= max_rows else shared_rows
        self._min, self._max, self._target = min(min_rows, max_rows), max_rows, target_ms / 1e3
        self._learns = self._target > 0 or not fixed
        self.price = 0.0
        self._rows = min(max_rows, self._FIRST * self._min)  # of a step that holds the target
        self._base = [0.0, 0.0, 0.0]  # of steps without a prompt: rows, positions before them, seconds
        self._row = 0.0  # seconds for a row; 0: unknown
        self._long_row = 0.0  # the same in steps of more than the shared rows
        # sums of rows^2, rows * context, context^2, rows * seconds, context * seconds
        self._sums = [0.0, 0.0, 0.0, 0.0, 0.0]

    def for_prompts(self, decoding: int, context: int, prompts: int) -> float:
        """The cost that rows of prompts may have in a step. `decoding`: running sequences that get a row in it;
        `context`: positions before these rows, in all; `prompts`: prompts that want rows, waiting ones included.
        """
        if self._target > 0:
            return self._rows - decoding - self.price * context
        base = self._base[2]
        if not decoding or not base or not self._row:
            return math.inf
        return max(self._PART * base * max(1.0, prompts / decoding), self._UNNOTICED - base) / self._row

    def most_rows(self, decoding: int, planned: int) -> float:
        """The most rows that prompts may have in a step, whatever they cost. `planned`: positions before these rows in
        the first prompt.
        """
        if not self._shared:
            return math.inf
        if decoding:
            return self._shared - decoding
        seconds = (self._long_row or self._row) * (1 + self.price * planned)
        return max(self._shared, self._ALONE / seconds) if seconds else self._shared

    def learn(self, rows: int, context: int, seconds: float, decoding: int = 0) -> None:
        """Learns from a step. `context`: positions before its rows, in all; `decoding`: the rows that belong to running
        sequences.
        """
        if not self._learns or rows < 1:
            return
        if self._shared and not decoding and rows > self._shared:
            # Apart: such a row may cost much less, as more of them share what a step reads.
            seconds /= rows + self.price * context
            self._long_row = (self._long_row + seconds) / 2 if self._long_row else seconds
            return
        base_rows, base_context, base = self._base if decoding else [0.0, 0.0, 0.0]
        if rows == decoding:
            # Limit outliers: another process may have used the CPU.
            cost = [rows, context, min(seconds, 2 * base) if base else seconds]
            kept = self._MEMORY if base else 0.0
            self._base = [kept * old + (1 - kept) * new for old, new in zip(self._base, cost)]
            base_rows, base_context, base = self._base
        else:
            self._learn_prompt(max(rows - base_rows, 1.0), max(context - base_context, 0.0), max(seconds - base, 0.0))
        if self._row and self._target > 0:
            left = (self._MARGIN * self._target - base) / self._row
            wanted = left + base_rows + self.price * base_context
            limit = max(self._rows, self._STRIDE * (rows + self.price * context))
            self._rows = max(self._min, min(int(wanted), int(limit), self._max))

    def _learn_prompt(self, rows: float, context: float, seconds: float) -> None:
        """Least squares of seconds = a * rows + b * context."""
        if self._row:
            seconds = min(seconds, 1.5 * self._row * (rows + self.price * context))
        terms = (rows * rows, rows * context, context * context, rows * seconds, context * seconds)
        self._sums = [self._MEMORY * old + new for old, new in zip(self._sums, terms)]
        rr, rc, cc, rs, cs = self._sums
        determinant = rr * cc - rc * rc
        row = (cc * rs - rc * cs) / determinant if determinant > 1e-6 * rr * cc else 0.0
        if row > 0:
            self._row, self.price = row, max(0.0, (rr * cs - rc * rs) / determinant / row)
        else:  # keep the known price
            self._row = seconds / (rows + self.price * context)
