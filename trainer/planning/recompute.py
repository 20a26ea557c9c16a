"""Activation checkpointing as it is planned: the entries of `activation.save`, and what a policy leaves of a layer.

An entry is OPERATION[/N][@LAYERS]. OPERATION: `attention` (its kernel), `matmul` (GEMMs of linear layers), GEMMs by the
name of their layer (`attention.q`, `feed_forward.*`), a torch operator (`aten.mm`), or `all`, with which a layer
recomputes nothing. N: every N-th call of it. LAYERS: `7`, `4-31`, or `1-31/2`, every second of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from trainer.config import ConfigError
from trainer.config.model import ModelSpec
from trainer.planning.layer import Program, has_experts
from trainer.planning.plan import Feature

if TYPE_CHECKING:
    from trainer.config.schema import ActivationConfig

ALL = "all"
MATMULS = ("matmul", "aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm")
"""Names that mean every GEMM of a layer."""

FORM = re.compile(r"(?P<name>[^/@\s]+)(/(?P<every>[1-9]\d*))?(@(?P<first>\d+)(-(?P<last>\d+)(/(?P<step>[1-9]\d*))?)?)?")


class SaveEntry(NamedTuple):
    """name: of the operation; every: which of its calls are kept, the last of so many; layers: None means all."""

    name: str
    every: int
    layers: range | None

    def products(self, names: Sequence[str]) -> list[str]:
        """Of a layer's products, in the order in which they run, those that are kept."""
        return match_operations(self.name, tuple(names))[self.every - 1 :: self.every]


@lru_cache(4096)
def match_operations(name: str, products: tuple[str, ...]) -> list[str]:
    """The products of a layer that a name means."""
    return [product for product in products if name in MATMULS or fnmatchcase(product, name)]


@lru_cache(4096)
def parse_entry(entry: str) -> SaveEntry:
    """Raises `ConfigError`."""
    if (found := FORM.fullmatch(entry)) is None:
        raise ConfigError(
            f"activation.save: '{entry}' names no operation; write OPERATION, OPERATION/2 for every second call, "
            "OPERATION@4-31 for some layers, OPERATION@1-31/2 for every second of them"
        )
    name, every, first, last, step = found.group("name", "every", "first", "last", "step")
    layers = None if first is None else range(int(first), int(last or first) + 1, int(step or 1))
    if layers is not None and not layers:
        raise ConfigError(f"activation.save: '{entry}' names no layer; write the smaller number first")
    return SaveEntry(name, int(every or 1), layers)


def entry_problems(save: Sequence[str], depth: int | None = None) -> Iterator[str]:
    """What is wrong with entries for a model of `depth` layers, if that is known."""
    for entry in save:
        try:
            layers = parse_entry(entry).layers
        except ConfigError as error:
            yield from error.problems
            continue
        if depth is not None and layers is not None and layers[-1] >= depth:
            yield f"activation.save: '{entry}' names layers that are not there; the model has 0 to {depth - 1}"


def recompute_problems(config: ActivationConfig, spec: ModelSpec | None) -> Iterator[str]:
    """What cannot be recomputed: the choice of experts, which backward finds saved or the gradients would be those of
    another routing."""
    if spec is not None and has_experts(spec) and config.tile:
        yield (
            f"activation.tile={config.tile} computes feed-forward blocks again in backward, and routes tokens to "
            "experts again; set activation.tile=0"
        )


def saved_in(save: Sequence[str], layer: int) -> tuple[SaveEntry, ...]:
    """The entries that hold for a layer, as entries for every layer: equal where two layers keep the same."""
    entries = (parse_entry(entry) for entry in save)
    return tuple(SaveEntry(name, every, None) for name, every, layers in entries if layers is None or layer in layers)


def by_layer(save: Sequence[str]) -> bool:
    """Whether some layers keep other operations than others."""
    return any(parse_entry(entry).layers is not None for entry in save)


def entries_of(kept: Sequence[Collection[str]], order: Sequence[str]) -> list[str]:
    """The entries with which each layer keeps the operations `kept` of it, and no others. order: of all operations."""
    where = {name: [layer for layer, names in enumerate(kept) if name in names] for name in order}
    entries: dict[str, list[int]] = {}
    for name, layers in where.items():
        block = name.partition(".")[0]
        products = [other for other in order if other.startswith(f"{block}.")]
        together = name in products and all(where[other] == layers for other in products)
        entries[f"{block}.*" if together else name] = layers
    everywhere = len(kept)
    return [
        text
        for name, layers in entries.items()
        for text in ([name] if len(layers) == everywhere else (f"{name}@{part}" for part in format_layers(layers)))
    ]


def format_layers(layers: Sequence[int]) -> Iterator[str]:
    """Layers in ascending order as few texts, as an entry has them."""
    for piece in split_ranges(layers):
        many = f"-{piece[-1]}" + f"/{piece.step}" * (piece.step > 1)
        yield f"{piece[0]}" + many * (len(piece) > 1)


def split_ranges(layers: Sequence[int]) -> Iterator[range]:
    """The same as ranges: of neighbours, or else with the step to the next."""
    start = 0
    while start < len(layers):
        step = layers[start + 1] - layers[start] if start + 1 < len(layers) else 1
        stop = start + 1
        while stop < len(layers) and layers[stop] - layers[stop - 1] == step:
            stop += 1
        if step > 1 and stop - start == 2:  # two that are apart
            stop -= 1
        yield range(layers[start], layers[stop - 1] + 1, step)
        start = stop


class EagerExtra(NamedTuple):
    """What eager layers over several ranks hold and repeat, and compiled ones leave out since nothing reads it.

    saved: bytes of one token: GEMM results before their sums, and sums, which selective recompute saves both; and what
    norms over the heads of several ranks take in several operations. again: GEMMs whose results are summed.
    sends: bytes that the collectives send of a token: sums of such results, and all-gathers of inputs whose GEMMs are
    saved.
    """

    saved: float = 0.0
    again: tuple[str, ...] = ()
    sends: tuple[float, ...] = ()


class RecomputeEffect(NamedTuple):
    """What a recompute policy leaves of a layer.

    saved: bytes of one token that are held for backward. again: operations that the backward pass repeats, and the
    share of each: below 1 where it is not known which. host: bytes of one token that wait in host memory. attends: how
    often it runs attention's block again, whose kernel's result may have been saved: what ranks send there, they send
    again. eager: what eager layers do besides.
    """

    saved: float
    again: Mapping[str, float]
    host: float = 0.0
    attends: float = 0.0
    eager: EagerExtra = EagerExtra()


def left_by_recompute(
    layers: Sequence[Program], config: ActivationConfig | None, compiled: bool = False
) -> list[RecomputeEffect]:
    """What a recompute policy leaves of each layer of a model."""
    known: dict[tuple[int, object], RecomputeEffect] = {}
    left, varied = [], config is not None and by_layer(config.save)
    for index, layer in enumerate(layers):
        # Equal layers share one program, but what is saved may differ between them.
        key = id(layer), saved_in(config.save, index) if config is not None and varied else ()
        if key not in known:
            known[key] = recompute_effect(layer, index, config, compiled)
        left.append(known[key])
    return left


def recompute_effect(layer: Program, index: int, config: ActivationConfig | None, compiled: bool) -> RecomputeEffect:
    """What a recompute policy (see `parallel/recompute.py`) leaves of layer `index`. Eager layers hold what they
    are told to save, compiled ones what of it backward reads."""
    spread = EagerExtra(layer.total("eager", "norm"))
    if config is None:
        return RecomputeEffect(layer.saved, {}, eager=spread)
    second = layer.second_half
    tiled = list(second.gemms) if config.tile else []  # what tiles repeat, the last GEMM too
    whole, host = layer.saved - second.saved * bool(tiled), 0.0
    entries = saved_in(config.save, index) if config.mode == "selective" else ()
    spared = any(entry.name == ALL for entry in entries)
    if config.mode in ("none", "auto") or spared:  # auto: before it is decided
        return RecomputeEffect(whole, dict.fromkeys(tiled, 1.0), eager=spread)
    sums = {name for op in layer.scatters if op.sends for name in op.gemms if layer.gemms[name].read}
    kept = [name for name in layer.computed if is_saved(layer, name, entries) or entries and name in sums]
    inputs = layer.input.result + layer.middle.saved * bool(tiled)
    held = [name for name in kept if layer.computed[name].read or not compiled]
    saved = inputs + sum(layer.computed[name].result for name in held if name not in tiled)
    saved += layer.total("result", "choice")
    again = [name for name in layer.computed if name not in kept]
    eager = eager_extra(layer, entries, kept, tiled)
    if config.offload:  # a byte is left, of which what W needs can be a multiple
        saved, host = max(1.0, saved - inputs), inputs
    # An eager layer repeats experts to get to the permutation behind them, which keeps its order.
    eagerly = frozenset() if compiled else layer.experts
    repeated = {name: 1.0 for name in again if layer.computed[name].read or name in eagerly}
    return RecomputeEffect(saved, repeated | dict.fromkeys(tiled, 1.0), host, 1.0, eager)


def eager_extra(layer: Program, entries: Sequence[SaveEntry], kept: Sequence[str], tiled: Sequence[str]) -> EagerExtra:
    """What an eager layer holds and repeats besides, of which `kept` is planned to be saved. tiled: GEMMs that tiles
    repeat."""
    sums = [op for op in layer.scatters if op.eager and op.gemms[0] not in tiled]
    if not sums:
        return EagerExtra()
    chosen = [op.gemms[0] for op in sums if is_saved(layer, op.gemms[0], entries)]
    others = [op.gemms[0] for op in sums if op.gemms[0] not in chosen]
    again = tuple(name for name in others if name in kept or not layer.gemms[name].read)
    if not entries:
        return EagerExtra(0.0, again, sent_by(layer, again))
    saved = sum(op.eager if op.gemms[0] in chosen else 0.0 for op in sums)
    saved += sum(layer.gemms[op.gemms[0]].result for op in sums if op.gemms[0] not in kept)
    whole = [op for op in layer.gathers if all(is_saved(layer, name, entries) for name in op.gemms)]
    return EagerExtra(saved, again, tuple(op.sends for op in whole))


def sent_by(layer: Program, summed: Sequence[str]) -> tuple[float, ...]:
    """Bytes that the sum of the results of each of some GEMMs sends of a token."""
    return tuple(op.sends for op in layer.scatters for name in op.gemms if name in summed)


def is_saved(layer: Program, name: str, entries: Sequence[SaveEntry]) -> bool:
    """Whether entries of `activation.save` keep an operation."""
    if name not in layer.gemms:
        return any("attention" in entry.name.rpartition(".")[2] and entry.every == 1 for entry in entries)
    operation = next((op.gemms for op in layer.gathers if layer.overlapped and name in op.gemms), (name,))
    return any(
        # Of every so many GEMMs the last is saved, of those by name each.
        (set(operation[-1:] if entry.name in MATMULS else operation)).intersection(entry.products(list(layer.gemms)))
        for entry in entries
    )


FEATURE = Feature("recompute", check_plan=lambda config, spec, plan, node: recompute_problems(config.activation, spec))
