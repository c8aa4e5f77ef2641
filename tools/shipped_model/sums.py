"""Sums and differences of numbers up to three digits, split into training and held-out problems by a hash."""

from __future__ import annotations

import random
import zlib

HELD_OUT_SHARE = 32     # one problem in this many is never trained on

PHRASES = {
    "+": ["{a}+{b}=?", "{a}+{b}=?", "{a}+{b}=?", "{a}+{b}=", "{a}+{b}", "{a} + {b} = ?", "{a} + {b}",
    "What is {a}+{b}?",
          "What is {a} + {b}?", "What is {a} plus {b}?", "{a} plus {b}", "Add {a} and {b}.", "Calculate {a}+{b}.",
          "How much is {a}+{b}?", "What is the sum of {a} and {b}?"],
    "-": ["{a}-{b}=?", "{a}-{b}=?", "{a}-{b}=?", "{a}-{b}=", "{a}-{b}", "{a} - {b} = ?", "{a} - {b}",
    "What is {a}-{b}?",
          "What is {a} - {b}?", "What is {a} minus {b}?", "{a} minus {b}", "Subtract {b} from {a}.",
          "Calculate {a}-{b}.",
          "How much is {a}-{b}?", "What is the difference of {a} and {b}?"],
}


def held_out(a: int, b: int, op: str) -> bool:
    """Whether the problem is kept for evaluation. The order of the numbers does not matter: 2+5 and 5+2 (and 2-5 and
    5-2) are on the same side, so that training has no mirrored form of a held-out problem.
    """
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}{op}{high}".encode()) % HELD_OUT_SHARE == 0


def solve(a: int, b: int, op: str) -> int:
    return a + b if op == "+" else a - b


def _operands(rng: random.Random) -> tuple[int, int]:
    """Half uniform over 0..999, half with each number of digits equally likely."""
    if rng.random() < 0.5:
        return rng.randrange(1000), rng.randrange(1000)
    return rng.randrange(10 ** rng.randint(1, 3)), rng.randrange(10 ** rng.randint(1, 3))


def problem(rng: random.Random, evaluation: bool = False) -> tuple[int, int, str]:
    """(a, b, op), from the held-out problems if ``evaluation``, else from the others."""
    while True:
        a, b = _operands(rng)
        op = rng.choice("+--")          # differences are harder: more of them
        if held_out(a, b, op) == evaluation:
            return a, b, op


def chat(rng: random.Random) -> tuple[str, str]:
    """A training question and its answer."""
    a, b, op = problem(rng)
    return rng.choice(PHRASES[op]).format(a=a, b=b), str(solve(a, b, op))


def plain(rng: random.Random) -> str:
    """One to three training sums as plain text, one a line."""
    lines = []
    for _ in range(rng.randint(1, 3)):
        a, b, op = problem(rng)
        lines.append(f"{a}{op}{b}={solve(a, b, op)}")
    return "\n".join(lines)


def held_out_problems(count: int, seed: int = 7) -> list[tuple[int, int, str]]:
    """Distinct held-out problems, half of them sums."""
    rng = random.Random(seed)
    found: dict[tuple[int, int, str], None] = {}
    wanted = {"+": count - count // 2, "-": count // 2}
    while len(found) < count:
        item = problem(rng, evaluation=True)
        if wanted[item[2]] and item not in found:
            found[item] = None
            wanted[item[2]] -= 1
    return list(found)
