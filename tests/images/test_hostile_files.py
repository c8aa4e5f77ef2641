"""Hostile files: each is decoded, or refused with an error that says why, in bounded time and memory."""

import resource

import numpy as np
import psutil
import pytest
from PIL import Image

from allspark_client import AllSparkError, AsStatus
from allspark_server import limited_process
from allspark_server.images import decoder as decoding
from fuzz.bodies import peak_mib
from support.hostile_images import BOMB, chunk, crafted, fuzzed, many_scans, png, zeros
from support.images import EncodedFile, encoded, noise, processor_of
from support.seed import SEED

GEMMA4 = {"model_type": "gemma4", "vision_config": {}}      # takes images of all sizes


@pytest.fixture(params=[SEED], ids=lambda s: f"seed{s}")
def rng(request):
    return np.random.default_rng(request.param)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine takes longer to give a process its time."""
    monkeypatch.setattr(limited_process, "WAIT_SECONDS", 200)


class Bounded:
    """Processes files one after another and checks what each costs. `restarts`: processes that were ended."""

    def __init__(self, processor):
        self.processor, self.good, self.restarts = processor, encoded(noise(np.random.default_rng(1), 20, 30)), 0
        self.processor.process([EncodedFile(self.good)])
        self.expected = self.processor.process([EncodedFile(self.good)])[0].patches
        self.base = peak_mib(self.process.pid)

    @property
    def process(self):
        """The only process, which waits."""
        (idle,) = self.processor.decoder._pool._idle
        return psutil.Process(idle._process.pid)

    def spent(self):
        """CPU time of all processes so far."""
        ended, alive = resource.getrusage(resource.RUSAGE_CHILDREN), self.process.cpu_times()
        return ended.ru_utime + ended.ru_stime + alive.user + alive.system

    def check(self, name, content):
        """The error of a file, "" if it was decoded."""
        before, pid, problem = self.spent(), self.process.pid, ""
        try:
            found, = self.processor.process([EncodedFile(content)])
            assert np.isfinite(found.patches).all(), name
        except AllSparkError as error:
            assert error.status == AsStatus.ALLSPARK_PARAM_ERROR and error.message.startswith("image 1 of the request ")
            problem = error.message
        if self.processor.decoder._pool._idle:
            peak = peak_mib(self.process.pid) - self.base
            assert self.process.pid == pid and peak <= decoding.MEMORY_BYTES >> 20, (name, peak)
        else:
            self.restarts += 1
            assert "of a processor or 500 MiB of memory" in problem, (name, problem)
            self.processor.process([EncodedFile(self.good)])        # the next one is served
        assert self.spent() - before <= decoding.SECONDS + 0.7, (name, problem)
        return problem


@pytest.fixture
def bounded(tmp_path):
    processor = processor_of(tmp_path, GEMMA4, {})
    found = Bounded(processor)
    yield found
    after, = processor.process([EncodedFile(found.good)])
    assert np.array_equal(after.patches, found.expected)
    pid = found.process.pid
    processor.close()
    assert not psutil.pid_exists(pid)


def test_crafted_files(rng, bounded):
    for name, (content, expected) in crafted(rng).items():
        problem = bounded.check(name, content)
        assert expected in problem, (name, problem)
        assert problem or not expected, name


@pytest.mark.parametrize("seconds, side", [(0.2, 2500), pytest.param(2.0, 4000, marks=pytest.mark.slow)])
def test_an_image_that_takes_long(tmp_path, monkeypatch, seconds, side):
    """A JPEG file of 500 scans, each of which covers the image."""
    monkeypatch.setattr(decoding, "SECONDS", seconds)
    processor = processor_of(tmp_path, GEMMA4, {})
    found = Bounded(processor)
    problem = found.check("scans", many_scans(Image.new("RGB", (side, side)), 500))
    assert f"takes more than {seconds:g} s of a processor or 500 MiB of memory" in problem and found.restarts == 1
    processor.close()


def test_fuzzed_files(rng, bounded):
    problems = [bounded.check(str(number), content) for number, content in enumerate(fuzzed(rng, 60))]
    assert 0 < sum(map(bool, problems)) < len(problems)     # neither all wrong nor all right


@pytest.mark.slow
def test_many_fuzzed_files(rng, bounded):
    problems = [bounded.check(str(number), content) for number, content in enumerate(fuzzed(rng, 1000))]
    print(f"{sum(map(bool, problems))} of {len(problems)} files refused, {bounded.restarts} of them by a limit")
    assert 100 < sum(map(bool, problems)) < len(problems) and bounded.restarts <= 10


@pytest.mark.slow
def test_photographs_of_50_megapixels(tmp_path, monkeypatch):
    """The largest images that are allowed fit the memory, in the forms that take most. The time depends on the core."""
    monkeypatch.setattr(decoding, "SECONDS", 20)
    processor = processor_of(tmp_path, GEMMA4, {})
    bounded = Bounded(processor)
    across, down = np.arange(8160, dtype=np.uint8)[None, :, None], np.arange(6120, dtype=np.uint8)[:, None, None]
    image = Image.fromarray(np.concatenate([across + 0 * down, down + 0 * across, across ^ down], axis=2))
    exif = Image.Exif()
    exif[0x0112] = 6
    transparent = png(8160, 6120, chunk(b"IDAT", zeros(6120 * (8160 * 4 + 1))), color=6)
    assert not bounded.check("transparent", transparent)
    assert not bounded.check("turned", encoded(image, "JPEG", progressive=True, subsampling=0, exif=exif))
    assert BOMB in bounded.check("larger", png(8160, 6169, chunk(b"IDAT", b"")))
    processor.close()
