"""The blocks that a model is made of: linear, norm, rotary positions, attention, feed-forward, layer."""
from __future__ import annotations

import math
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.attention import attend
from trainer.model.axes import Declared
from trainer.model.spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec, RopeSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Linear(Declared):
    """y = x W^T + b with W: [outputs, inputs]; `axes` names (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str, str], bias: bool = False, residual: bool = False):
        super().__init__()
        self.declare("weight", (outputs, inputs), axes, "matrix", residual)
        self.bias = None
        if bias:
            del self.bias
            self.declare("bias", (outputs,), axes[:1], "bias")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(Declared):
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467) or LayerNorm over the last dimension."""

    def __init__(self, width: int, spec: NormSpec, axis: str = "embed"):
        super().__init__()
        self.kind, self.eps, self.offset, self.width = spec.kind, spec.eps, spec.offset, width
        self.declare("weight", (width,), (axis,), "norm")
        if spec.kind == "layer":
            self.declare("bias", (width,), (axis,), "norm")

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:  # in fp32: a small weight beside the offset would be lost in bf16
            wide = torch.promote_types(x.dtype, torch.float32)
            return self.normalise(x.to(wide), self.weight.to(wide) + self.offset).to(x.dtype)
        return self.normalise(x, self.weight)

    def normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), weight, self.bias.to(weight.dtype), self.eps)
        return F.rms_norm(x, (self.width,), weight, self.eps)


class Rotary(nn.Module):
    """Cosines and sines of rotary positions, computed once for all layers that share frequencies."""

    def __init__(self, spec: RopeSpec, head_dim: int):
        super().__init__()
        self.spec, self.size = spec, int(head_dim * spec.fraction)
        self.register_buffer("frequencies", torch.empty(self.size // 2), persistent=False)

    def reset_buffers(self) -> None:
        """Fills the frequencies; called once the module has left the meta device."""
        spec = self.spec
        frequencies = 1.0 / spec.theta ** (torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
        if spec.scaling == "linear":
            frequencies = frequencies / spec.factor
        elif spec.scaling == "llama3":  # Llama 3.1: long waves are stretched, short ones kept, a ramp between
            wavelength = 2 * math.pi / frequencies
            ramp = (spec.original_length / wavelength - spec.low_frequency_factor) / (
                spec.high_frequency_factor - spec.low_frequency_factor)
            ramp = ramp.clamp(0, 1)
            frequencies = (1 - ramp) * frequencies / spec.factor + ramp * frequencies
        self.frequencies.copy_(frequencies)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [length] or [batch, length]. Returns cos and sin, fp32, each [batch or 1, 1, length, size / 2]."""
        angles = positions.float()[..., None] * self.frequencies
        angles = angles[None, None] if positions.dim() == 1 else angles[:, None]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the leading dimensions of each head, pairing dimension i with i + size / 2. x: [batch, heads, length, head_dim]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half:2 * half].float(), x[..., 2 * half:]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, spec: AttentionSpec, norm: NormSpec, width: int):
        super().__init__()
        self.head_dim, self.scale, self.soft_cap, self.rotary = spec.head_dim, spec.scale, spec.soft_cap, spec.positions == "rope"
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Linear(width, queries, ("heads", "embed"), spec.bias)
        self.k = Linear(width, keys, ("kv_heads", "embed"), spec.bias)
        self.v = Linear(width, keys, ("kv_heads", "embed"), spec.bias)
        self.o = Linear(queries, width, ("embed", "heads"), spec.output_bias, residual=True)
        self.qk_norm = spec.qk_norm
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            self.q_norm = Norm(spec.head_dim if per_head else queries, norm, "head_dim" if per_head else "heads")
            self.k_norm = Norm(spec.head_dim if per_head else keys, norm, "head_dim" if per_head else "kv_heads")

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        """x: [batch, length, width]; rotation: cos and sin of the positions (rope); mask: see `attention.build_mask`."""
        query, key, value = self.q(x), self.k(x), self.v(x)
        if self.qk_norm == "full":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in (query, key, value))  # [batch, length, heads, head_dim]
        if self.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        if self.rotary:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        return self.o(attend(query, key, value, mask, self.scale, self.soft_cap).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated (SwiGLU and relatives, arXiv 2002.05202) or plain two-layer feed-forward block."""

    def __init__(self, spec: FeedForwardSpec, width: int):
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[spec.activation], spec.kind == "gated"
        if self.gated:
            self.gate = Linear(width, spec.width, ("mlp", "embed"), spec.bias)
        self.up = Linear(width, spec.width, ("mlp", "embed"), spec.bias)
        self.down = Linear(spec.width, width, ("embed", "mlp"), spec.bias, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x) if self.gated else self.activation(self.up(x)))


class Layer(nn.Module):
    """One decoder layer. `recompute` calls the body and decides what backward finds saved; `run` may be a compiled version
    of it. Neither wraps the module, so that names stay global."""

    def __init__(self, spec: LayerSpec, width: int, parallel_residual: bool):
        super().__init__()
        self.parallel_residual = parallel_residual
        self.attention = Attention(spec.attention, spec.norm, width)
        self.feed_forward = FeedForward(spec.feed_forward, width)
        pre, post = spec.norm.placement in ("pre", "both"), spec.norm.placement in ("post", "both")
        self.attention_norm = Norm(width, spec.norm) if pre else nn.Identity()
        self.feed_forward_norm = Norm(width, spec.norm) if pre else nn.Identity()
        self.attention_post_norm = Norm(width, spec.norm) if post else nn.Identity()
        self.feed_forward_post_norm = Norm(width, spec.norm) if post else nn.Identity()
        self.recompute: Callable | None = None
        self.run: Callable = self.run_body

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        return self.run(x, rotation, mask)

    def run_body(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        return self.body(x, rotation, mask) if self.recompute is None else self.recompute(self.body, x, rotation, mask)

    def body(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        """x: [batch, length, width], as the result."""
        attended = self.attention_post_norm(self.attention(self.attention_norm(x), rotation, mask))
        if self.parallel_residual:
            return x + attended + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x)))
        x = x + attended
        return x + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x)))
