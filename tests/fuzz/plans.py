"""Step plans."""

from __future__ import annotations

from pathlib import Path
from random import Random

from allspark_client.config import AsModelConfig
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from allspark_server.runtime.runner import ModelRunner
from fuzz import mutate
from fuzz.target import CONFIG, Finding, Target, tensors_of


def runner_of(path: Path, threads: int = 1) -> ModelRunner:
    """A loaded model that is small in every respect."""
    config = AsModelConfig(
        model_name="m",
        model_path=str(path),
        engine_max_length=96,
        engine_max_batch=4,
        max_step_tokens=32,
        cache_span_size=16,
        num_threads=threads,
        cache_memory=1 << 20,
        speculation="prompt_lookup",
    )
    runner = ModelRunner(config)
    runner.load()
    runner.allocate_cache(Plans.SPANS)
    runner.masks.bits[:] = 0xFFFFFFFF
    runner.masks.publish(list(range(len(runner.masks.bits))))  # a changed plan may name any
    return runner


class Plans(Target):
    """Valid and changed plans for one executor: a refused plan must change nothing, and an accepted one must finish."""

    name, share = "plan", 0.45
    SLOTS, SPANS, SPAN, LENGTH, ROWS = 4, 24, 16, 96, 32

    def prepare(self) -> None:
        tensors_of(CONFIG, self.folder)

    def start(self, rng: Random) -> None:
        self.runner = runner_of(self.folder, rng.choice((1, 1, 1, 2)))
        self.slots: dict[int, list[int]] = {}  # [tokens of history, cached positions, spans]
        self.ended: set[int] = set()  # slots without a token to sample
        self.last = b""

    def one(self, rng: Random) -> bool:
        plan = self._valid(rng)
        valid = rng.random() < 0.3
        data = plan.encode() if valid else self._changed(rng, plan)
        self.data, self.last = data, data
        try:
            result = self.runner.step(data, rng.random() < 0.1)
        except ValueError as error:
            if valid:
                raise Finding(f"a plan that is right was refused: {error}") from error
            self._decoded(data)
            return False
        self._apply(StepPlan.decode(data), result)
        return True

    @staticmethod
    def _decoded(data: bytes) -> None:
        try:
            StepPlan.decode(data)
        except ValueError:
            pass

    def _apply(self, plan: StepPlan, result) -> None:
        for slot in plan.free:
            self.slots.pop(slot, None)
            self.ended.discard(slot)
        for new in plan.new:
            self.slots[new.slot] = [len(new.history), new.cached, 0]
        counts, at = iter(result.counts.tolist()), 0
        for item in plan.work:
            slot = self.slots[item.slot]
            slot[0] += len(item.known) - (item.drafts if item.flags & Flag.GIVEN else 0)
            slot[1] += item.rows
            slot[2] += len(item.spans)
            if item.flags & SAMPLE:
                drawn = next(counts)
                slot[0] += drawn
                slot[1] += drawn - 1
                if result.status[at]:
                    self.ended.add(item.slot)
                at += drawn

    def _valid(self, rng: Random) -> StepPlan:
        slots = {slot: list(values) for slot, values in self.slots.items()}
        free = [slot for slot in slots if slot in self.ended or rng.random() < 0.1]
        for slot in free:
            del slots[slot]
        new, work, rows = [], [], self.ROWS
        for slot in range(self.SLOTS):
            if slot not in slots and rng.random() < 0.4:
                history = [rng.randrange(97) for _ in range(rng.choice((1, 2, 15, 16, 17, 40)))]
                cached = 16 if len(history) > 16 and rng.random() < 0.3 else 0  # what a prefix cache gives
                new.append(NewSlot(slot, history, self._sampling(rng, len(history)), cached))
                slots[slot] = [len(history), cached, 0]
        for slot, (length, cached, spans) in sorted(slots.items(), key=lambda _: rng.random()):
            known = [rng.randrange(97) for _ in range(rng.choice((0, 0, 0, 1, 5)))][:self.LENGTH - length]
            left = length + len(known) - cached
            if rows == 0 or left == 0 or rng.random() < 0.2:
                continue
            count = min(rows, left if rng.random() < 0.7 else rng.randint(1, left))
            flags, drafts, outputs = 0, 0, 0
            if count == left and length + len(known) < self.LENGTH:
                flags = outputs = SAMPLE if rng.random() < 0.9 else 0
            if flags and rng.random() < 0.4:
                kind = rng.choice((Flag.LOOKUP, Flag.GIVEN))
                drafts = min(rng.randint(1, 7), rows - count, self.LENGTH - 1 - length - len(known))
                flags |= kind if drafts else 0
                known += [rng.randrange(97) for _ in range(drafts)] if kind is Flag.GIVEN else []
            needed = max(0, -(-(cached + count + drafts) // self.SPAN) - spans)
            work.append(WorkItem(slot, count, int(flags), known, [rng.randrange(self.SPANS) for _ in range(needed)],
                                 drafts, outputs))
            rows -= count + drafts
        return StepPlan(free, new, work)

    @staticmethod
    def _sampling(rng: Random, prompt_len: int) -> bytes:
        greedy = rng.random() < 0.3
        return SamplingParams(
            do_sample=not greedy, logprobs=rng.random() < 0.3, suppress_repetition_in_generation=rng.random() < 0.1,
            temperature=rng.choice((1.0, 0.1, 10.0)), top_k=rng.choice((0, 0, 1, 5, 97)),
            top_p=rng.choice((1.0, 0.9, 0.01)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)), presence_penalty=rng.choice((0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.5)), no_repeat_ngram_size=rng.choice((0, 0, 2)),
            min_length=rng.choice((0, 50)), top_logprobs=rng.choice((0, 0, 20)), seed=rng.getrandbits(64),
            prompt_len=prompt_len, eos=rng.choice(((), (2,), (2, 5))),
            bad_words=rng.choice(((), ((3,), (4, 5)))),
        ).encode()  # fmt: skip

    def _changed(self, rng: Random, plan: StepPlan) -> bytes:
        if rng.random() < 0.3:
            return mutate.of_bytes(rng, plan.encode(), self.last)
        for _ in range(rng.choice((1, 1, 2))):
            self._change_item(rng, plan)
        words = [int.from_bytes(plan.encode()[i : i + 4], "little") for i in range(0, len(plan.encode()), 4)]
        for _ in range(rng.choice((0, 0, 1, 2))):
            words[rng.randrange(len(words))] = mutate.integer(rng, 32, False)
        return b"".join(word.to_bytes(4, "little") for word in words)

    def _change_item(self, rng: Random, plan: StepPlan) -> None:
        def near(value: int) -> int:
            return value + rng.choice((-16, -1, 1, 16)) if rng.random() < 0.5 else mutate.integer(rng, 32)

        def clipped(value: int) -> int:
            return max(-(2**31), min(2**31 - 1, value))

        listed = [items for items in (plan.free, plan.new, plan.work) if items]
        if not listed or rng.random() < 0.15:
            plan.free.append(rng.choice((0, 1, clipped(near(0)))))
            return
        items = rng.choice(listed)
        at = rng.randrange(len(items))
        if rng.random() < 0.15:
            items.append(items[at])
        elif rng.random() < 0.15:
            del items[at]
        elif items is plan.free:
            items[at] = clipped(near(items[at]))
        elif items is plan.new:
            if rng.random() < 0.3:
                items[at].cached = clipped(near(items[at].cached))
            elif rng.random() < 0.4:
                items[at].history = [clipped(near(0)) for _ in items[at].history] * rng.choice((0, 1, 3))
            else:
                items[at].slot = clipped(near(items[at].slot))
        else:
            name = rng.choice(("slot", "rows", "outputs", "drafts", "flags", "adapter", "mask", "known", "spans"))
            value = getattr(items[at], name)
            if name == "flags":
                items[at].flags ^= 1 << rng.randrange(8)
            elif isinstance(value, int):
                setattr(items[at], name, clipped(near(value)))
            else:
                value[:] = [clipped(near(v)) for v in value] + [rng.randrange(97)] * rng.choice((0, 1, 30))
