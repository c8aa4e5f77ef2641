"""The input stage is a line: a request enters few modules, and hardly any of them twice."""

from __future__ import annotations

import pytest
from request_path import REQUESTS, entered_again, entries

from allspark_client import AsModelConfig
from allspark_server.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_model):
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", str(tiny_model), weight_dtype="float32"))
        engine.start_model("m")
        yield engine


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_passes_few_modules_once(engine, kind):
    entries(engine, "m", *REQUESTS[kind])  # modules that are loaded and processes that start on first use
    order = entries(engine, "m", *REQUESTS[kind])
    assert len(set(order)) <= 13, order
    assert entered_again(order) <= 4, order
