"""A real mixed group, compared with one process: `allspark serve --experts-on cpu`, its ranks pinned, supervised."""
from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine
from allspark_launch.commands import top
from allspark_launch.group.background import background_group
from allspark_launch.pool.members import Member, Target
from allspark_server.runtime.binding import MODEL_RANKS
from support.metrics import metrics_of, samples
from support.waiting import wait_for

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support.invariance import OTHERS, PROBES, installed, run_alone, run_together
from support.processes import ranks_of

MODEL = "glm4-moe"     # a dense layer, a shared expert


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"{n}experts")
def group(request):
    experts = request.param
    words = ["--experts-on", "cpu", "--ranks", str(1 + experts)]
    with pytest.MonkeyPatch.context() as environment:
        if experts > 1:     # as with two GPUs, for test_two_ranks_of_the_model
            environment.setenv(MODEL_RANKS, "2")
        with background_group(words, timeout=60) as started, ClientEngine(started.addresses[0]) as engine:
            yield SimpleNamespace(engine=engine, experts=experts, supervisor=started.supervisor_pid,
                                  address=started.addresses[0],
                                  unit={"compute_unit": "CPU:0+CPU:" + ",".join(["0"] * experts)})


@pytest.fixture(scope="module")
def first(group):
    with installed(group.engine, MODEL, **group.unit) as name:
        return run_alone(group.engine, name)


def test_one_rank_of_experts_is_one_process(group, first):
    from allspark_server import Engine
    if group.experts > 1:
        pytest.skip("sums are associated differently")
    own = Engine()
    with installed(own, MODEL) as name:
        assert run_alone(own, name) == first


def test_in_a_batch_with_chunks_and_prefixes(group, first):
    fields = {"engine_max_prefill_length": 40, "max_step_tokens": 61, "enable_prefix_cache": True, "num_threads": 0}
    with installed(group.engine, MODEL, **group.unit, **fields) as name:
        assert run_together(group.engine, name, OTHERS) == first
        assert run_together(group.engine, name, OTHERS) == first
        assert group.engine.get_as_engine_stat(name).prefix_cache_hit_token > 1500


def test_what_the_group_shows(group, first):
    """Heartbeats bring the figures of ranks of experts to metrics and `allspark top`."""
    with Member(Target("a", group.address)) as member:
        def told() -> bool:
            """Whether heartbeats of all ranks have come that are not of the first steps, which have a row each."""
            model, *experts = member.info().ranks
            return model.wait_seconds > 0 and [rank.expert_rows > rank.expert_messages > 0 and rank.compute_seconds > 0
                                               for rank in experts] == [True] * group.experts

        wait_for(told, 30)
        model, *experts = member.info().ranks
        assert len(experts) == group.experts and model.expert_messages == 0 < model.wait_seconds
        assert all(rank.compute_seconds > 0 and rank.wait_seconds > 0 for rank in experts)
        found = samples(metrics_of(group.address))
        assert found[("allspark_rank_expert_messages_total", ("rank", "1"))] >= experts[0].expert_messages
        assert "rows a layer" in top._top_table([member])[-1] or not member.info().models


def test_the_profile_shows_both_sides(group):
    with installed(group.engine, MODEL, **group.unit) as name:
        run_alone(group.engine, name)
        lines = group.engine.get_op_profiling_info(name).splitlines()
        assert run_alone(group.engine, name)
    counts = {line[:line.index("  ")].strip(): int(line[line.index("  "):].split()[0]) for line in lines[1:-1]}
    sent, top = counts["dispatch_rows"], next(n for n, line in enumerate(lines) if line.startswith("roofline"))
    assert sent == counts["returned_sums"] > 0
    for rank in range(1, group.experts + 1):
        assert counts[f"rank {rank}: dispatched_rows"] == counts[f"rank {rank}: return_sums"] == sent
        assert counts[f"rank {rank}: expert_linear"] >= sent     # one of two may be fused with what follows it
    assert all(line.startswith("rank ") and line.split()[13:14] == ["-"] for line in lines[top + 1:-1])
    assert len(lines) > top + 5 * group.experts
    sides = lines[-1].removeprefix("a layer, ms: ").split("; ")
    assert [side.split(" computes ")[0] for side in sides] == [f"rank {n}" for n in range(group.experts + 1)]


def test_speculation_by_lookup(group, first):
    with installed(group.engine, MODEL, **group.unit, speculation="prompt_lookup") as name:
        assert run_together(group.engine, name) == first


def test_two_ranks_of_the_model(group):
    """In the group of three ranks: sums and samples are those of two ranks, experts those of one."""
    if group.experts < 2:
        pytest.skip("the group has two ranks")
    unit = {"compute_unit": "CPU:0,0+CPU:0"}
    with installed(group.engine, MODEL, **unit) as name:
        expected = run_alone(group.engine, name)
        assert run_together(group.engine, name, OTHERS) == expected
        sides = group.engine.get_op_profiling_info(name).splitlines()[-1]
        assert "rank 0 computes" in sides and "rank 2 computes" in sides and "rank 1 computes" not in sides
    fields = {"engine_max_prefill_length": 40, "max_step_tokens": 61, "speculation": "prompt_lookup"}
    with installed(group.engine, MODEL, **unit, **fields) as name:
        assert run_together(group.engine, name, OTHERS) == expected


def test_another_number_of_ranks_is_refused(group):
    config = AsModelConfig(model_name="more", model_path=str(checkpoints.checkpoint(MODEL)),
                           compute_unit="CPU:0+CPU:0,0,0,0")
    with pytest.raises(AllSparkError, match="needs 5 ranks, one of the model and 4 of experts"):
        group.engine.install_model(config)
        group.engine.start_model("more")


def test_adapters_are_refused_by_name(group, tmp_path):
    with installed(group.engine, MODEL, **group.unit) as name, \
            pytest.raises(AllSparkError, match="in a mixed group"):
        group.engine.load_lora(name, str(tmp_path))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_ends_the_group_and_requests_go_on(group, first, victim):
    with installed(group.engine, MODEL, **group.unit) as name:
        before = {process.pid for process in ranks_of(group.supervisor)}
        lost = next(p for p in ranks_of(group.supervisor) if ("--address" in p.cmdline()) == (victim == 0))
        prompt, generate = PROBES[1]
        _, _, results = group.engine.start_request(
            name, {"input_ids": prompt}, {**generate, "max_new_tokens": 200, "eos_token_id": -1})
        ids = list(results.Get().ids_from_generate)     # it runs
        lost.send_signal(signal.SIGKILL)
        wait_for(lambda: len(ranks_of(group.supervisor)) == len(before)
                 and not {process.pid for process in ranks_of(group.supervisor)} & before, 60)
        ids += [i for elements in results for i in elements.ids_from_generate]
        assert len(ids) == 200 and results.GenerateStatus().name == "GenerateFinished"
        assert run_alone(group.engine, name) == first

