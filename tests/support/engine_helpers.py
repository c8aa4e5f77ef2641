"""Helpers for tests of an engine that runs on a group without tensors."""

from __future__ import annotations

import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus, GenerateRequestStatus

Status = GenerateRequestStatus


def config(name="m", **fields) -> AsModelConfig:
    return AsModelConfig(model_name=name, model_path="/nowhere", **fields)


def collect(results) -> list[int]:
    return [i for elements in results for i in elements.ids_from_generate]


def run(engine, prompt, name="m", **generate) -> list[int]:
    _, handle, results = engine.start_request(name, {"input_ids": prompt}, {"eos_token_id": -1, **generate})
    out = collect(results)
    assert results.GenerateStatus() is Status.GenerateFinished
    assert engine.release_request(name, handle) == AsStatus.ALLSPARK_SUCCESS
    return out


def refused(status, call, *args, match=None):
    with pytest.raises(AllSparkError, match=match) as caught:
        call(*args)
    assert caught.value.status is status
