"""The model as plain data: one `ModelSpec` describes any decoder that the project trains.

A spec holds the blocks that every layer is made of (`attention`, `feed_forward`, `norm`), the depth, and two ways to
make layers differ: `pattern`, partial overrides repeated cyclically over the depth (Gemma 2's alternating windows), and
`overrides`, partial overrides of single layers or ranges. Families differ by fields, never by subclasses.

This module imports neither torch nor the rest of the project, so that composing a configuration stays quick.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import assign_fields, list_divisors, option
from trainer.config.registry import ATTENTION, FEED_FORWARD


@dataclass
class RopeSpec:
    """Rotary position embedding (Su et al., arXiv 2104.09864), half-split layout as in transformers."""

    theta: float = option(10000.0, "base of the rotation frequencies", range="(0, inf)")
    fraction: float = option(1.0, "leading share of each head's dimensions that is rotated (GPT-NeoX: 0.25)")
    scaling: str = option(
        "none",
        "context extension: linear divides positions; dynamic raises theta with the sequence, beyond model.max_length; "
        "llama3 and yarn stretch slow frequencies alone; longrope has a factor for each frequency",
        ("none", "linear", "dynamic", "llama3", "yarn", "longrope"),
    )
    factor: float = option(1.0, "context extension factor", range="[1, inf)")
    low_frequency_factor: float = option(
        1.0, "llama3 scaling: wavelengths above original_length / this are divided by factor"
    )
    high_frequency_factor: float = option(4.0, "llama3 scaling: wavelengths below original_length / this are kept")
    original_length: int = option(
        8192, "llama3, yarn, longrope scaling: context length before extension", unit="tokens", range="[1, inf)"
    )
    beta_fast: float = option(
        32.0, "yarn scaling: dimensions that turn more often within original_length are kept", range="(0, inf)"
    )
    beta_slow: float = option(
        1.0, "yarn scaling: dimensions that turn less often are divided by factor", range="(0, inf)"
    )
    truncate: bool = option(True, "yarn scaling: the bounds between which it blends are whole dimensions")
    attention_factor: float = option(
        0.0, "yarn, longrope scaling: factor on cosines and sines; 0 means what follows from factor", range="[0, inf)"
    )
    mscale: float = option(
        0.0, "yarn scaling: weight of log(factor) in the attention factor, beside mscale_all_dim", range="[0, inf)"
    )
    mscale_all_dim: float = option(
        0.0, "yarn scaling: the same in what the attention factor is divided by, beside mscale", range="[0, inf)"
    )
    short_factor: list[float] = option(
        [], "longrope scaling: divisor of each frequency in sequences up to original_length", range="(0, inf)"
    )
    long_factor: list[float] = option([], "longrope scaling: the same in longer sequences", range="(0, inf)")

    def temperature(self, weight: float) -> float:
        """YaRN's temperature (section 3.4) with a weight of log(factor), as DeepSeek defines it."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def check(self, size: int) -> list[str]:
        """What is wrong with the scaling of `size` rotated dimensions."""
        path, found = "model.attention.rope", []
        if self.scaling == "dynamic" and size < 4:
            found.append(f"{path}.scaling=dynamic needs 4 rotated dimensions of a head, and there are {size}")
        if self.scaling == "yarn" and self.theta <= 1:
            found.append(f"{path}.theta={self.theta} must be above 1 for {path}.scaling=yarn")
        if self.scaling == "longrope" and self.original_length < 2:
            found.append(f"{path}.original_length={self.original_length} must be above 1 for {path}.scaling=longrope")
        for name in ("short_factor", "long_factor") if self.scaling == "longrope" else ():
            factors = getattr(self, name)
            if len(factors) != size // 2 or not all(factor > 0 for factor in factors):
                found.append(
                    f"{path}.{name} must have a positive number for each of the {size // 2} frequencies of a head, and "
                    f"has {factors}"
                )
        return found


DEEPEST = 1_000
"""Layers of a model: published ones have some hundred. Each is looked at by itself, and to split them over stages takes
a time that grows with their square."""
SCALING_FIELDS = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_frequency_factor", "high_frequency_factor", "original_length"),
    "yarn": (
        "factor",
        "original_length",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "longrope": ("factor", "original_length", "short_factor", "long_factor", "attention_factor"),
}
"""`RopeSpec.scaling` -> the fields that it reads, besides theta and fraction."""


LATENT_EPS = 1e-6
"""The eps of the norms of latent vectors. DeepSeek's code and transformers use it whatever rms_norm_eps is."""


@dataclass
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1). Keys and values of all heads are projections of one
    latent vector for each token. A key consists of a part without positions, of its own head, and a rotated part that
    all heads share."""

    q_rank: int = option(0, "size of the latent vector of queries; 0 means that they have none", range="[0, inf)")
    kv_rank: int = option(512, "size of the latent vector of keys and values", range="[1, inf)")
    nope_dim: int = option(128, "dimensions of a query and key head without positions", range="[1, inf)")
    rope_dim: int = option(64, "rotated dimensions of a query head, and of the key of all heads", range="[2, inf)")
    value_dim: int = option(128, "dimensions of a value head, at most nope_dim + rope_dim", range="[1, inf)")

    @property
    def head_dim(self) -> int:
        """Dimensions of a query and key head."""
        return self.nope_dim + self.rope_dim

    def check(self, a: AttentionSpec) -> list[str]:
        """What is wrong with the attention block `a`, whose latent vectors these are."""
        path = "model.attention"
        unused = {
            f"head_dim={a.head_dim}": (a.head_dim != self.head_dim, f"head_dim={self.head_dim}, or 0"),
            f"qk_norm={a.qk_norm}": (a.qk_norm != "none", "qk_norm=none"),
            f"rope.fraction={a.rope.fraction}": (a.rope.fraction != 1, "rope.fraction=1"),
        }
        found = [
            f"{path}.{given} contradicts {path}.kind=latent, whose heads {path}.latent describes; set {path}.{legal}"
            for given, (wrong, legal) in unused.items()
            if wrong
        ]
        if a.kv_heads != a.heads:
            found.append(
                f"{path}.kv_heads={a.kv_heads} differs from {path}.heads={a.heads}, and {path}.kind=latent has keys "
                f"for each head; set {path}.kv_heads=0"
            )
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                found.append(f"{path}.latent.{name}={getattr(self, name)} must be positive")
        if self.q_rank < 0:
            found.append(f"{path}.latent.q_rank={self.q_rank} must be positive, or 0 for none")
        if self.rope_dim % 2:
            found.append(f"{path}.latent.rope_dim={self.rope_dim} must be even")
        if self.value_dim > self.head_dim:
            found.append(
                f"{path}.latent.value_dim={self.value_dim} is above nope_dim + rope_dim; legal: up to {self.head_dim}"
            )
        return found or (a.rope.check(self.rope_dim) if a.positions == "rope" else [])


@dataclass
class AttentionSpec:
    """Causal self-attention with grouped key-value heads."""

    kind: str = option("softmax", "attention block", ATTENTION)
    latent: LatentSpec = option(LatentSpec(), "sizes of kind=latent")
    heads: int = option(8, "query heads")
    kv_heads: int = option(0, "key-value heads; 0 means as many as query heads")
    head_dim: int = option(0, "dimensions per head; 0 means width / heads")
    bias: bool = option(False, "bias on the query, key and value projections")
    output_bias: bool = option(False, "bias on the output projection")
    qk_norm: str = option(
        "none", "norm on queries and keys: per head (Qwen3) or over all heads at once (OLMo2)", ("none", "head", "full")
    )
    window: int = option(
        0, "sliding window: a token sees itself and the window - 1 tokens before it; 0 means all", unit="tokens"
    )
    soft_cap: float = option(0.0, "scores become cap * tanh(scores / cap); 0 means off (Gemma 2: 50)")
    sinks: bool = option(
        False, "each head has a learned logit that joins the denominator of its softmax and has no value (GPT-OSS)"
    )
    scale: float = option(
        0.0,
        "factor on the scores; 0 means head_dim ** -0.5, for kind=latent with yarn scaling multiplied by the square of "
        "what mscale_all_dim gives",
    )
    positions: str = option(
        "rope", "rotary positions, or none (learned positions are a field of the model)", ("rope", "none")
    )
    rope: RopeSpec = option(RopeSpec(), "rotary frequencies")
    settings: dict[str, Any] = option({}, "settings of a registered kind, by its name", registry=ATTENTION)

    @property
    def changes_softmax(self) -> bool:
        """Whether the weights of the keys are more than a softmax of scaled scores. Kernels of plain attention cannot
        compute them."""
        return bool(self.soft_cap or self.sinks)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head of which `rope.fraction` is rotated."""
        return self.latent.rope_dim if self.kind == "latent" else self.head_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a value head."""
        return self.latent.value_dim if self.kind == "latent" else self.head_dim

    def resolve(self, width: int) -> None:
        """Replaces zeros by what they mean in a residual stream of `width`."""
        latent = self.kind == "latent"
        self.kv_heads = self.kv_heads or self.heads
        self.head_dim = self.head_dim or (self.latent.head_dim if latent else width // max(self.heads, 1))
        if not self.scale:
            self.scale = max(self.head_dim, 1) ** -0.5
            if latent and self.rope.scaling == "yarn":
                self.scale *= self.rope.temperature(self.rope.mscale_all_dim) ** 2


EXPERT_ALIGNMENT = 8
"""The grouped GEMM of GPUs reads rows at multiples of 16 bytes, which are 8 elements in 16 bits."""

LOSS_OF_EXPERTS = ("experts.balance", "experts.balance_over", "experts.bias_rule", "experts.z_loss")
"""Ends of the names of fields that change how a model is trained, and not what it computes."""

MOST_EXPERTS = 4_096
"""Experts of a layer: published models have some hundred. Each is drawn, read and written by itself."""


@dataclass
class ExpertsSpec:
    """Mixture of experts: a router chooses for each token `top_k` of `count` gated blocks, each of
    `feed_forward.width`, and adds up their outputs, weighted by its scores. No token is dropped."""

    count: int = option(0, "experts of a layer; 0 means a dense block", range="[0, inf)")
    top_k: int = option(2, "experts that each token is sent to", range="[1, inf)")
    score: str = option(
        "softmax",
        "how the router's logits become scores, in fp32: over all experts, or each by itself",
        ("softmax", "sigmoid", "sqrtsoftplus"),
    )
    normalise: bool = option(True, "the scores of the chosen experts are divided by their sum")
    scale: float = option(1.0, "factor on the scores of the chosen experts", range="(0, inf)")
    groups: int = option(1, "equal groups of neighbouring experts, of which a token uses the best", range="[1, inf)")
    top_groups: int = option(1, "groups that a token chooses its experts from", range="[1, inf)")
    group_score: str = option(
        "max", "score of a group: that of its best expert, or the sum of its two best", ("max", "top2")
    )
    shared_width: int = option(
        0, "hidden width of a gated block that every token passes through besides; 0 means none", range="[0, inf)"
    )
    shared_gate: bool = option(
        False, "the output of the shared block is multiplied by a sigmoid of the token (Qwen2-MoE)"
    )
    router_bias: bool = option(False, "bias on the router's logits (GPT-OSS)")
    bias_rate: float = option(
        0.0,
        "change of each expert's bias in a step, towards equal load; it is added to the score for the choice alone "
        "(DeepSeek-V3: 1e-3); with bias_rule=quantile, the share of the computed change that is applied (Kimi K3: 1); "
        "0 means no bias",
        range="[0, inf)",
    )
    bias_rule: str = option(
        "sign",
        "how the biases change: by bias_rate towards equal load, or by the change with which the tokens of the step "
        "would have loaded the expert equally",
        ("sign", "quantile"),
    )
    balance: float = option(
        0.0,
        "factor of the balance loss, which is 1 a token and layer where experts have equal load; 0 means none",
        range="[0, inf)",
    )
    balance_over: str = option(
        "sequence",
        "whose load the balance loss takes: that of the same sequence, or that of the whole previous step",
        ("sequence", "previous"),
    )
    z_loss: float = option(
        0.0,
        "factor of the squared log-normaliser of the router's logits (ST-MoE: 1e-3); 0 means none",
        range="[0, inf)",
    )

    @property
    def buffers(self) -> list[str]:
        """What a router keeps of the load of its experts: `balance`, biases, and `usage`, the load in the previous
        step."""
        previous = self.balance > 0 and self.balance_over == "previous"
        return ["balance"] * (self.bias_rate > 0) + ["usage"] * previous

    def check(self, width: int, block: FeedForwardSpec) -> list[str]:
        """What is wrong with the experts of `block` in a residual stream of `width`."""
        path, found = "model.feed_forward.experts", []
        if self.count > MOST_EXPERTS:
            return [f"{path}.count={self.count} is beyond any model; legal: up to {MOST_EXPERTS}"]
        if block.kind != "gated":
            found.append(
                f"{path}.count={self.count}: experts are gated, and model.feed_forward.kind={block.kind}; set "
                "model.feed_forward.kind=gated, or count=0"
            )
        for name, size in (("model.width", width), ("model.feed_forward.width", block.width)):
            if size % EXPERT_ALIGNMENT:
                found.append(
                    f"{name}={size} must be a multiple of {EXPERT_ALIGNMENT} for the grouped GEMM of experts; the "
                    f"next is {-(-size // EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT}"
                )
        if self.count % self.groups:
            legal = ", ".join(map(str, list_divisors(self.count)))
            found.append(f"{path}.groups={self.groups} does not divide {path}.count={self.count}; legal: {legal}")
        elif self.top_groups > self.groups:
            found.append(f"{path}.top_groups={self.top_groups} is above {path}.groups={self.groups}")
        elif self.top_k > (most := self.count // self.groups * self.top_groups):
            of = f" in {self.top_groups} of {self.groups} groups" * (self.groups > 1)
            found.append(f"{path}.top_k={self.top_k} is above the {most} experts{of}; legal: 1 to {most}")
        elif self.group_score == "top2" and self.groups > 1 and self.count == self.groups:
            found.append(f"{path}.group_score=top2 needs two experts in a group; set group_score=max, or fewer groups")
        if self.shared_gate and not self.shared_width:
            found.append(f"{path}.shared_gate=true needs a shared block; set {path}.shared_width, or shared_gate=false")
        found += self.check_bias_rule(path)
        if self.balance_over != "sequence" and not self.balance:
            found.append(
                f"{path}.balance_over={self.balance_over} has no effect without a balance loss; set {path}.balance, or "
                "balance_over=sequence"
            )
        return found

    def check_bias_rule(self, path: str) -> list[str]:
        """What `bias_rule=quantile` cannot go with. path: of these settings."""
        if self.bias_rule == "sign":
            return []
        prefix, way_out = f"{path}.bias_rule={self.bias_rule}", f"or {path}.bias_rule=sign"
        found = []
        if not 0 < self.bias_rate <= 1:
            found.append(
                f"{path}.bias_rate={self.bias_rate:g} must be above 0 and at most 1 with {prefix}, where it is the "
                f"share of the computed change; set {path}.bias_rate=1, {way_out}"
            )
        if self.groups > 1:
            found.append(
                f"{prefix}: the score that an expert needs is not defined for a choice within {path}.groups="
                f"{self.groups}; set {path}.groups=1, {way_out}"
            )
        if self.top_k == self.count:
            found.append(
                f"{prefix}: {path}.top_k={self.top_k} sends each token to all {self.count} experts, which leaves "
                f"nothing to balance; set a smaller {path}.top_k, {way_out}"
            )
        return found


@dataclass
class FeedForwardSpec:
    """Feed-forward block: `gated` is down(act(gate(x)) * up(x)) (SwiGLU, GeGLU), `plain` is down(act(up(x))). With
    clamped_swiglu (GPT-OSS), `gated` is down(g * sigmoid(1.702 g) * (u + 1)), where g is gate(x), at most 7, and u is
    up(x), within -7 and 7."""

    kind: str = option("gated", "feed-forward block", FEED_FORWARD)
    width: int = option(1024, "hidden width; of each expert, where there are experts")
    activation: str = option(
        "silu", "non-linearity; clamped_swiglu needs a gate", ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
    )
    bias: bool = option(False, "bias on the projections")
    experts: ExpertsSpec = option(ExpertsSpec(), "experts instead of one block")
    settings: dict[str, Any] = option({}, "settings of a registered kind, by its name", registry=FEED_FORWARD)


@dataclass
class NormSpec:
    """Normalisation of the residual stream."""

    kind: str = option("rms", "RMSNorm or LayerNorm (with bias)", ("rms", "layer"))
    eps: float = option(1e-5, "added to the variance", range="[0, inf)")
    offset: float = option(0.0, "added to the stored weight (Gemma stores weight - 1: offset 1)")
    placement: str = option("pre", "before each block, after it (OLMo2), or both (Gemma 2)", ("pre", "post", "both"))


@dataclass
class InitSpec:
    """Initial weights. Norm weights start at one (less the offset), biases and sinks at zero."""

    std: float = option(0.02, "standard deviation of matrices; 0 means sqrt(2 / (5 width)) (GPT-NeoX small init)")
    truncate: float = option(0.0, "values are drawn within this many standard deviations; 0 means no limit")
    embedding_std: float = option(0.0, "standard deviation of the token embedding; 0 means std")
    residual: str = option(
        "depth",
        "projections that write to the residual stream: 'depth' divides std by sqrt(2 depth) (GPT-2, Llama), 'wang' "
        "uses 2 / (depth sqrt(width)) (GPT-NeoX), 'none' leaves std",
        ("depth", "wang", "none"),
    )


@dataclass
class AdapterSpec:
    """Low-rank adapters beside frozen matrices (LoRA, Hu et al., arXiv 2106.09685): y = x W^T + scale (x A^T) B^T."""

    rank: int = option(
        0, "rank of the matrices A and B; 0 means no adapters, and all parameters are trained", range="[0, inf)"
    )
    alpha: float = option(32.0, "numerator of the scale of an adapter's output", range="(0, inf)")
    scale: str = option(
        "rank",
        "factor on an adapter's output: alpha / rank, or for root alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)",
        ("rank", "root"),
    )
    targets: list[str] = option(
        ["*"], "linear layers that get an adapter: patterns of names such as layers.0.attention.q"
    )
    trained: list[str] = option(
        [], "parameters of the model that are trained beside the adapters: patterns of names such as norm.weight"
    )
    weights: str = option(
        "compute",
        "type of the frozen matrices of layers: precision.compute, or fp8 (e4m3), rounded once when they are read, "
        "with a power of two as the scale of each row",
        ("compute", "fp8"),
    )

    @property
    def factor(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / (self.rank if self.scale == "rank" else self.rank**0.5)


@dataclass
class LayerSpec:
    """One layer after pattern and overrides are applied."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec


@dataclass
class ModelSpec:
    """A decoder-only language model."""

    name: str = option("tiny", "name of the model, for tables and run metadata")
    family: str = option(
        "llama",
        "transformers architecture that the model is exported as",
        (
            *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "olmo2", "gemma2", "phi3"),
            *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        ),
    )
    vocab_size: int = option(4096, "rows of the token embedding", unit="tokens")
    width: int = option(256, "width of the residual stream")
    depth: int = option(4, "number of layers")
    max_length: int = option(2048, "longest sequence the model is built for", unit="tokens")
    tied: bool = option(False, "the head shares the token embedding's weight")
    parallel_residual: bool = option(
        False, "attention and feed-forward read the same input and are added together (GPT-NeoX)"
    )
    learned_positions: bool = option(False, "a learned embedding is added at each position (GPT-2)")
    embedding_scale: float = option(1.0, "factor on the token embedding's output (Gemma: sqrt(width))")
    logit_soft_cap: float = option(0.0, "logits become cap * tanh(logits / cap); 0 means off (Gemma 2: 30)")
    attention: AttentionSpec = option(AttentionSpec(), "attention block of every layer")
    feed_forward: FeedForwardSpec = option(FeedForwardSpec(), "feed-forward block of every layer")
    norm: NormSpec = option(NormSpec(), "norms of every layer, and the final norm")
    init: InitSpec = option(InitSpec(), "initial weights")
    adapter: AdapterSpec = option(AdapterSpec(), "low-rank adapters (LoRA), which are trained instead of the model")
    pattern: list[Any] = option(
        [],
        "partial overrides of attention, feed_forward or norm, repeated cyclically over the depth; `repeat: n` in an "
        "entry stands for n layers",
    )
    overrides: dict[str, Any] = option(
        {},
        "partial overrides by layer: 0, -1 or a range first:last (last not included), such as {0: {feed_forward: "
        "{width: 704}}}",
    )

    def layer(self, index: int) -> LayerSpec:
        """The resolved blocks of layer `index` (0-based): common fields, then pattern, then overrides."""
        layer = LayerSpec(copy.deepcopy(self.attention), copy.deepcopy(self.feed_forward), copy.deepcopy(self.norm))
        cycle = [entry for entry in self.pattern for _ in range(min(int(entry.get("repeat", 1)), self.depth))]
        changes = [cycle[index % len(cycle)]] if cycle else []
        changes += [change for where, change in self.overrides.items() if index in layer_range(where, self.depth)]
        for change in changes:
            assign_fields(layer, {block: fields for block, fields in change.items() if block != "repeat"}, "model")
        layer.attention.resolve(self.width)
        return layer

    def check(self) -> list[str]:
        """Everything that is wrong with the spec, one sentence each that names the field, its value and the way out."""
        problems = [
            f"model.{name}={getattr(self, name)} must be positive"
            for name in ("vocab_size", "width", "depth", "max_length")
            if getattr(self, name) < 1
        ]
        if self.depth > DEEPEST:
            problems.append(f"model.depth={self.depth} is beyond any model; legal: up to {DEEPEST}")
        if problems:
            return problems
        try:
            layers = [self.layer(i) for i in range(self.depth)]
        except (ValueError, AttributeError, TypeError) as error:
            return [f"model.pattern or model.overrides: {error}"]
        for index, layer in enumerate(layers):
            a, found = layer.attention, []
            if a.heads < 1:
                found.append(f"model.attention.heads={a.heads} must be positive")
            elif a.kind == "latent":
                found += a.latent.check(a)
            elif a.latent != LatentSpec():
                found.append(
                    f"model.attention.latent is for model.attention.kind=latent, and the kind is {a.kind}; leave it "
                    "out, or set model.attention.kind=latent"
                )
            elif a.head_dim * a.heads != self.width and self.attention.head_dim == 0:
                unit = 2 * a.heads  # of a width whose heads have an even dimension
                widths = [str(n) for n in (self.width // unit * unit, (self.width // unit + 1) * unit) if n]
                legal = [str(n) for n in list_divisors(self.width) if n <= 128 and (self.width // n) % 2 == 0]
                heads = [f"model.attention.heads to one of {', '.join(legal)}"] if legal else []
                ways = [f"model.width={' or '.join(widths)}", *heads, "model.attention.head_dim"]
                found.append(
                    f"model.attention.heads={a.heads} does not divide model.width={self.width}; "
                    f"set {', or '.join(ways)}"
                )
            elif a.kv_heads < 1 or a.heads % a.kv_heads:
                found.append(
                    f"model.attention.kv_heads={a.kv_heads} does not divide model.attention.heads={a.heads}; legal: "
                    f"{', '.join(map(str, list_divisors(a.heads)))}"
                )
            elif a.head_dim < 1:
                found.append(
                    f"model.attention.head_dim={a.head_dim} must be positive, or 0 for model.width / "
                    "model.attention.heads"
                )
            elif a.positions == "rope" and not 0 < a.rope.fraction <= 1:
                found.append(f"model.attention.rope.fraction={a.rope.fraction} must lie in (0, 1]")
            elif a.positions == "rope" and int(a.head_dim * a.rope.fraction) % 2:
                found.append(f"model.attention.head_dim={a.head_dim} x rope.fraction={a.rope.fraction} must be even")
            elif a.positions == "rope":
                found += a.rope.check(int(a.head_dim * a.rope.fraction))
            if layer.feed_forward.width < 1:
                found.append(f"model.feed_forward.width={layer.feed_forward.width} must be positive")
            elif layer.feed_forward.kind == "plain" and layer.feed_forward.activation == "clamped_swiglu":
                found.append(
                    "model.feed_forward.activation=clamped_swiglu needs a gate, and model.feed_forward.kind=plain has "
                    "none; set model.feed_forward.kind=gated, or another activation"
                )
            elif layer.feed_forward.experts.count:
                found += layer.feed_forward.experts.check(self.width, layer.feed_forward)
            if found:
                return [f"layer {index}: {text}" if self.pattern or self.overrides else text for text in found]
        return []

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {field.name: values[field.name] for field in dataclasses.fields(spec_class(values))}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelSpec:
        """The inverse of `to_dict`; an unknown field raises `ValueError` naming it."""
        spec = spec_class(values)()
        assign_fields(spec, values, "model")
        return spec


@dataclass
class CodeLayerSpec(LayerSpec):
    """A layer of a `CodeSpec`. code: its table."""

    code: dict[str, Any]


@dataclass
class CodeSpec(ModelSpec):
    """A model whose layers are transformers' own code. The fields of `ModelSpec` say what plans and estimates ask of it
    (sizes, windows, experts). What its modules are follows from `transformers`, plain values:

    config: the whole config.json. layers: for each layer the number of its table. tables: the distinct layers. Each has
    `parameters`, name within the layer -> fields of `ParameterInfo`; `buffers`, name -> shape of those that checkpoints
    hold; `attention`, the name of that block; and `blocks`, name of a block whose tokens tensor-parallel ranks gather
    -> "cut" (each rank has a part of its weights) or "whole" (each rank computes all of it). A layer with experts has
    `shared`, whether ranks can share them. paths, outer: see `CodeParts`. outer_tables: `before` and `behind` the
    layers, name -> fields of `ParameterInfo`. head_scale: factor on the hidden states that the head reads. masks:
    whether the code computes attention itself, by dense masks. tp, pp: whether the code may be divided so.
    """

    family: str = option("", "type of the model in transformers")
    transformers: dict[str, Any] = option({}, "the model's code, see `CodeSpec`")

    # Such a spec may stand where settings of a model do, as `model_from_hf` returns it.
    from_hf = None
    code = "transformers"
    code_unproven = False

    @property
    def extend(self) -> dict[str, Any]:
        """`model.extend` does not change code."""
        return {}

    def layer(self, index: int) -> CodeLayerSpec:
        layer = super().layer(index)
        table = self.transformers["tables"][self.transformers["layers"][index]]
        return CodeLayerSpec(layer.attention, layer.feed_forward, layer.norm, table)

    def check(self) -> list[str]:
        try:
            tables = [self.transformers["tables"][number] for number in self.transformers["layers"]]
            whole = isinstance(self.transformers["config"], dict) and float(self.transformers["head_scale"]) > 0
            whole = whole and {"embedding", "layers", "head"} <= self.transformers["paths"].keys()
            whole = whole and {"before", "behind"} <= self.transformers["outer_tables"].keys()
            whole = whole and "packed" in self.transformers["outer"]
            whole = whole and all({"parameters", "buffers", "blocks", "attention"} <= table.keys() for table in tables)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            whole, tables = False, []
        if not whole or len(tables) != self.depth:
            return ["model.transformers does not describe the layers of a model; read model.from_hf anew"]
        return []


def runs_foreign_code(spec: ModelSpec) -> bool:
    """Whether a model runs by transformers' code."""
    return isinstance(spec, CodeSpec)


def spec_class(values: dict[str, Any]) -> type[ModelSpec]:
    """The class of a spec with such values."""
    return CodeSpec if "transformers" in values else ModelSpec


def layer_range(where: str, depth: int) -> range:
    """The layers that '3', '-1' or '2:5' names. Raises `ValueError` where that is no such text, or names no layer of
    the model."""
    first, colon, last = str(where).partition(":")
    try:
        start = int(first) if first or not colon else 0
        end = int(last) if last else depth if colon else start + 1 or depth
    except ValueError:
        raise ValueError(
            f"'{where}' names no layers; write the number of one, such as 3 or -1, or a range, such as 2:5"
        ) from None
    start, end = (start + depth if start < 0 else start), (end + depth if end < 0 else end)
    if not 0 <= start < end <= depth:
        legal = f"ranges within 0:{depth}" if colon else f"{-depth} to {depth - 1}"
        raise ValueError(f"layer {where} is outside the model; model.depth={depth} allows {legal}")
    return range(start, end)
