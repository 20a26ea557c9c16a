"""Rotary positions (Su et al., arXiv 2104.09864) and how families stretch them over longer sequences.

What each kind of scaling computes is what transformers computes of it, to the bit (`modeling_rope_utils.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.model import RopeSpec


class Rotary(nn.Module):
    """Cosines and sines of rotary positions, computed once for all layers that share frequencies.

    max_length: of the model, up to which dynamic scaling leaves the frequencies as they are."""

    def __init__(self, spec: RopeSpec, head_dim: int, max_length: int):
        super().__init__()
        self.spec, self.size, self.max_length = spec, int(head_dim * spec.fraction), max_length
        self.factor = attention_factor(spec)
        self.reach = {"dynamic": max_length, "longrope": spec.original_length}.get(spec.scaling, math.inf)
        self.stretched: dict[int, Tensor] = {}
        self.register_buffer("frequencies", torch.empty(self.size // 2), persistent=False)

    def reset_buffers(self) -> None:
        """Fills the frequencies; called once the module has left the meta device."""
        self.frequencies.copy_(rope_frequencies(self.spec, self.size, self.max_length, 0))

    def forward(self, positions: Tensor, length: int | Tensor) -> tuple[Tensor, Tensor]:
        """positions: [positions] or [batch, positions]. length: tokens of the whole sequence or document that a
        position belongs to: int, or [batch, positions or 1] where they differ. Returns cos and sin, fp32, each [batch
        or 1, positions, 1, size / 2]."""
        angles = positions.float()[..., None] * (self.at(length) if isinstance(length, int) else self.each(length))
        angles = angles[None, :, None] if angles.dim() == 2 else angles[:, :, None]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)

    def at(self, length: int) -> Tensor:
        """The frequencies for sequences of a length, which two kinds of scaling depend on: all positions have them."""
        if length <= self.reach:
            return self.frequencies
        if length not in self.stretched:
            found = rope_frequencies(self.spec, self.size, self.max_length, length)
            self.stretched[length] = found.to(self.frequencies.device)
        return self.stretched[length]

    def each(self, lengths: Tensor) -> Tensor:
        """The same for lengths that differ, [batch, positions or 1]: [batch, positions or 1, size / 2], or [size / 2]
        where the frequencies do not depend on them. The host does not wait for the lengths."""
        if self.reach == math.inf:
            return self.frequencies
        lengths = lengths[..., None]
        if self.spec.scaling == "dynamic":
            longer = rope_frequencies(self.spec, self.size, self.max_length, lengths)
        else:
            longer = self.at(self.reach + 1)
        return torch.where(lengths > self.reach, longer, self.frequencies)


def rope_frequencies(spec: RopeSpec, size: int, max_length: int, length: int | Tensor) -> Tensor:
    """Angles per position of `size` rotated dimensions, [size / 2], fp32, in sequences of `length` tokens. For
    `dynamic` scaling, length may be a tensor [..., 1]; the result is then [..., size / 2]."""
    device = length.device if isinstance(length, Tensor) else None
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return SCALINGS[spec.scaling](spec, exponents, size, max_length, length)


def _none(spec: RopeSpec, exponents: Tensor, size: int, max_length: int, length: int) -> Tensor:
    return 1.0 / spec.theta**exponents


def _linear(spec: RopeSpec, exponents: Tensor, size: int, max_length: int, length: int) -> Tensor:
    """Positions are divided (Chen et al., arXiv 2306.15595)."""
    return 1.0 / spec.theta**exponents / spec.factor


def _dynamic(spec: RopeSpec, exponents: Tensor, size: int, max_length: int, length: int | Tensor) -> Tensor:
    """The base grows with the sequence, from the model's length on (dynamic NTK)."""
    longer = torch.as_tensor(length, dtype=torch.float64).clamp(min=max_length)
    growth = spec.factor * longer / max_length - (spec.factor - 1)
    return 1.0 / (spec.theta * growth ** (size / (size - 2))).float() ** exponents


def _llama3(spec: RopeSpec, exponents: Tensor, size: int, max_length: int, length: int) -> Tensor:
    """Long waves are stretched, short ones kept, with a ramp between (Llama 3.1)."""
    frequencies = 1.0 / spec.theta**exponents
    wavelength = 2 * math.pi / frequencies
    low, high = spec.low_frequency_factor, spec.high_frequency_factor
    ramp = ((spec.original_length / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * frequencies / spec.factor + ramp * frequencies


def _yarn(spec: RopeSpec, exponents: Tensor, size: int, max_length: int, length: int) -> Tensor:
    """Dimensions that turn often within the original length are kept, those that turn seldom are stretched, with a
    ramp between (Peng et al., arXiv 2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """The one that turns so often within the original length."""
        return size * math.log(spec.original_length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (low == high)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers, kept = spec.theta**exponents, 1 - ramp
    return 1.0 / (spec.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _longrope(spec: RopeSpec, exponents: Tensor, size: int, max_length: int, length: int) -> Tensor:
    """A factor for each frequency, of two lists by whether the sequence is longer than the original length (Ding et
    al., arXiv 2402.13753)."""
    factors = spec.long_factor if length > spec.original_length else spec.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)


SCALINGS: dict[str, Callable[[RopeSpec, Tensor, int, int, Any], Tensor]] = {
    "none": _none,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""`RopeSpec.scaling` -> the frequencies."""


def attention_factor(spec: RopeSpec) -> float:
    """The factor on cosines and sines: what is given, or what follows from the extension. Scores have its square."""
    if spec.scaling not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor:
        return spec.attention_factor
    if spec.scaling == "longrope":
        reach = math.log(spec.factor) / math.log(spec.original_length) if spec.factor > 1 else 0.0
        return math.sqrt(1 + reach)
    if spec.mscale and spec.mscale_all_dim:
        return spec.temperature(spec.mscale) / spec.temperature(spec.mscale_all_dim)
    return spec.temperature(1.0)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the leading dimensions of each head, pairing dimension i with i + size / 2. x: [batch, length, heads,
    head_dim]. Heads lie side by side in the result, and so in what attention makes of it: a product takes that as it
    is."""
    half = cos.shape[-1]
    rotated, rest = _apply_rotation(x[..., :half], x[..., half : 2 * half], cos, sin), x[..., 2 * half :]
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates all dimensions of each head, pairing dimension 2i with 2i + 1, which is the layout of DeepSeek's weights.
    In the result, the first dimensions of all pairs stand before the second ones. Scores do not depend on that
    order."""
    return _apply_rotation(x[..., 0::2], x[..., 1::2], cos, sin)


def _apply_rotation(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (first, second), rotated in fp32: [..., 2 x pairs] in their type."""
    dtype, first, second = first.dtype, first.float(), second.float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(dtype)
