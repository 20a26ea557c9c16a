"""From a spec to modules: any range of layers, with parameter names that do not depend on how the model is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.config.model import AdapterSpec, ModelSpec
from trainer.distributed.collectives import ReduceScatterSum, TensorGroup
from trainer.model.attention import build_mask, cap_score, document_starts
from trainer.model.cache import CachedPass, KVCache
from trainer.model.context_attention import ContextGroup, without_regather
from trainer.model.experts import GroupedLinear, Sequences
from trainer.model.initial import DeclaredModule
from trainer.model.layers import AdaptableLinear, Block, Layer, Linear, Norm
from trainer.model.linear import DeferredGrads, column_parallel
from trainer.model.loss import LossSettings, Term, linear_cross_entropy
from trainer.model.rotary import Rotary
from trainer.model.stage import BlockReport, ReportedOutput, join_reports, split_report
from trainer.planning.parameters import can_adapt, head_bias, matches_any
from trainer.precision.products import GradientSum


class EmbeddingLookup(torch.autograd.Function):
    """`F.embedding` for a 16-bit table on a CPU. index: [tokens]; table: [rows, width]; result: [tokens, width].

    torch's CPU kernel accumulates the table's gradient in the table's type. The gradient of a frequent token then stops
    growing: the next term is below half of the last bit of the sum. Here terms are accumulated in fp32 and the sum is
    rounded once. CUDA kernels accumulate in fp32 anyway.
    """

    @staticmethod
    def forward(ctx: Any, index: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(table)
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (index,) = ctx.saved_tensors
        to_table = torch.ops.aten.embedding_dense_backward(gradient.float(), index, ctx.rows, -1, False)
        return None, to_table.to(gradient.dtype)


def look_up(index: Tensor, table: Tensor) -> Tensor:
    """The rows of `table` [rows, width] at `index` [tokens]. The gradient is accumulated in fp32 or wider."""
    if table.is_cuda or table.dtype.itemsize > 2:
        return F.embedding(index, table)
    return EmbeddingLookup.apply(index, table)


class Embedding(DeclaredModule):
    """A table of embeddings. weight: [rows, width]."""

    def __init__(self, rows: int, width: int, axis: str):
        super().__init__()
        self.declare("weight", (rows, width), (axis, "embed"), "embedding")

    def forward(self, index: Tensor) -> Tensor:
        """index: [tokens]. Returns [tokens, width]; with a tensor-parallel group, this rank's tokens [tokens / t,
        width]."""
        weight = self.local("weight")
        if self.group is None:
            return look_up(index, weight)
        # Each rank looks up the tokens whose rows it has, and leaves zeros for the others. The reduce-scatter sums
        # these parts, and gives each rank its own tokens.
        index = index - part_start(self.declared["weight"].shape[0], self.group)
        mine = (index >= 0) & (index < weight.shape[0])
        rows = (
            look_up(torch.where(mine, index, 0), weight)
            if weight.shape[0]
            else weight.new_zeros(*index.shape, weight.shape[1])
        )
        return ReduceScatterSum.apply(self.group, rows.masked_fill(~mine[:, None], 0))


class Head(DeclaredModule):
    """The output projection: final norm's output -> logits, or the loss (`linear_cross_entropy`) where targets are
    given. weight: [vocab, width]; bias: [vocab], in code of transformers that has one. gradient_sum: as that of
    `AdaptableLinear`."""

    gradient_sum: GradientSum | None = None

    def __init__(self, spec: ModelSpec, bias: bool = False):
        super().__init__()
        self.loss = LossSettings(spec.logit_soft_cap)
        self.declare("weight", (spec.vocab_size, spec.width), ("vocab", "embed"), "head")
        self.biased = bias
        if bias:
            self.add_parameter("bias", head_bias(spec))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        """x: [tokens / t, width]; targets: [tokens] or None. Logits are [tokens, vocab / t], this rank's columns."""
        weight, bias = self.local("weight"), self.local("bias") if self.biased else None
        if targets is None:
            (logits,) = column_parallel(x, [weight], [bias], self.group)
            return cap_score(logits, cap=self.loss.soft_cap) if self.loss.soft_cap else logits
        start = 0 if self.group is None else part_start(self.declared["weight"].shape[0], self.group)
        if bias is not None:
            # The loss knows no bias: it is a column of the weight, whose input is 1. GEMMs want multiples of 8 columns.
            x = torch.cat([x, x.new_ones(len(x), 1), x.new_zeros(len(x), 7)], 1)
            weight = torch.cat([weight, bias[:, None], weight.new_zeros(len(weight), 7)], 1)
        objective, entropy, added = linear_cross_entropy(
            x, weight, targets, self.loss, self.group, start, self.gradient_sum
        )
        if not (self.training and self.loss.terms):
            return objective, entropy
        return ReportedOutput((objective, entropy), BlockReport(None, dict(zip(self.loss.terms, added.split(1)))))


def adapt_model(model: nn.Module, adapter: AdapterSpec) -> None:
    """Freezes the parameters of a model but those that `adapter.trained` names, and puts adapters beside its linear
    layers, by their names, as `planning.parameters.adapt_table` does. Raises `ConfigError` where the module of a chosen
    matrix is no `AdaptableLinear`."""
    for name, module in model.named_modules():
        if not isinstance(module, DeclaredModule):
            continue
        weight = module.declared.get("weight")
        for own in module.declared:
            if not matches_any(f"{name}.{own}", adapter.trained):
                module.freeze(own, adapter)
        if weight is None or not can_adapt(weight):
            continue
        adapted = matches_any(name, adapter.targets)
        if not isinstance(module, AdaptableLinear | GroupedLinear) and (adapted or module.declared["weight"].float8):
            setting = f"targets={adapter.targets} match" if adapted else f"weights={adapter.weights}:"
            raise ConfigError(
                f"model.adapter.{setting} {name}, whose class {type(module).__name__} is no linear layer "
                f"(trainer.model.layers.Linear); set {'other patterns' if adapted else 'model.adapter.weights=compute'}"
            )
        if adapted:
            module.adapt(adapter.rank, adapter.factor)


def part_start(size: int, group: TensorGroup) -> int:
    """First of rank `group.rank`'s rows when `size` rows are split as DTensor splits them: equal parts, the last ones
    smaller."""
    return min(size, group.rank * -(-size // group.size))


def whole_vocabulary(group: TensorGroup, logits: Tensor, size: int) -> Tensor:
    """Each rank's columns of the logits [rows, part] -> all of them, [rows, size], on every rank."""
    # Collectives need parts of equal size, and split the first dimension: hence the padding and the transposition.
    parts = F.pad(logits, (0, -(-size // group.size) - logits.shape[1]))
    return group.wait(group.gather(parts.t()))[:size].t()


class Transformer(nn.Module):
    """Layers `layers` of the model that `spec` describes, a `Stage`. The first stage has the embedding, the last one
    the head.

    Parameters have global names (`layers.17.attention.q.weight`), so a checkpoint does not depend on the split.
    """

    def __init__(self, spec: ModelSpec, layers: range | None = None):
        super().__init__()
        layers = range(spec.depth) if layers is None else layers
        self.spec, self.depth = spec, spec.depth
        self.first, self.last = layers.start == 0, layers.stop == spec.depth
        specs = {index: spec.layer(index) for index in layers}
        self.group: TensorGroup | None = None
        self.context: ContextGroup | None = None
        if self.first or (self.last and spec.tied):
            # A tied head is the embedding's parameter, so the last stage has a copy of the embedding.
            self.embedding = Embedding(spec.vocab_size, spec.width, "vocab")
        if self.first and spec.learned_positions:
            self.positions = Embedding(spec.max_length, spec.width, "seq")
        self.layers = nn.ModuleDict(
            {str(i): Layer(layer, spec.width, spec.parallel_residual) for i, layer in specs.items()}
        )
        # Computed once in each pass and shared by layers: one rotation for each kind of RoPE, one mask for each window,
        # with and without soft caps and sinks.
        self.kinds: dict[str, tuple[int | None, tuple[int, bool]]] = {}
        rotaries: dict[str, Rotary] = {}
        for index, layer in specs.items():
            a, rotary = layer.attention, None
            if a.positions == "rope":
                frequencies = f"{a.rope} {a.rotary_dim}"
                rotaries.setdefault(frequencies, Rotary(a.rope, a.rotary_dim, spec.max_length))
                rotary = list(rotaries).index(frequencies)
            self.kinds[str(index)] = (rotary, (a.window, a.changes_softmax))
        self.rotaries = nn.ModuleList(rotaries.values())
        if self.last:
            self.norm = Norm(spec.width, spec.norm)
            self.head = Head(spec)
        if spec.adapter.rank:
            adapt_model(self, spec.adapter)
        self.reports = {
            f"{name}.{key}": size
            for name, module in self.named_modules()
            if isinstance(module, Block)
            for key, size in module.reports.items()
        }
        self.tie()

    def set_loss(
        self, z_loss: float, chunk: int, compiled: bool, tile: int = 0, terms: Mapping[str, Term] | None = None
    ) -> None:
        if self.last:
            settings = dict(z_loss=z_loss, chunk=chunk, compiled=compiled, tile=tile, terms=terms or {})
            self.head.loss = replace(self.head.loss, **settings)
            self.reports |= {f"head.{name}": 1 for name in terms or {}}

    def defer(self, deferred: DeferredGrads) -> None:
        tiled = {module for layer in self.layers.values() if layer.tile for module in layer.feed_forward.modules()}
        for module in self.modules():
            # A deferred product keeps its two factors for whole sequences, which is the memory that tiles avoid.
            if isinstance(module, Linear | GroupedLinear) and module not in tiled:
                module.defer(deferred)

    def tie(self) -> None:
        """Makes a tied head hold the embedding's parameter itself."""
        if self.spec.tied and self.last:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable, recurse: bool = True) -> Transformer:
        # `to_empty` creates a new parameter for each module, which would give the head one of its own.
        super()._apply(fn, recurse)
        self.tie()
        return self

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        hidden: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """See `Stage`. With a cache, see `extend`."""
        if cache is not None:
            return self.extend(tokens, hidden, cache)
        shape, length = tuple(tokens.shape), tokens.shape[1]
        positions = (
            document_positions(documents) if documents is not None else torch.arange(length, device=tokens.device)
        )
        # Frequencies follow the length of a document only beyond `reach`, which no document of a short sequence has.
        lengths: int | Tensor = length
        if documents is not None and any(length > rotary.reach for rotary in self.rotaries):
            lengths = document_lengths(documents)
        build = build_mask
        if self.context is not None:
            # Sequences are split here and not in the loader, so batches and the position in the data do not depend on
            # context parallelism.
            build, own = self.context.build_mask, self.context.own(length, tokens.device)
            tokens, positions = tokens[:, own], positions[..., own]
            lengths = lengths[:, own] if isinstance(lengths, Tensor) else lengths
            shape, targets = tuple(tokens.shape), None if targets is None else targets[:, own]
        rotations = [rotary(positions, lengths) for rotary in self.rotaries]
        masks = {
            kind: build(documents, length, *kind, tokens.device)
            for kind in dict.fromkeys(k for _, k in self.kinds.values())
        }
        x, reports = self.embed(tokens, positions) if self.first else hidden, {}
        counting = any(layer.feed_forward.by_sequence for layer in self.layers.values())
        sequences = [self.number_sequences(shape, tokens.device)] if counting else []
        for index, layer in self.layers.items():
            rotary, kind = self.kinds[index]
            rotation = None if rotary is None else rotations[rotary]
            # A recomputed layer gathers its keys again anyway. Doing it in backward too would gather them twice.
            mask = without_regather(masks[kind]) if layer.recomputes_attention else masks[kind]
            more = sequences if layer.feed_forward.by_sequence else []
            x, reports[f"layers.{index}"] = split_report(layer(x, shape, rotation, mask, *more))
        if self.last:
            x, reports["head"] = split_report(self.head(self.norm(x), None if targets is None else targets.flatten()))
            x = x.view(*shape, -1) if targets is None else (x[0], x[1].view(shape).sum(1))
        return join_reports(x, reports)

    def number_sequences(self, shape: tuple[int, int], device: torch.device) -> Sequences:
        """The sequences of this rank's tokens. shape: see `Attention.forward`."""
        (count, length), group, context = shape, self.group, self.context
        numbers = torch.arange(count * length, device=device) // length
        groups = [group, *(() if context is None else (context.heads, context.keys))]
        keys = "\n".join(one.key for one in groups if one is not None)
        return Sequences(numbers if group is None else group.own(numbers), count, keys)

    def extend(self, tokens: Tensor, hidden: Tensor | None, cache: KVCache) -> Tensor:
        """A pass of generation. tokens: [rows, length], contexts with padding at the end; or [rows of the cache, 1],
        the next token of each row. With tensor parallelism, the number of ranks divides rows x length and the rows of
        the cache. Ranks that share sequences in training each compute all tokens here.

        Returns hidden states before the last stage. The last stage returns the logits that follow each row's last
        token, [rows of the cache, vocab], on every rank.
        """
        shape = tuple(tokens.shape)
        entered = cache.enter(shape)
        rotations = [rotary(entered.positions, entered.lengths[:, None]) for rotary in self.rotaries]
        x = hidden
        if self.first:
            # Padding may lie beyond the last learned position.
            x = self.embed(tokens, entered.positions.clamp(max=self.spec.max_length - 1))
        for index, layer in self.layers.items():
            rotary, kind = self.kinds[index]
            rotation = None if rotary is None else rotations[rotary]
            x, _ = split_report(layer(x, shape, rotation, entered.mask(index, *kind)))
        return self.read_last(x, entered, self.norm) if self.last else x

    def read_last(self, x: Tensor, entered: CachedPass, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The logits that follow each row's last token, see `extend`. norm: the final one, where x is not normed."""
        group = self.group
        if entered.contexts and group is None:
            x = entered.last(x)
        # The last tokens of all rows may lie on one rank: gather all tokens, select, and split the selected rows again
        # for the head.
        elif entered.contexts:
            x = group.own(entered.last(group.wait(group.gather(x))))
        logits = self.head(x if norm is None else norm(x))
        return logits if group is None else whole_vocabulary(group, logits, self.spec.vocab_size)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens: [batch, length]; positions: [batch or 1, length]. Returns this rank's tokens [tokens / t, width]."""
        x = self.embedding(tokens.flatten())
        if self.spec.embedding_scale != 1.0:
            # The scale is rounded to x's type first, as in Gemma's training.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        if self.spec.learned_positions:
            positions = positions.expand(tokens.shape).flatten()
            x = x + self.positions(positions if self.group is None else self.group.own(positions))
        return x


def document_positions(documents: Tensor) -> Tensor:
    """Positions that restart at each document. documents, result: int [batch, length]."""
    return torch.arange(documents.shape[1], device=documents.device) - document_starts(documents)


def document_lengths(documents: Tensor) -> Tensor:
    """The number of tokens of each token's document, in this sequence. documents, result: int [batch, length]."""
    after = document_starts(documents.flip(1)).flip(1)  # the number of tokens that follow the document
    return documents.shape[1] - after - document_starts(documents)
