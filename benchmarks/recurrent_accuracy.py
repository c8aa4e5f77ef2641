"""Prints the error of the gated delta rule with several kinds of arithmetic, relative to float64's root mean square.

    recurrent_accuracy.py [--rows N] [--heads N]

Heads of 128 x 128, as in Qwen3-Next, with random projections and with decays as that model initializes them. The form
is the engine's: the state is committed every 64 rows, and the rows within a chunk are solved by forward substitution
(tests/reference/recurrent.py). Products round their factors and add in float32. "transformers" is its chunked function
with inputs and output in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from reference.recurrent import CHUNK, delta_recurrent, l2_normalized, sigmoid, silu, softplus_decay  # noqa: E402

DIM = 128
Rounding = Callable[[np.ndarray], np.ndarray]


def to_bits(dropped: int) -> Rounding:
    """Rounds float32 to the nearest value whose last `dropped` bits are zero."""
    def rounded(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        bits = bits + np.uint32((1 << dropped - 1) - 1) + ((bits >> np.uint32(dropped)) & np.uint32(1))
        return (bits & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)).view(np.float32)

    return rounded


def whole(x: np.ndarray) -> np.ndarray:
    """float32 as it is."""
    return x


TF32, BF16 = to_bits(13), to_bits(16)


def by_chunks(q, k, v, decay, beta, factor: Rounding, kept: Rounding) -> np.ndarray:
    """factor: rounds the factors of products; kept: rounds the state when it is committed."""
    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return factor(a) @ factor(b)

    q, k, v, decay, beta = (np.asarray(x, np.float32).swapaxes(0, 1) for x in (q, k, v, decay, beta))
    q, state, out = q * np.float32(DIM**-0.5), np.zeros((len(v), DIM, DIM), np.float32), np.empty_like(v)
    for begin in range(0, v.shape[1], CHUNK):
        rows = slice(begin, begin + CHUNK)
        total = decay[:, rows].cumsum(1, dtype=np.float32)
        between = np.exp(np.minimum(total[:, :, None] - total[:, None], 0))
        keys = product(k[:, rows], k[:, rows].swapaxes(1, 2)) * between
        seen = np.tril(product(q[:, rows], k[:, rows].swapaxes(1, 2)) * between)
        known = product(k[:, rows], state) * np.exp(total)[..., None]
        delta = np.empty_like(known)
        for t in range(delta.shape[1]):
            earlier = product(keys[:, t : t + 1, :t], delta[:, :t])[:, 0] if t else np.float32(0)
            delta[:, t] = beta[:, begin + t, None] * (v[:, begin + t] - known[:, t] - earlier)
        out[:, rows] = product(q[:, rows], state) * np.exp(total)[..., None] + product(seen, delta)
        left = k[:, rows] * np.exp(total[:, -1:] - total)[..., None]
        state = kept(np.exp(total[:, -1])[:, None, None] * state + product(left.swapaxes(1, 2), delta))
    return out.swapaxes(0, 1)


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="length of the sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="heads (default: %(default)s)")
    options = parser.parse_args()
    rng, shape = np.random.default_rng(1), (options.rows, options.heads)
    q, k = (l2_normalized(silu(rng.standard_normal((*shape, DIM)))) for _ in range(2))
    v, beta = silu(rng.standard_normal((*shape, DIM))), sigmoid(rng.standard_normal(shape))
    decay = softplus_decay(rng.standard_normal(shape), np.log(rng.uniform(0.01, 16, options.heads)), np.ones(()))
    for name, factor_of_decay in (("decays as initialized", 1.0), ("a hundredth of them", 1e-2), ("none", 0.0)):
        given = (q, k, v, factor_of_decay * decay, beta)
        exact, _ = delta_recurrent(*given)

        def error(found: np.ndarray, exact: np.ndarray = exact) -> str:
            return f"{np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)):.1e}"

        print(name)
        for label, factor, kept in (("float32", whole, whole), ("TF32 products", TF32, whole),
                                    ("bfloat16 products", BF16, whole), ("bfloat16 state", whole, BF16)):
            print(f"  {label:20} {error(by_chunks(*given, factor, kept))}")
        print(f"  {'transformers':20} {error(_of_transformers(*given))}")


def _of_transformers(*given: np.ndarray) -> np.ndarray:
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, _, beta = (torch.tensor(x, dtype=torch.bfloat16)[None] for x in given)
    decay = torch.tensor(given[3], dtype=torch.float32)[None]
    out, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
    return out[0].double().numpy()


if __name__ == "__main__":
    main()
