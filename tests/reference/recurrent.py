"""Layers that keep a state of fixed size instead of keys and values, in float64, from the published formulas.

The gated delta rule stands here in three forms, which give equal results:
- `delta_recurrent`, row by row as it is defined: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving
  Mamba2 with Delta Rule" (arXiv 2412.06464); with a decay for each channel of the key, Kimi Linear's KDA (arXiv
  2510.26692).
- `delta_chunked`, whole chunks by matrices: the UT transform of S. Yang et al., "Parallelizing Linear Transformers with
  the Delta Rule over Sequence Length" (arXiv 2406.06484), with the decays of the papers above.
- `delta_deferred`, the engine's form (docs/decisions/recurrent.md): each row sees the state at the last multiple of 64
  positions and the rows since then.

Mamba2's selective state space stands here as it is defined (`ssd_recurrent`) and in the engine's form (`ssd_deferred`).

Projections, the order of operations and the constants around the rule are those of transformers'
models/qwen3_next/modular_qwen3_next.py and models/kimi_linear/modular_kimi_linear.py.

Shapes: queries and keys [rows, key heads, key dim]; values [rows, heads, value dim]. Each key head serves `heads / key
heads` consecutive heads. decay: the logarithm of the factor with which a row multiplies the state, at most 0, [rows,
heads], or [rows, heads, key dim] if each channel has its own. beta: [rows, heads], from 0 to 1. A state is [heads, key
dim, value dim].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CHUNK = 64
L2_EPS = 1e-6  # of the norm of query and key heads, added to the sum of squares


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))  # accurate on both sides


def silu(x):
    return x * sigmoid(x)


def l2_normalized(x: np.ndarray) -> np.ndarray:
    """Each head divided by its length."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS)


def softplus_decay(a: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
    """The decay -exp(a_log) * log(1 + exp(a + dt_bias)). a: [rows, heads] with a_log and dt_bias [heads]; or, for a
    decay for each channel, [rows, heads, key dim] with a_log [heads, 1] and dt_bias [heads, key dim].
    """
    return -np.exp(a_log) * np.logaddexp(0.0, a + dt_bias)


def bounded_decay(a: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray, bound: float) -> np.ndarray:
    """The decay bound * sigmoid(exp(a_log) * (a + dt_bias)) of GLM-5.3-Flash (transformers' `Glm5NextTextForgetGate`).
    Shapes are those of softplus_decay.
    """
    return bound * (1 + np.tanh(np.exp(a_log) * (a + dt_bias) / 2)) / 2


def causal_convolution(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None,
                       state: np.ndarray | None = None, activated: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Each channel's weighted sum over its last rows, followed by SiLU if `activated` (LFM2 has none).

    x: [rows, channels]. weight: [channels, taps]; the last tap is the row's own. state: the taps - 1 rows before x,
    [taps - 1, channels]; None: zeros. Returns the rows and the state after them. (A. Gu, T. Dao, "Mamba", arXiv
    2312.00752, figure 3; transformers' causal_conv1d_fn and causal_conv1d_update.)
    """
    taps = weight.shape[1]
    before = np.zeros((taps - 1, x.shape[1])) if state is None else state
    rows = np.concatenate([before, x])
    y = np.zeros_like(x) if bias is None else np.tile(bias, (len(x), 1))
    for tap in range(taps):
        y = y + rows[tap : tap + len(x)] * weight[:, tap]
    return silu(y) if activated else y, rows[len(rows) - (taps - 1) :]


def gated_rms_norm(x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: float, activation=silu) -> np.ndarray:
    """The RMS norm of each head times an activated gate. x, gate: [rows, heads, dim]; weight: [dim]. activation: `silu`
    in Qwen3-Next, `sigmoid` in Kimi Linear.
    """
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight * activation(gate)


def output_gate(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """Each value times its gate's sigmoid, as for attention's output in Qwen3-Next's layers with full attention."""
    return x * sigmoid(gate)


# -- the gated delta rule ----------------------------------------------------------------------------------------------
def _of_heads(q, k, v, decay):
    """Queries (scaled by 1 / sqrt(key dim)) and keys of each value head, and decays of each channel."""
    times = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, times, axis=1) for x in (q * q.shape[-1] ** -0.5, k))
    return q, k, np.broadcast_to(decay[..., None], k.shape) if decay.ndim == 2 else decay


def _first_state(k, v, state):
    return np.zeros((v.shape[1], k.shape[-1], v.shape[-1])) if state is None else state


def delta_recurrent(q, k, v, decay, beta, state=None) -> tuple[np.ndarray, np.ndarray]:
    """The definition. Returns the rows [rows, heads, value dim] and the state after them."""
    q, k, decay = _of_heads(q, k, v, decay)
    state, out = _first_state(k, v, state), np.empty_like(v)
    for t in range(len(v)):
        state = state * np.exp(decay[t])[:, :, None]
        known = np.einsum("hkv,hk->hv", state, k[t])  # what the state answers to this key
        delta = beta[t][:, None] * (v[t] - known)
        state = state + k[t][:, :, None] * delta[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def delta_chunked(q, k, v, decay, beta, state=None, chunk: int = CHUNK) -> tuple[np.ndarray, list[np.ndarray]]:
    """Chunks of `chunk` rows by matrices. Returns the rows, and the state after each chunk (the last may be short)."""
    q, k, decay = _of_heads(q, k, v, decay)
    state, out, states = _first_state(k, v, state), np.empty_like(v), []
    for begin in range(0, len(v), chunk):
        rows = slice(begin, begin + chunk)
        # [heads, rows, …]
        qs, ks, vs, total = (x[rows].swapaxes(0, 1) for x in (q, k, v, decay))
        total, rate = total.cumsum(1), beta[rows].T[:, :, None]  # the decay since the chunk's begin, inclusive
        between = np.exp(np.minimum(total[:, :, None] - total[:, None], 0.0))  # from row j to row i > j; its channels
        keys = np.tril(np.einsum("hik,hjk,hijk->hij", ks * rate, ks, between), -1)
        seen = np.tril(np.einsum("hik,hjk,hijk->hij", qs, ks, between))
        # (1 + keys) [new, old] = rate [values, decayed keys]: the UT transform
        size = vs.shape[-1]
        solved = np.linalg.solve(np.eye(keys.shape[1]) + keys, rate * np.concatenate([vs, ks * np.exp(total)], -1))
        delta = solved[..., :size] - solved[..., size:] @ state
        out[rows] = ((qs * np.exp(total)) @ state + seen @ delta).swapaxes(0, 1)
        left = np.exp(total[:, -1:] - total)
        state = np.exp(total[:, -1])[:, :, None] * state + (ks * left).swapaxes(1, 2) @ delta
        states.append(state)
    return out, states


class DeferredDelta:
    """The gated delta rule of one sequence as the engine computes it.

    `state` is that at the last multiple of `chunk` positions; k, total (the decay since that multiple) and delta are
    those of the rows since. A row reads both and appends to the rows; only a full chunk changes the state.
    """

    def __init__(self, state: np.ndarray, chunk: int = CHUNK):
        self.state, self.chunk = state, chunk
        self.k: list[np.ndarray] = []
        self.total: list[np.ndarray] = []
        self.delta: list[np.ndarray] = []

    def row(self, q, k, v, decay, beta) -> np.ndarray:
        """q, k, decay: [heads, key dim], q scaled; v: [heads, value dim]; beta: [heads]. Returns [heads, value dim]."""
        total = decay + (self.total[-1] if self.total else 0.0)
        delta = v - np.einsum("hkv,hk->hv", self.state, np.exp(total) * k)
        for own_k, own_total, own_delta in zip(self.k, self.total, self.delta):
            delta = delta - (np.exp(total - own_total) * own_k * k).sum(-1, keepdims=True) * own_delta
        self.k.append(k)
        self.total.append(total)
        self.delta.append(beta[:, None] * delta)
        out = np.einsum("hkv,hk->hv", self.state, np.exp(total) * q)
        for own_k, own_total, own_delta in zip(self.k, self.total, self.delta):
            out = out + (np.exp(total - own_total) * own_k * q).sum(-1, keepdims=True) * own_delta
        if len(self.k) == self.chunk:
            self._commit()
        return out

    def _commit(self) -> None:
        state, last = np.exp(self.total[-1])[:, :, None] * self.state, self.total[-1]
        for k, total, delta in zip(self.k, self.total, self.delta):
            state = state + (np.exp(last - total) * k)[:, :, None] * delta[:, None, :]
        self.state, self.k, self.total, self.delta = state, [], [], []


def delta_deferred(q, k, v, decay, beta, state=None, chunk: int = CHUNK) -> tuple[np.ndarray, DeferredDelta]:
    """All rows by DeferredDelta. Returns the rows, and what the sequence holds after them."""
    q, k, decay = _of_heads(q, k, v, decay)
    held = DeferredDelta(_first_state(k, v, state), chunk)
    out: Sequence[np.ndarray] = [held.row(q[t], k[t], v[t], decay[t], beta[t]) for t in range(len(v))]
    return np.array(out), held


# -- Mamba2's selective state space ------------------------------------------------------------------------------------
def ssd_recurrent(x, b, c, dt, a, d, state=None) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, as it is defined: T. Dao, A. Gu, "Transformers are SSMs" (arXiv 2405.21060); transformers'
    mamba2_selective_state_update.

    x: [rows, heads, dim]; b, c: [rows, groups, state dim], of which each serves adjacent heads; dt: [rows, heads],
    after its activation; a, d: [heads], a negative. A state is [heads, state dim, dim]. Returns the rows and the state
    after them.
    """
    b, c = (np.repeat(part, x.shape[1] // part.shape[1], axis=1) for part in (b, c))
    state, out = _first_state(b, x, state), np.empty_like(x)
    for t in range(len(x)):
        state = np.exp(a * dt[t])[:, None, None] * state + b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None, :]
        out[t] = np.einsum("hnd,hn->hd", state, c[t]) + d[:, None] * x[t]
    return out, state


def ssd_deferred(x, b, c, dt, a, d, state=None, chunk: int = CHUNK) -> tuple[np.ndarray, np.ndarray]:
    """The engine's form: each row sees the state at the last multiple of `chunk` positions and the rows since then.
    Returns the rows, and the state at the last multiple.
    """
    b, c = (np.repeat(part, x.shape[1] // part.shape[1], axis=1) for part in (b, c))
    state, out = _first_state(b, x, state), np.empty_like(x)
    for begin in range(0, len(x), chunk):
        rows = slice(begin, begin + chunk)
        total, delta = (a * dt[rows]).cumsum(0), dt[rows][:, :, None] * x[rows]
        for i in range(len(total)):
            left = np.exp(total[i] - total[: i + 1])
            weights = left * np.einsum("jhn,hn->jh", b[rows][: i + 1], c[begin + i])
            out[begin + i] = (np.exp(total[i])[:, None] * np.einsum("hnd,hn->hd", state, c[begin + i])
                              + np.einsum("jh,jhd->hd", weights, delta[: i + 1]) + d[:, None] * x[begin + i])
        if len(total) == chunk:
            left = np.exp(total[-1] - total)
            state = np.exp(total[-1])[:, None, None] * state + np.einsum("jh,jhn,jhd->hnd", left, b[rows], delta)
    return out, state
