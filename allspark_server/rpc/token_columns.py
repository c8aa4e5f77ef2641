"""Tokens of many requests as columns of one message: making a message for each costs more than all else about it."""
from __future__ import annotations

import itertools
from typing import Any

from allspark_client._proto import allspark_pb2 as pb

#: a token as `_RequestSink` files it: (id of the request, sample, token, logprob, top, text, cached, None)
Row = tuple[int, int, int, float | None, list[tuple[int, float]], str | None, int, Any]


class TokenColumns:
    """Tokens that wait to be sent in a pb.Tokens."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        #: adds a token
        self.add = self._rows.append

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """The number of tokens and top-logprob pairs."""
        return len(self._rows) + sum([len(row[4]) for row in self._rows if row[4]])

    def move_to(self, message: pb.Tokens) -> None:
        """Move all tokens to an empty message."""
        requests, samples, ids, logprobs, tops, texts, _, _ = zip(*self._rows)
        self._rows.clear()
        message.requests.extend(requests)
        message.ids.extend(ids)
        if any(samples):
            message.samples.extend(samples)
        if any(texts):
            message.texts.extend([text or "" for text in texts])
        given = [logprob for logprob in logprobs if logprob is not None]
        if given:
            message.logprobs.extend(given)
            message.top_counts.extend([-1 if logprob is None else len(top) for logprob, top in zip(logprobs, tops)])
            pairs = itertools.chain.from_iterable([top for logprob, top in zip(logprobs, tops) if logprob is not None])
            flat: list[Any] = list(itertools.chain.from_iterable(pairs))
            message.top_ids.extend(flat[::2])
            message.top_logprobs.extend(flat[1::2])
