"""Vision towers on several ranks, in parts: every part ends on all ranks, and the bits are those of whole steps."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_server.engine.image_encoder import ImageEncoder
from allspark_server.images import read_processor
from support.driver import Driver
from support.vision import checkpoint, picture


def rows(driver: Driver, encoder: ImageEncoder, images, parts: int) -> list[bytes]:
    """The rows of images that are computed one by one, each in so many parts."""
    encoder._seconds = lambda jobs: 0.05 * parts * len(jobs)
    encoder._most_parts = 1 << 20
    futures = [encoder.request("", view, lambda: True) for image in images for view in image.views(image.tokens + 1)]
    while encoder.has_work:
        step = encoder.plan()
        results = driver._each(lambda runner, step=step: runner.tower.step(step.plan))
        encoder.complete(step, results[0], 0.01)
    return [future.result().tobytes() for future in futures]


@pytest.mark.timeout(60)    # ranks that cut a step at different ops wait for each other
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "mistral3", "gemma3", "gemma4", "gemma4-small", "llava"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts(name, world):
    directory = checkpoint(name)
    processor = read_processor(directory, json.loads((directory / "config.json").read_text()))
    images = processor.process([picture(50, 70), picture(13, 90, 1)])
    with Driver(directory, world, engine_max_length=256, max_image_tokens=128) as driver:
        encoder = ImageEncoder(name, driver.runners[0].tower, 0, lambda command: command())
        whole = rows(driver, encoder, images, 1)
        for parts in (2, 3, 17, 1000):
            assert rows(driver, encoder, images, parts) == whole
