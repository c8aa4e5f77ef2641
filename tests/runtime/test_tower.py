"""Vision towers on several ranks, in parts: every part ends on all ranks, and the bits are those of whole steps. Where
steps are cut.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_server.engine.image_encoder import ImageEncoder
from allspark_server.engine.image_parts import PART_SECONDS, Pace
from allspark_server.images import read_processor
from allspark_server.runtime.plan import OP_POSITIONS
from allspark_server.runtime.tower import OpCost
from support.driver import Driver
from support.units import GPUS, SHARED, UNIT
from support.vision import checkpoint, picture

pytestmark = pytest.mark.skipif(SHARED, reason="ranks that are threads of a process need a GPU each")

NAMES = ("qwen2.5-vl", "qwen3-vl", "mistral3", "gemma3", "gemma4", "gemma4-small", "llava", "llava-next-qwen2")
CASES = ((len(GPUS), "auto"), (len(GPUS), "w8a8")) if GPUS else (
    (1, "auto"), (2, "auto"), (3, "auto"), (1, "w8a8"), (3, "w8a8"))


def rows(driver: Driver, encoder: ImageEncoder, images, cut) -> list[bytes]:
    """The rows of images that are computed one by one, each in parts that end at cut(begin)."""
    encoder._pace.cut = lambda work, begin: min(max(begin + 1, round(cut(begin))), encoder._pace.end)
    encoder._pace.seconds = lambda work: 1.0
    vision = encoder.vision
    views = [view for image in images
             for view in image.views(vision.leading + image.grid[1] * image.grid[2] // vision.merge)]
    futures = [encoder.request("", view, lambda: True) for view in views]
    while encoder.has_work:
        step = encoder.plan()
        results = driver._each(lambda runner, step=step: runner.tower.step(step.plan))
        encoder.complete(step, results[0], 0.01)
    return [future.result().tobytes() for future in futures]


@pytest.mark.timeout(60)    # ranks that cut a step at different ops wait for each other
@pytest.mark.parametrize("name, world, dtype", [
    pytest.param(name, *case, marks=() if not i or i % len(CASES) == j else pytest.mark.slow)
    for i, name in enumerate(NAMES) for j, case in enumerate(CASES)])
def test_parts(name, world, dtype):
    directory = checkpoint(name)
    processor = read_processor(directory, json.loads((directory / "config.json").read_text()))
    images = processor.process([picture(50, 70), picture(13, 90, 1)])
    with Driver(directory, world, engine_max_length=256, max_image_tokens=128, vision_weight_dtype=dtype,
                **UNIT) as driver:
        encoder = ImageEncoder(name, driver.runners[0].tower, 0, lambda command: command())
        end, rng = encoder._pace.end, np.random.default_rng(7)
        whole = rows(driver, encoder, images, lambda begin: end)
        for parts in (2, 3, 17, 1000):
            assert rows(driver, encoder, images, lambda begin, parts=parts: begin + end / parts) == whole
        for parts in (5, 100):      # any lengths
            assert rows(driver, encoder, images,
                        lambda begin, parts=parts: begin + rng.exponential(end / parts)) == whole


@pytest.mark.skipif(bool(GPUS), reason="GPUs time whole steps, and join other ops")
def test_the_profile_shows_ops_of_the_tower():
    """Once for each step, however it is cut, beside those of the model."""
    directory = checkpoint("qwen2.5-vl")
    config = json.loads((directory / "config.json").read_text())
    images = read_processor(directory, config).process([picture(50, 70)])
    with Driver(directory, 1, engine_max_length=256, max_image_tokens=128) as driver:
        runner, counted = driver.runners[0], []
        encoder = ImageEncoder("m", runner.tower, 0, lambda command: command())
        end = encoder._pace.end
        for parts in (1, 50):
            rows(driver, encoder, images, lambda begin, parts=parts: begin + end / parts)
            ops = {(op.op, op.weight): op for op in runner.profile().ops}
            counted.append([ops["tower:rope+span_attention", ""].count, ops["tower:linear+add", "attn.proj"].count,
                            ops["tower:rope+span_attention", ""].operations])
        layers, hidden = config["vision_config"]["depth"], config["vision_config"]["hidden_size"]
        assert counted[0][:2] == [layers, layers]
        assert counted[1] == [2 * value for value in counted[0]]
        patches = len(images[0].patches)
        assert 0 < counted[0][2] < layers * (4 * hidden * patches ** 2 + 6 * hidden * patches)  # windows


def test_parts_take_as_long_by_what_ops_cost():
    pace = Pace([OpCost("other", 10), OpCost("product", 1e6), OpCost("attention", 0, pair=1e3), OpCost("other", 0, 7),
                 OpCost("product", 0, output=4e6)])
    work = pace.work([4000, 400], 4)
    np.testing.assert_array_equal(work, [44_000, 4.4e9, 1.616e10, 7700, 4.4e9])
    begin, parts = 0, []
    while begin < pace.end:
        end = pace.cut(work, begin)
        parts.append(pace.of_part(work, begin, end))
        begin = end
    times = [pace.seconds(part) for part in parts]
    np.testing.assert_allclose(np.sum(parts, axis=0), work)
    assert max(times) < 1.11 * PART_SECONDS and len(parts) < 1.1 * pace.seconds(work) / PART_SECONDS + 1


def test_rates_of_kinds_are_learned():
    pace = Pace([OpCost("product", 1e6), OpCost("attention", 5e5), OpCost("other", 1e3)])
    work, rates = pace.work([5000], 4), (8e10, 1e10, 3e10)
    for _ in range(3):
        begin, times = 0, []
        while begin < pace.end:
            end = pace.cut(work, begin)
            part = pace.of_part(work, begin, end)
            times.append(float((part / rates).sum()))
            pace.learn(part, times[-1])
            begin = end
    assert max(times) < 1.2 * PART_SECONDS and pace.seconds(work) == pytest.approx(sum(times), rel=0.05)


def test_a_part_has_some_rows_however_slow():
    pace = Pace([OpCost("product", 1e9)])
    work = pace.work([10_000], 1)
    pace.learn(work, 1e9)
    assert pace.cut(work, 0) == OP_POSITIONS // 2048 and pace.cut(work, OP_POSITIONS - 3) == OP_POSITIONS
