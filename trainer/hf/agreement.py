"""Asks transformers itself whether its model of a config.json is the model that a spec describes.

Reading back what was written shows only that our reader and our writer agree. What transformers ignores, fills in or
refuses is known to transformers alone, in the version that is installed. So it is asked: it opens the very
configuration, builds it without memory to show the shapes of all parameters, and computes a small model of it, whose
weights come by the same files as a real one's. What is made smaller is the number of layers that are alike, the number
of heads, the widths that follow from it, the vocabulary, and what is longer than the small model's sequence: windows,
and the length from which frequencies depend on the sequence. That takes the same time and memory for a model of any
size. Head dimensions, frequencies and all that is no size stay what they are.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from math import isqrt
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.config.model import LayerSpec, ModelSpec, RopeSpec
from trainer.config.typed import flatten_values
from trainer.hf.config import assign_field, common_layer, config_from_spec, encode_option, mixture_options, same_value
from trainer.hf.families import FAMILIES
from trainer.hf.weights import list_entries, write_weights
from trainer.model.experts import Router
from trainer.model.initial import fill_parameters, name_seed
from trainer.model.transformer import Transformer
from trainer.planning.layer import has_experts
from trainer.planning.parameters import ParameterInfo, declare_parameters
from trainer.util.reading import shorten_foreign

LENGTH = 256
"""Tokens of the small model's sequence: as many as show scaled frequencies, and a window of half of them."""
VOCABULARY = 64
FEED_FORWARD, EXPERTS = 48, 16
TOLERANCE = 3e-5
"""Of the largest logit, for the largest difference. Rounding in fp32 commonly stays below 5e-6; one approximation of
GELU for another, which shows least of all that could be mistaken, is above 1e-4."""
ROUNDING = 10
"""How many times our own rounding error at a token theirs may be besides. Rounding has no common bound: a norm of few
elements that are nearly zero, or scores of one head that are large, enlarge it a thousandfold at single tokens."""
ROUNDED_AGAIN = 8
"""How many more times our own rounding error is measured, with other roundings of the weights, before a difference
counts as beyond it: at a single token the error of one rounding may be small by chance."""
FAR = 0.03
"""A relative difference that counts after three of these roundings, in models without experts: no rounding of a
dense model explains so much."""
MOST = 1 << 28
"""Parameters of the small model. Of published ones it has fewer than 2e7; a folder can claim anything."""
TRIES = 3
"""Sequences of which one has to agree, in models of experts."""
ROPE_GROUPS = ("rope_parameters", "rope_scaling")
SIZES = (
    *("vocab_size", "width", "depth", "max_length", "attention.heads", "attention.kv_heads", "feed_forward.width"),
    *("feed_forward.experts.count", "feed_forward.experts.shared_width"),
)


def check_export(spec: ModelSpec, config: dict[str, Any]) -> None:
    """Raises `ConfigError` where transformers makes another model of `config` than `spec`; it names the field that is
    to blame, which is one whose usual value would be exported faithfully."""
    reason = find_disagreement(spec, config)
    if reason is None:
        return
    written_of_spec = config_from_spec(spec)
    outside = {key: value for key, value in config.items() if key not in written_of_spec}

    def exported(other: ModelSpec) -> bool:
        try:
            return not other.check() and find_disagreement(other, {**config_from_spec(other), **outside}) is None
        except ConfigError:
            return False

    usual = usual_values(spec.family)
    for path, value in sorted(
        flatten_values(asdict(spec)).items(), key=lambda field: field[0] in SIZES
    ):  # those rarely are it
        if path in usual and not same_value(value, usual[path]):
            other = copy.deepcopy(spec)
            assign_field(other, path, usual[path])
            if exported(other):
                raise ConfigError(
                    f"model.{path}={value} cannot be exported as model.family={spec.family}: {reason}; "
                    f"model.{path}={usual[path]} can, or choose another family (supported: {', '.join(FAMILIES)})"
                )
    raise ConfigError(f"model.family={spec.family} cannot be exported: {reason}; choose another family")


def check_import(spec: ModelSpec, config: dict[str, Any]) -> None:
    """Raises `ConfigError` where transformers makes another model of `config` than `spec`; it names the option that is
    to blame, which is one without which both are the same."""
    reason = find_disagreement(spec, config)
    if reason is None:
        return
    found = unusual_options(config, usual_config(config["model_type"]))
    for path, value in sorted(
        found, key=lambda option: option[0][0] in size_options(spec)
    ):  # sizes rarely are to blame
        for other, advice in ((with_option(config, path), "leaving it out"), (with_option(config, path, None), "null")):
            if find_disagreement(spec, other) is None:
                raise ConfigError(
                    f"{'.'.join(path)}={shorten_foreign(value)} is not supported: {reason}; supported: {advice}"
                )
    raise ConfigError(f"model_type={config['model_type']!r}: {reason}")


def find_disagreement(spec: ModelSpec, config: dict[str, Any]) -> str | None:
    """How the model that transformers makes of a complete `config` differs from `spec`; None where it does not."""
    import transformers

    who = f"transformers {transformers.__version__}"
    with silence_transformers(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            whole = transformers.AutoConfig.from_pretrained(
                write_config(folder / "whole", config), local_files_only=True, trust_remote_code=False
            )
            shallow, shallow_config = with_few_layers(spec, config)
            opened = transformers.AutoConfig.from_pretrained(
                write_config(folder / "shallow", shallow_config), local_files_only=True, trust_remote_code=False
            )
            if reason := other_sizes(replace(shallow, depth=spec.depth), whole) or other_shapes(shallow, opened):
                return f"{who} {reason}"
            off = logit_difference(*shrink_model(shallow, shallow_config), folder / "small")
        except Exception as error:  # whatever class of error transformers refuses an option with
            return f"{who} refuses it ({type(error).__name__}: {shorten_foreign(error)})"
    return None if off <= TOLERANCE else f"{who} computes other logits (relative difference {off:.1g})"


def other_sizes(spec: ModelSpec, opened: Any) -> str | None:
    """Which size transformers' configuration has otherwise; null stands for what follows from others."""
    for option, size in size_options(spec).items():
        if (found := getattr(opened, option)) not in (size, None):
            return f"reads {option}={found} instead of {size}"
    return None


def other_shapes(spec: ModelSpec, opened: Any) -> str | None:
    """Which shapes of parameters transformers' model has otherwise; it is built without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(opened, trust_remote_code=False)
    infos = declare_parameters(spec)
    theirs = Counter(tuple(parameter.shape) for parameter in model.parameters())
    stacked = any(len(shape) == 3 for shape in theirs)  # experts, since version 5
    ours = Counter(entry.shape(infos) for entry in list_entries(spec, infos, stacked))
    return None if ours == theirs else f"has parameters of shapes {[*theirs - ours]} instead of {[*ours - theirs]}"


@torch.no_grad()
def logit_difference(spec: ModelSpec, config: dict[str, Any], folder: Path) -> float:
    """The largest difference between transformers' logits and ours, beyond what rounding explains at its token. It is
    relative to the largest logit before a soft cap, because that is what rounding errors grow with."""
    from transformers import AutoModelForCausalLM

    if (parameters := sum(info.size for info in declare_parameters(spec).values())) > MOST:
        raise ValueError(f"{parameters} parameters are left when it is made small: its heads are beyond any model's")
    ours = Transformer(spec).eval()
    fill_parameters(ours, partial(sample_weight, spec))
    for router in ours.modules():
        if isinstance(router, Router) and router.balance is not None:
            router.balance.copy_(torch.linspace(-0.1, 0.1, len(router.balance)))
    tensors = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    write_weights(write_config(folder, config), spec, tensors.__getitem__)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    if wrong := [name for kind in ("missing_keys", "unexpected_keys") for name in report[kind]]:
        raise ValueError(f"the weights have other names: {', '.join(sorted(wrong)[:3])}")
    length = min(spec.max_length, LENGTH) if spec.learned_positions else LENGTH
    ropes = [spec.layer(index).attention.rope for index in range(spec.depth)]
    sizes = {length, *(rope.original_length for rope in ropes if extends_positions(rope))}
    exact = copy.deepcopy(ours).double()

    def logits_of(model: Transformer, tokens: Tensor, soft_cap: float = spec.logit_soft_cap) -> Tensor:
        model.head.loss = replace(model.head.loss, soft_cap=soft_cap)
        return model(tokens)

    def difference(tokens: Tensor) -> float:
        expected = logits_of(exact, tokens)
        logits = theirs.eval()(tokens, use_cache=False, return_dict=True).logits
        error, largest = (logits - expected).abs().amax(-1), logits_of(exact, tokens, 0.0).abs().max()
        rounding, beyond = torch.zeros_like(error), math.inf
        for again, rounded in enumerate(itertools.chain([ours], round_otherwise(exact))):
            rounding = torch.maximum(rounding, (logits_of(rounded, tokens) - expected).abs().amax(-1))
            beyond = ((error - ROUNDING * rounding).clamp(min=0).max() / largest).item()
            if beyond <= TOLERANCE or again > 1 and beyond > FAR and not has_experts(spec):
                break
        return beyond

    # Rounding can send a token to another expert, where the scores of two are nearly equal. Other tokens then show that
    # the models are the same.
    off = math.inf
    for seed in range(TRIES if has_experts(spec) else 1):
        tokens = torch.randint(0, spec.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
        off = min(off, max(difference(tokens[:, :size]) for size in sizes))
        if off <= TOLERANCE:
            break
    return off


def round_otherwise(exact: Transformer) -> Iterator[Transformer]:
    """An fp64 model in fp32, several times, with each weight at most one rounding error off. Each replaces the one
    before it."""
    rounded, eps = copy.deepcopy(exact).float(), torch.finfo(torch.float32).eps
    for seed in range(ROUNDED_AGAIN):
        generator = torch.Generator().manual_seed(seed)
        for weight, value in zip(rounded.parameters(), exact.parameters()):
            weight.data.copy_(value).mul_(1 + eps * torch.rand(weight.shape, generator=generator))
        yield rounded


def sample_weight(spec: ModelSpec, name: str, info: ParameterInfo) -> Tensor:
    """A weight with which every part of the model shows in the logits. Projections are large enough for attention to
    be selective, and logits for a soft cap to count; rows of embeddings begin where the norm's eps counts.

    Queries are divided by what the model's factor on scores has beyond the usual one. Attention is then equally
    selective in every model: larger scores would enlarge the rounding of fp32 beyond `TOLERANCE`."""
    value = torch.randn(info.shape, generator=torch.Generator().manual_seed(name_seed(0, name)))
    if info.role in ("norm", "bias"):
        return value * 0.3 + (1 if info.role == "norm" and name.endswith("weight") else 0)
    rows = torch.logspace(-3, 0, info.shape[0])[:, None] if info.role != "matrix" else 1
    if name.endswith(("attention.q.weight", "attention.q_b.weight")):
        attention = spec.layer(int(name.split(".")[1])).attention
        rows = attention.head_dim**-0.5 / attention.scale
    return value * rows * 2 / info.shape[-1] ** 0.5


def with_few_layers(spec: ModelSpec, config: dict[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
    """Both with the first layer of each kind and the last layer alone."""
    by_layer = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == spec.depth}
    layers = [spec.layer(index) for index in range(spec.depth)]
    kinds = [(layer, [value[index] for value in by_layer.values()]) for index, layer in enumerate(layers)]
    kept = sorted({kinds.index(kind) for kind in kinds} | {spec.depth - 1})
    shallow = with_layers(spec, [layers[index] for index in kept])
    lists = {key: [value[index] for index in kept] for key, value in by_layer.items()}
    return shallow, {**config, **lists, **size_options(shallow, "depth"), **mixture_options(shallow)}


def shrink_model(spec: ModelSpec, config: dict[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
    """Both with few heads, narrow blocks, few tokens, and windows and extended positions that begin within `LENGTH`.
    The width keeps its relation to the number of heads, and what follows from sizes in an architecture does so
    again."""
    layers = [spec.layer(index) for index in range(spec.depth)]
    given = {config.get("sliding_window"), *(layer.attention.window for layer in layers)}
    long = sorted(window for window in given if window and window > LENGTH // 2)
    windows = {window: LENGTH // 2 + index for index, window in enumerate(long)}
    heads = layers[0].attention.heads
    layers = [narrow_layer(layer, windows) for layer in layers]
    small = with_layers(spec, layers)
    if spec.width % heads == 0:
        small.width = spec.width // heads * small.attention.heads
    small.vocab_size = min(spec.vocab_size, VOCABULARY)
    small.max_length = min(spec.max_length, LENGTH) if spec.learned_positions else spec.max_length
    if any(layer.attention.rope.scaling == "dynamic" for layer in layers):
        small.max_length = min(spec.max_length, LENGTH // 2)
    for path, value in FAMILIES[spec.family].fixed.items():
        if callable(value) and same_value(attrgetter(path)(spec), value(spec)):
            assign_field(small, path, value(small))
    window = {key: windows.get(value, value) for key, value in config.items() if key == "sliding_window"}
    tokens = {
        key: value % small.vocab_size
        for key, value in config.items()
        if key.endswith("_token_id") and isinstance(value, int)
    }
    sizes = {**size_options(small), **mixture_options(small)}
    return small, {**shorter_rope(config, layers[0].attention.rope), **sizes, **window, **tokens}


def narrow_layer(layer: LayerSpec, windows: dict[int, int]) -> LayerSpec:
    """The layer with the fewest heads that are grouped alike."""
    a = layer.attention
    kv_heads = least_divisor(a.kv_heads)
    heads = kv_heads * least_divisor(a.heads // a.kv_heads)
    rope = (
        replace(a.rope, original_length=min(a.rope.original_length, LENGTH // 2))
        if extends_positions(a.rope)
        else a.rope
    )
    attention = replace(a, heads=heads, kv_heads=kv_heads, window=windows.get(a.window, a.window), rope=rope)
    block, experts = layer.feed_forward, layer.feed_forward.experts
    of_group = max(2, EXPERTS // experts.groups, -(-experts.top_k // experts.top_groups))
    width, shared, parts = min(block.width, FEED_FORWARD), experts.shared_width, experts.shared_width // block.width
    experts = replace(
        experts,
        count=min(experts.count, experts.groups * of_group),
        shared_width=min(shared, FEED_FORWARD) if shared % block.width else parts * width,
    )
    block = replace(block, width=width, experts=experts)
    return replace(layer, attention=attention, feed_forward=block)


def extends_positions(rope: RopeSpec) -> bool:
    """Whether frequencies are others beyond the original length."""
    return rope.scaling == "longrope"


def shorter_rope(config: dict[str, Any], rope: RopeSpec) -> dict[str, Any]:
    """The configuration with the original length of `rope`, where frequencies depend on it, and the factor that may
    have followed from it."""
    if not extends_positions(rope):
        return config
    length = {"original_max_position_embeddings": rope.original_length}
    groups = {name: config[name] | length | {"factor": rope.factor} for name in ROPE_GROUPS if config.get(name)}
    return {**config, **groups, **(length if config.keys() & length.keys() else {})}


def least_divisor(n: int) -> int:
    """The smallest divisor above one, or one."""
    return next((divisor for divisor in range(2, isqrt(n) + 1) if n % divisor == 0), n)


def with_layers(spec: ModelSpec, layers: list[LayerSpec]) -> ModelSpec:
    """The spec with these layers instead of its own."""
    overrides = {str(index): asdict(layer) for index, layer in enumerate(layers)}
    common = vars(copy.deepcopy(common_layer(layers)))
    return replace(spec, depth=len(layers), **common, pattern=[], overrides=overrides)


def size_options(spec: ModelSpec, *paths: str) -> dict[str, Any]:
    """The options of config.json that say how large the model is, or some of them."""
    names = {key: path if isinstance(path, str) else path[0] for key, path in FAMILIES[spec.family].fields.items()}
    return {key: encode_option(path, attrgetter(path)(spec)) for key, path in names.items() if path in (paths or SIZES)}


def usual_values(family: str) -> dict[str, Any]:
    """Dotted field -> the value that an exportable model of the family commonly has."""
    spec = ModelSpec(family=family)
    for path, value in FAMILIES[family].fixed.items():
        assign_field(spec, path, value(spec) if callable(value) else value)
    return flatten_values(asdict(spec))


def usual_config(model_type: str) -> dict[str, Any]:
    """The options that transformers' class has by default."""
    from transformers import AutoConfig

    with silence_transformers():
        return AutoConfig.for_model(model_type).to_dict()


def unusual_options(config: dict[str, Any], usual: dict[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """The options that are not as usual, by their path of keys; those of a group (rope_parameters) before the group."""
    for key, value in config.items():
        if value != usual.get(key, ...):
            if isinstance(value, dict):
                yield from (([key, *path], inner) for path, inner in unusual_options(value, usual.get(key) or {}))
            yield [str(key)], value


def with_option(config: dict[str, Any], path: list[str], *value: Any) -> dict[str, Any]:
    """The configuration with another value at a path of keys, or without one."""
    first, *rest = path
    if rest:
        return {**config, first: with_option(config[first], rest, *value)}
    kept = {key: old for key, old in config.items() if str(key) != first}
    return {**kept, first: value[0]} if value else kept


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """`folder`, new, with the configuration as its config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Transformers neither logs nor draws bars here, and takes no random numbers away."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
