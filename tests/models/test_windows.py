"""Layers with a sliding window free the spans that they no longer see, and nothing else changes: cache groups, the
scheduler without tensors, and real models beside the same models with whole histories.
"""

from __future__ import annotations

import random

import pytest

from allspark_server.cache import NO_SPAN, SpanGroups, in_group
from allspark_server.models.cache_groups import CacheGroup, place_layers
from allspark_server.runtime.plan import Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from allspark_server.scheduler import State
from support.fake_group import expected_output
from support.scheduler_rig import Rig, output, prompt_of
from support.units import GPUS, UNIT

slow = pytest.mark.slow


# -- groups ------------------------------------------------------------------------------------------------------------
def test_layers_that_keep_the_same_share_a_group():
    full, sliding = CacheGroup(), CacheGroup("sliding", 7)
    assert place_layers((), 3) == ([full], [(0, 0), (0, 1), (0, 2)])
    assert place_layers((0, 0), 2) == ([full], [(0, 0), (0, 1)])
    assert place_layers((7, 7), 2) == ([sliding], [(0, 0), (0, 1)])
    assert place_layers((7, 0, 7, 0), 4) == ([full, sliding], [(1, 0), (0, 0), (1, 1), (0, 1)])
    groups, places = place_layers((5, 5, 0, 7, 7, 0, 7), 7)  # three groups of up to two with windows
    assert groups == [full, sliding, sliding, sliding]
    assert places == [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1), (3, 0)]
    groups, places = place_layers((0, *(9,) * 63), 64)  # not 64 tables
    assert len(groups) == 22 and len(set(places)) == 64


@pytest.mark.parametrize("name, layers, full, sizes, sliding_groups, full_groups", [
    ("31B", 60, 6, (2048, 4096), 10, 1), ("26B-A4B", 30, 6, (1024, 2048), 13, 1), ("12B", 48, 6, (512, 2048), 20, 1),
    ("E2B", 15, 5, (512, 256), 2, 1), ("E4B", 24, 6, (1024, 512), 3, 1), ("small heads without windows", 8, 8,
                                                                         (1, 100), 7, 1)])
def test_groups_of_layers_with_heads_of_two_sizes(name, layers, full, sizes, sliding_groups, full_groups):
    """Gemma 4's models: every full-th layer has no window. A position takes as much in each group, or a bit less."""
    windows = tuple(0 if (layer + 1) % full == 0 else 9 for layer in range(layers))
    groups, places = place_layers(windows, layers, sizes=sizes)
    assert groups == [CacheGroup()] * full_groups + [CacheGroup("sliding", 9)] * sliding_groups
    taken = [0] * len(groups)
    for (group, _), window in zip(places, windows):
        assert (groups[group].kind == "sliding") == bool(window)
        taken[group] += sizes[bool(window)]
    assert len(set(places)) == layers and max(taken) <= 1.25 * min(taken[1:-1] or taken[:1])


def test_spans_of_groups():
    groups = SpanGroups(4, (0, 6), 8)
    assert [groups.passed_spans(6, position) for position in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert groups.passed_spans(0, 1000) == 0
    for position in range(100):  # what is held reaches to what steps under way and the next one compute
        begin = groups.passed_spans(6, position)
        assert begin * 4 <= max(0, position + 1 - 6) < begin * 4 + 4
        assert groups.end(6, begin, 1000) * 4 >= position + 8
    assert groups.needed(1000) == 250 + 5 and groups.needed(9) == 3 + 3
    assert SpanGroups(4).needed(9) == 3 and groups.positions(9) == 16


# -- the scheduler -----------------------------------------------------------------------------------------------------
def keys_of(rig: Rig, tokens: list[int]) -> list[bytes]:
    """Keys of the full spans of a prompt."""
    keys, names = [], rig.prefix.keys
    names.extend(keys, names.root("", len(tokens)), tokens, len(tokens) // names.span_size)
    return keys


def forget(rig: Rig, key: bytes, group: int) -> None:
    """Evicts one of the kept spans."""
    rig.pool._evict(rig.prefix.find(in_group(key, group)))


def most_used(rig: Rig) -> int:
    """Runs everything; returns the largest number of spans in use at a time."""
    most = 0
    while rig.scheduler.has_work or rig.running:
        rig.step()
        most = max(most, rig.pool.used)
    rig.check_nothing_leaks()
    return most


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_generation_has_as_many_spans_as_its_windows_need(depth, prefix):
    for windows, most in (((0,), 63), ((12,), 5), ((0, 12), 63 + 5), ((0, 12, 12), 63 + 10)):
        rig = Rig(num_spans=512, windows=windows, depth=depth, prefix=prefix)
        one = rig.add(prompt_of(9), 240)
        late = 0 if prefix else 17 * sum(window > 0 for window in windows)  # looked at every 64 tokens or so
        assert most_used(rig) <= most + late
        assert output(one) == expected_output(prompt_of(9), 240)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_that_is_longer_than_the_cache(depth):
    """With windows on all layers, it never has more spans than it was admitted with."""
    rig = Rig(num_spans=14, windows=(8,), max_chunk=8, max_step_tokens=8, depth=depth)
    one, two = rig.add(prompt_of(400), 40), rig.add(prompt_of(300, seed=1), 40)
    assert most_used(rig) <= 14 and rig.scheduler.counters.preemptions == 0
    for sequence, prompt in ((one, prompt_of(400)), (two, prompt_of(300, seed=1))):
        assert output(sequence) == expected_output(prompt, 40)


def test_a_prefix_needs_of_a_windowed_group_what_is_seen_from_its_end():
    rig = Rig(num_spans=256, windows=(0, 10))
    rig.add(prompt_of(80), 5)
    rig.run()
    shorter = rig.add([*prompt_of(41), 1, 2, 3], 5)
    plan = rig.step()
    assert shorter.prefix_len == plan.new[0].cached == 40
    (table,) = plan.work[0].other_spans
    assert table[:7] == [NO_SPAN] * 7 and min(table[7:]) >= 0 and len(table) == len(plan.work[0].spans)
    assert rig.pool.used == 11 + 3  # after the step
    rig.run()
    assert output(shorter) == expected_output([*prompt_of(41), 1, 2, 3], 5)


def test_a_prefix_ends_where_its_window_is_known():
    """Spans of a windowed group are evicted sooner: the longest prefix that is still usable is used."""
    rig = Rig(num_spans=64, windows=(0, 8))
    rig.add(prompt_of(80), 1)
    rig.run()
    keys, groups, prefix = keys_of(rig, prompt_of(80)), rig.scheduler.limits.groups, rig.prefix
    assert prefix.match(keys, groups) == 20
    forget(rig, keys[18], group=1)  # which 19 and 20 spans see, and no fewer
    assert prefix.match(keys, groups) == 18
    forget(rig, keys[3], group=1)
    assert prefix.match(keys, groups) == 18 and prefix.match(keys[:5], groups) == 3
    forget(rig, keys[17], group=0)
    assert prefix.match(keys, groups) == 17
    again = rig.add(prompt_of(80), 5)
    rig.run()
    assert again.prefix_len == 68 and output(again) == expected_output(prompt_of(80), 5)


def test_windowed_spans_come_back_from_the_host_cache():
    rig = Rig(num_spans=48, windows=(0, 10), host_spans=400, depth=2, max_chunk=16)
    rig.add(prompt_of(80), 5)
    rig.run()
    for seed in range(1, 5):
        rig.add(prompt_of(100, seed), 2)
        rig.run()
    again = rig.add(prompt_of(80), 5)
    rig.run()
    assert again.prefix_len == again.restored == 76 and output(again) == expected_output(prompt_of(80), 5)
    assert rig.scheduler.counters.restored_spans == 19 + 3  # of the window, what is seen from there


def test_prompts_that_share_what_they_leave_behind_do_not_wait_for_each_other_forever():
    """The spans of their windows are free only when all of them have passed."""
    for seed in range(20):
        rig = Rig(num_spans=30, windows=(12, 12), max_chunk=4, max_step_tokens=9, max_batch=4, depth=1 + seed % 3)
        common = prompt_of(24 + seed, seed)
        sequences = [rig.add([*common, *prompt_of(40, 100 + i)], 20) for i in range(4)]
        rig.run()
        for sequence in sequences:
            assert output(sequence) == expected_output(sequence.tokens[: sequence.prompt_len], 20)


def test_random_traffic_of_long_prompts():
    for seed in range(25):
        rng = random.Random(seed)
        windows = rng.choice([(0, 6), (9,), (0, 9, 9), (5, 5)])
        rig = Rig(num_spans=rng.choice([40, 60]), windows=windows, max_chunk=rng.choice([3, 8]), max_step_tokens=8,
                  max_batch=3, depth=rng.choice([1, 2, 3]), host_spans=rng.choice([0, 20]),
                  draft_kind=int(rng.choice([0, Flag.LOOKUP])))
        for _ in range(40):
            if rng.random() < 0.3:
                prompt = [*prompt_of(rng.randrange(40), rng.randrange(2)), *prompt_of(rng.randrange(1, 30), seed)]
                rig.add(prompt, rng.randrange(1, 40))
            running = [s for s in rig.output if s.state is State.RUNNING]
            if running and rng.random() < 0.05:
                rig.scheduler.block(rng.choice(running), "something")
            rig.step()
        for sequence in rig.output:
            rig.scheduler.unblock(sequence)
        rig.run()
        for sequence in rig.output:
            wanted = expected_output(sequence.tokens[: sequence.prompt_len], sequence.stop.max_length)
            assert output(sequence) == wanted[: len(output(sequence))]
            assert len(sequence.tokens) == sequence.stop.max_length or sequence in rig.oversized


# -- real models -------------------------------------------------------------------------------------------------------
MODELS = ["gemma2", "mistral-window", *(pytest.param(name, marks=slow) for name in (
    "gemma3", "gemma4", "gemma4-small", "olmo3", "ministral"))]  # fmt: skip


class Ranks:
    """A Driver's ranks as the executor of a Rig."""

    def __init__(self, driver):
        self.driver, self.plans = driver, [None]

    def step(self, data: bytes):
        return self.driver._each(lambda runner: runner.step(data))[0]


class RealRig(Rig):
    """A Rig with a model; `bits` are the log probabilities of the samples."""

    def __init__(self, driver, **fields):
        info = driver.info
        super().__init__(**{"num_spans": info.num_spans, "span_size": info.span_size, "max_batch": info.max_batch,
                            "max_step_tokens": info.max_step_tokens, "windows": tuple(info.cache_windows), **fields})
        self.executor, self.bits = Ranks(driver), {}

    def add(self, prompt, new_tokens=5, **fields):
        sequence = super().add(prompt, new_tokens, **fields)
        sequence.sampling = SamplingParams(logprobs=True, seed=len(prompt), prompt_len=len(prompt)).encode()
        self.bits[sequence] = b""
        return sequence

    def complete(self):
        outcome, result = super().complete()
        for sequence, first, kept in zip(outcome.sequences, outcome.first.tolist(), outcome.kept.tolist()):
            self.bits[sequence] += result.logprobs[first : first + kept].tobytes()
        return outcome, result


def served(name: str, world: int = 1, **fields):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.checkpoints import checkpoint
    from support.driver import Driver

    if GPUS and world != len(GPUS):
        pytest.skip(f"each rank has a GPU, and ALLSPARK_TEST_UNIT names {len(GPUS)}")
    return Driver(checkpoint(name), world, **{"cache_span_size": 16, "engine_max_batch": 4, "engine_max_length": 768,
                                              "max_step_tokens": 64, **UNIT, **fields})  # fmt: skip


def histories(prompts, new_tokens, driver, **fields):
    """Ids and bits of each prompt's output, all served at once; and the rig."""
    rig = RealRig(driver, **fields)
    sequences = [rig.add(prompt, new_tokens) for prompt in prompts]
    rig.run()
    found = [(output(s), rig.bits[s]) for s in sequences]
    ended = StepPlan(free=sorted(rig.scheduler._slots_to_free), groups=len(driver.info.cache_windows)).encode()
    driver._each(lambda runner: runner.step(ended))
    return found, rig


def prompts_for(vocab: int = 90) -> list[list[int]]:
    """One of a few tokens, long ones, and two with the same beginning."""
    common = [token % vocab for token in prompt_of(200, 7)]
    lengths = ((3, 1), (330, 2), (70, 3))
    more = [[token % vocab for token in prompt_of(length, seed)] for length, seed in lengths]
    return [*more, [*common, 5, 6, 7], [*common, *common[:150]]]


@pytest.fixture
def whole_histories(monkeypatch):
    """From here on windows only mask; no spans are freed."""
    from allspark_server.runtime import runner

    class Whole(runner.RankModel):
        def __init__(self, config, path, weights_path, rank, world, device, whole_histories=False, **more):
            super().__init__(config, path, weights_path, rank, world, device, True, **more)

    return lambda: monkeypatch.setattr(runner, "RankModel", Whole)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_of_whole_histories(name, world, whole_histories):
    """In a batch, with prefix hits, after preemption, from the host cache, with drafts, one and two steps ahead."""
    prompts, new = prompts_for(), 130
    with served(name, world) as driver:
        windows = driver.info.cache_windows
        assert max(windows) > 0 and driver.info.num_spans >= 16
        found = [histories(prompts, new, driver)]
        needed = SpanGroups(16, tuple(windows), 128).needed(600)
        spare = 24 if len(windows) > 5 else 12  # this admits a sequence that must be preempted again
        found.append(histories(prompts, new, driver, depth=2, num_spans=needed + spare, prefix=False, max_chunk=48))
        assert found[-1][1].scheduler.counters.preemptions > 0
        found.append(histories(prompts, new, driver, depth=2, num_spans=needed + 30, max_chunk=31,
                               draft_kind=int(Flag.LOOKUP)))
    whole_histories()
    with served(name, world) as driver:
        assert driver.info.cache_windows == [0]
        expected = histories(prompts, new, driver)[0]
    for each, _ in found:
        assert each == expected


@pytest.mark.parametrize("cache", ["float32", "bfloat16", *(["float16"] if GPUS else []), "int8", "uint4"])
def test_every_type_of_cache(cache, whole_histories):
    from allspark_client.types import AsCacheMode

    fields = {"cache_dtype": cache} if cache[-2:] in ("32", "16") else {
        "cache_mode": AsCacheMode.AsCacheQuantI8 if cache == "int8" else AsCacheMode.AsCacheQuantU4}
    prompts = prompts_for()
    with served("gemma2", **fields) as driver:
        assert driver.info.cache_dtype == cache
        found = histories(prompts, 60, driver, depth=2, max_chunk=31)[0]
    whole_histories()
    with served("gemma2", **fields) as driver:
        assert found == histories(prompts, 60, driver)[0]


@pytest.mark.parametrize("name, share", [("mistral-window", 0.0), ("gemma2", 0.5)])
def test_a_long_generation_takes_what_is_announced(name, share):
    """With windows on all layers, more tokens take no more spans; with windows on half of them, half as many more."""
    with served(name, engine_max_batch=1, max_step_tokens=16) as driver:
        info, runner = driver.info, driver.runners[0]
        groups = SpanGroups(16, tuple(info.cache_windows), 32)
        assert info.num_spans == groups.needed(768) and info.cache_bytes <= info.num_spans * runner._span_bytes
        all_layers = runner._span_bytes * len(info.cache_windows)
        whole = 768 // 16 * all_layers
        window = max(info.cache_windows)
        beside = (window + 32 + 2 * 16) // 16 * all_layers  # windows, what steps compute, and parts of spans
        assert info.cache_bytes <= share * whole + beside
        rig = RealRig(driver)
        rig.add([1, 2, 3], 760)
        assert most_used(rig) <= info.num_spans


@slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral-window", "ministral", "olmo3"])
def test_greedy_output_is_that_of_transformers(name):
    with served(name) as driver:
        from support.checkpoints import checkpoint
        from support.greedy import check_greedy_output

        prompt = [token % 90 for token in prompt_of(200)]
        rig = RealRig(driver, depth=2)
        one = rig.add(prompt, 256)
        one.sampling = SamplingParams(do_sample=False, prompt_len=len(prompt)).encode()
        rig.run()
    check_greedy_output(output(one), checkpoint(name), prompt)


def test_a_cache_with_a_draft_model_keeps_all():
    with served("mistral-window", speculation="draft", draft_model=str(checkpoint_of("mistral-window"))) as driver:
        assert driver.info.cache_windows == [0]


def checkpoint_of(name: str):
    pytest.importorskip("torch")
    from support.checkpoints import checkpoint

    return checkpoint(name)


def test_plans_with_missing_spans_are_refused():
    with served("mistral-window") as driver:
        window, block = max(driver.info.cache_windows), SamplingParams().encode()
        new = [NewSlot(0, [1] * 320, block, 304)]

        def step(gone: int):
            spans = [NO_SPAN] * gone + list(range(20 - gone))
            return driver.step(StepPlan(new=new, work=[WorkItem(0, 16, spans=spans)]))

        seen = (304 + 1 - window) // 16
        with pytest.raises(ValueError, match="span -1 is not in"):
            step(seen + 1)
        assert step(seen) == (None, None)
