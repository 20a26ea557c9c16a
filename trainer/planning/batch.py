"""Batch arithmetic: global batch = micro-batch x accumulation x data-parallel ranks, exactly.

Pure functions of the configuration and the number of data-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import BatchConfig, ConfigError, RunConfig
from trainer.config.fields import list_divisors
from trainer.config.typed import out_of_range

MICRO_TOKENS = 8192
"""Tokens in one forward pass that a micro-batch size is chosen for when none is given."""

PIPELINE_FILL = 4
"""Micro-batches for each pipeline rank that a micro-batch size is chosen for: 1F1B's bubble is then below a fifth."""


MOST_MICRO_BATCHES = 1 << 16
"""Micro-batches of a step, times the ranks of the pipeline: a schedule lists each of them, and an estimate replays
it."""


@dataclass(frozen=True)
class BatchPlan:
    """A resolved batch; sizes in sequences, `sequence_length` in tokens."""

    sequence_length: int
    global_size: int
    micro_size: int
    accumulation: int

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step over all ranks."""
        return self.global_size * self.sequence_length


def training_steps(run: RunConfig, batch: BatchPlan, step: int = 0, tokens: int = 0) -> int:
    """Optimizer steps of a run: run.steps, or as many as run.tokens needs where `step` steps have taken `tokens`."""
    return run.steps if run.tokens is None else step + max(0, math.ceil((run.tokens - tokens) / batch.tokens))


def resolve_batch(batch: BatchConfig, dp: int, tp: int = 1, pp: int = 1, cp: int = 1) -> BatchPlan:
    """The batch on `dp` data-parallel ranks; sizes that are not given are derived and none is ever rounded. The `cp`
    context-parallel x `tp` tensor-parallel ranks share the tokens of a sequence evenly; `pp` pipeline ranks want
    several micro-batches each.

    With a global size and one of `micro_size` and `accumulation`, the third follows. A missing `micro_size` is
    otherwise the largest that divides what a rank reads and holds at most `MICRO_TOKENS` tokens (one sequence where a
    sequence is longer), small enough for `PIPELINE_FILL` micro-batches a pipeline rank where there is a pipeline; a
    missing `accumulation` without a global size is 1, or so many. Raises `ConfigError` with legal neighbours."""
    problems = out_of_range(batch, "batch")
    if batch.sequence_length % (cp * tp):
        ranks = " x ".join(f"parallel.{name}={size}" for name, size in (("cp", cp), ("tp", tp)) if size > 1)
        problems.append(
            f"batch.sequence_length={batch.sequence_length} is not a multiple of {ranks}, whose ranks share "
            f"the tokens; legal: {_either(_multiples(batch.sequence_length, cp * tp))}"
        )
    if problems:
        raise ConfigError(problems)
    length, micro, accumulation = batch.sequence_length, batch.micro_size, batch.accumulation
    size, fill = _global_size(batch), PIPELINE_FILL * pp if pp > 1 else 1
    if size is None:
        micro = micro or max(1, MICRO_TOKENS // length)
        accumulation = accumulation or fill
        return _within_limits(BatchPlan(length, micro * accumulation * dp, micro, accumulation), pp)

    named, scale = ("global_tokens", length) if batch.global_tokens else ("global_size", 1)
    given = [(name, value) for name, value in (("micro_size", micro), ("accumulation", accumulation)) if value]
    factors = [f"batch.{name}={value}" for name, value in given] + ([f"{dp} data-parallel ranks"] if dp > 1 else [])
    unit = (micro or 1) * (accumulation or 1) * dp
    product = " x ".join(factors) + (f" = {unit}" if len(factors) > 1 else "")
    stated = f"batch.{named}={size * scale}" + (f" ({size} sequences)" if scale > 1 else "")
    if len(given) == 2 and size != unit:
        raise ConfigError(
            f"{stated} is not {product}; set batch.{named}={unit * scale}, or leave one of the three out and it is "
            "derived"
        )
    if size % unit:
        legal = [f"batch.{named}={_either(_multiples(size, unit), scale)}"]
        if given and size % dp == 0:
            name, value = given[0]
            legal.append(f"batch.{name}={_either(_around(value, list_divisors(size // dp)))}")
        raise ConfigError(f"{stated} is not a multiple of {product}; legal: {', or '.join(legal)}")
    if micro is None:
        fitting = [
            fit
            for fit in list_divisors(size // dp)
            if fit == 1 or fit * length <= MICRO_TOKENS and fit * dp * fill <= size
        ]
        micro = size // (dp * accumulation) if accumulation else max(fitting)
    return _within_limits(BatchPlan(length, size, micro, size // (micro * dp)), pp)


def _within_limits(plan: BatchPlan, pp: int) -> BatchPlan:
    """The plan. Raises `ConfigError` where its schedule, with an entry for each micro-batch on each of the `pp` ranks,
    is too long."""
    if plan.accumulation * pp > MOST_MICRO_BATCHES:
        pipeline = f" on each of parallel.pp={pp} ranks" if pp > 1 else ""
        raise ConfigError(
            f"batch.accumulation={plan.accumulation}: so many micro-batches of a step{pipeline} are more than a "
            f"schedule is made for; legal: up to {MOST_MICRO_BATCHES // pp}, with a larger batch.micro_size"
        )
    return plan


def _global_size(batch: BatchConfig) -> int | None:
    """The global size in sequences, if it is given in any unit."""
    tokens, length, size = batch.global_tokens, batch.sequence_length, batch.global_size
    if tokens is None:
        return size
    if tokens % length:
        raise ConfigError(
            f"batch.global_tokens={tokens} is not a multiple of batch.sequence_length={length}; legal: "
            f"batch.global_tokens={_either(_multiples(tokens, length))}"
        )
    if size not in (None, tokens // length):
        raise ConfigError(
            f"batch.global_size={size} x batch.sequence_length={length} = {size * length} tokens, but "
            f"batch.global_tokens={tokens}; give one of the two"
        )
    return tokens // length


def _multiples(value: int, step: int) -> list[int]:
    """The multiples of `step` right below and above `value`."""
    return [multiple for multiple in (value // step * step, value // step * step + step) if multiple]


def _around(value: int, legal: list[int]) -> list[int]:
    """The legal values right below and above `value`."""
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]


def _either(values: list[int], scale: int = 1) -> str:
    return " or ".join(str(value * scale) for value in values)
