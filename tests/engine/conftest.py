"""Fixtures of the engine's tests."""
from __future__ import annotations

import pytest

from allspark_server.engine.engine import Engine
from support.engine_helpers import config
from support.fake_group import FakeGroup


@pytest.fixture
def make_engine():
    engines = []

    default = config()

    def make(model=default, start=True, state_file=None, **group):
        engine = Engine(group=FakeGroup(**group), state_file=state_file)
        engines.append(engine)
        if model is not None:
            engine.install_model(model)
            if start:
                engine.start_model(model.model_name)
        return engine

    yield make
    for engine in engines:
        engine.close()
