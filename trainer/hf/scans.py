"""Recurrent layers of transformers' code with packed documents: the functions of a module that mix tokens, replaced.

transformers' code calls a short convolution and a recurrence by their names in its module. Outside of a pass of this
project, and in passes without documents, each is the function that it was: fused kernels where their package is
installed, otherwise transformers' own torch code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from transformers.activations import ACT2FN

Original = Callable[..., Any]


def convolve_documents(
    documents: Tensor,
    original: Original,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A causal convolution of each channel whose taps stay within a document. x: [batch, channels, length]; weight:
    [channels, taps]; documents: [batch, length]."""
    taps, length = weight.shape[-1], x.shape[-1]
    result = x.to(weight.dtype) * weight[:, -1:]
    for back in range(1, min(taps, length)):
        same = (documents[:, back:] == documents[:, :-back])[:, None]
        earlier = F.pad(x[..., :-back].to(weight.dtype) * same, (back, 0))
        result = result + earlier * weight[:, -1 - back, None]
    result = result if bias is None else result + bias[:, None]
    return (result if activation is None else ACT2FN[activation](result)).to(x.dtype)


def cut_chunks(part: Tensor, size: int) -> Tensor:
    """[batch, length, heads, ...] -> [batch, heads, chunks, size, ...], with zeros behind."""
    part = F.pad(part, [0, 0] * (part.dim() - 2) + [0, -part.shape[1] % size])
    return part.unflatten(1, (-1, size)).movedim(3, 1)


class ChunkedDocuments:
    """What chunks of a sequence have to know of its documents, each [batch, 1, chunks, size, ...]. pairs: for a token
    and an earlier one or itself, whether both are of one document; begun: whether a token's document has begun in an
    earlier chunk, whose state it sees; ends: whether it is that of the chunk's last token, whose state goes on. kept:
    whether a chunk's first and last token are of a document that has begun before, [batch, 1, chunks]."""

    def __init__(self, documents: Tensor, size: int):
        numbers = cut_chunks(documents[..., None], size)
        earlier = torch.ones(size, size, dtype=torch.bool, device=documents.device).tril()
        before = F.pad(numbers[:, :, :-1, -1], (1, 0), value=-1)
        self.pairs = (numbers[..., :, None] == numbers[..., None, :]) & earlier
        self.begun, self.ends = numbers == before[..., None], numbers == numbers[..., -1:]
        self.kept = before == numbers[..., -1]


def scan_delta(
    documents: Tensor,
    original: Original,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """A gated delta rule whose state begins anew at each document. query, key: [batch, length, heads, width]; value:
    [batch, length, more heads, width]; g: logarithms of decays [batch, length, more heads], or one for each channel of
    keys; beta: [batch, length, more heads]. Returns what value has."""
    length, heads, dtype = value.shape[1], value.shape[2], query.dtype
    query, key = (part.float().repeat_interleave(heads // part.shape[2], dim=2) for part in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, key))
    size = min(chunk_size, length)
    chunks = ChunkedDocuments(documents, size)
    begun, ends = chunks.begun[..., None], chunks.ends[..., None]
    g = g if g.dim() == 4 else g[..., None]
    q, k, v, g, rate = (cut_chunks(part.float(), size) for part in (query, key, value, g, beta[..., None]))
    q, total = q * q.shape[-1] ** -0.5, g.cumsum(3)
    between = total[..., :, None, :] - total[..., None, :, :]
    decay = between.masked_fill(~chunks.pairs[..., None], float("-inf")).exp()

    def relate(a: Tensor, b: Tensor) -> Tensor:
        """Products of each token of a with each of b, decayed: [..., size, size]."""
        if decay.shape[-1] == 1:
            return (a @ b.mT) * decay[..., 0]
        return (a[..., :, None, :] * b[..., None, :, :] * decay).sum(-1)

    # Each new value is what is left of a value after what the state and the chunk's earlier tokens say of its key.
    system = relate(k * rate, k)
    given, read = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (v * rate, k * rate * total.exp() * begun)
    )
    inside, across = relate(q, k), q * total.exp() * begun
    written, kept = k * (total[..., -1:, :] - total).exp() * ends, total[..., -1, :].exp() * chunks.kept[..., None]
    state, results = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for chunk in range(v.shape[2]):
        new = given[:, :, chunk] - read[:, :, chunk] @ state
        results.append(across[:, :, chunk] @ state + inside[:, :, chunk] @ new)
        state = state * kept[:, :, chunk, :, None] + written[:, :, chunk].mT @ new
    return torch.stack(results, 2).movedim(1, 3).flatten(1, 2)[:, :length].to(dtype), None


def scan_state_space(
    documents: Tensor,
    original: Original,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """The recurrence of Mamba2, whose state begins anew at each document. x: [batch, length, heads, width]; dt: [batch,
    length, heads]; A, D, dt_bias: [heads]; B, C: [batch, length, groups, states]. Returns what x has, in fp32."""
    length, heads = x.shape[1:3]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    B, C = (part.float().repeat_interleave(heads // part.shape[2], dim=2) for part in (B, C))
    size = min(chunk_size, length)
    chunks = ChunkedDocuments(documents, size)
    values, keys, queries = (cut_chunks(part, size) for part in (x.float() * dt[..., None], B, C))
    total = cut_chunks(A.float() * dt, size).cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~chunks.pairs, float("-inf"))
    inside = (queries @ keys.mT * between.exp()) @ values
    written = (keys * ((total[..., -1:] - total).exp() * chunks.ends)[..., None]).mT @ values
    kept = total[..., -1].exp() * chunks.kept
    state, before = torch.zeros_like(written[:, :, 0]), []
    for chunk in range(written.shape[2]):
        before.append(state)
        state = state * kept[:, :, chunk, None, None] + written[:, :, chunk]
    across = (queries * (total.exp() * chunks.begun)[..., None]) @ torch.stack(before, 2)
    result = (inside + across).movedim(1, 3).flatten(1, 2)[:, :length].contiguous()  # some callers want a view of it
    return result if D is None else result + D.float()[:, None] * x.float()


LONG = 1e10
"""A step in which every state decays to nothing. It is so short that what it divides is no denormal number."""


def scan_selective(
    documents: Tensor,
    original: Original,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **more: Any,
) -> Tensor:
    """The recurrence of Mamba, whose state begins anew at each document. It is the function itself, also where a fused
    kernel computes it: the first step of a document is so long that the state decays, and its input as much smaller.
    x, dt, z: [batch, channels, length]; A: [channels, states]; B, C: [batch, states, length]; D, delta_bias:
    [channels]."""
    dt = dt.float() if delta_bias is None else dt.float() + delta_bias[:, None]
    dt = F.softplus(dt) if delta_softplus else dt
    first = (documents != F.pad(documents[:, :-1], (1, 0), value=-1))[:, None]
    wide, scale = x.float(), torch.where(first, dt / LONG, 1.0)
    result = original(wide * scale, torch.where(first, LONG, dt), A, B.float(), C.float(), **more)
    result = result if D is None else result + D[:, None] * wide
    return (result if z is None else result * F.silu(z.float())).to(x.dtype)


def skip_fused(documents: Tensor, original: Original, *_: Any, **__: Any) -> None:
    """Stands for a kernel that computes a whole mixer, and says, as the code expects, that there is none."""


SCANS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve_documents,
    "torch_chunk_gated_delta_rule": scan_delta,
    "chunk_kimi_delta_attention": scan_delta,
    "mamba2_chunk_scan": scan_state_space,
    "mamba2_split_conv1d_scan_combined": skip_fused,
    "mamba_selective_scan": scan_selective,
    "mamba_inner_fn": skip_fused,
}
"""Function of a module -> what it becomes with documents."""


class Mixing(Protocol):
    """What such a function needs to know of the pass that is being computed. calls: of functions that keep documents
    apart, also attention; recurrent: whether one of these was called."""

    documents: Tensor | None
    calls: int
    recurrent: bool


def replace_scans(module: ModuleType, current: Callable[[], Mixing | None]) -> None:
    """Replaces the functions of a module of transformers that mix tokens. current: the pass that is being computed."""
    for name, scan in SCANS.items():
        original = vars(module).get(name)
        if original is not None and not hasattr(original, "replaced"):
            setattr(module, name, replace_scan(original, scan, current))


def replace_scan(original: Original, scan: Callable, current: Callable[[], Mixing | None]) -> Original:
    """`original`, or in a pass with documents `scan`."""

    @wraps(original)
    def run(*arguments: Any, **named: Any) -> Any:
        mixing = current()
        if mixing is None:
            return original(*arguments, **named)
        if not is_compiling():  # what is recomputed must not change any object
            mixing.calls, mixing.recurrent = mixing.calls + 1, True
        if mixing.documents is None:
            return original(*arguments, **named)
        return scan(mixing.documents, original, *arguments, **named)

    run.replaced = True  # type: ignore[attr-defined]
    return run
