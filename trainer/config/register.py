"""The decorators with which packages of the user add to the project, `trainer.register`:

    from dataclasses import dataclass
    from trainer import option, register

    @dataclass
    class Settings:
        below: float = option(2.0, "the loss at which a run is done", unit="nats", range="(0, inf)")

    @register.callback("done_below", Settings)
    class DoneBelow:
        def __init__(self, settings): ...
        def step(self, run): ...

What is registered is called with its settings first. The setting `imports` names the modules that register.
docs/extending.md has an example of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.fields import ConfigError
from trainer.config.registry import (
    ATTENTION,
    CALLBACKS,
    FEED_FORWARD,
    LOSS_TERMS,
    METRICS,
    OPTIMIZERS,
    SCHEDULES,
    SINKS,
    SOURCES,
    T,
)

Numbers = Callable[..., float]

EVENTS = ("start", "step", "evaluation", "save", "end")
"""Methods of a callback: when it is called."""


def callback(name: str, settings: type | None = None) -> Callable[[T], T]:
    """A class, made from its settings, with methods of `EVENTS`: each is called with the `Run` on every rank."""

    def register(made: T) -> T:
        if not any(hasattr(made, event) for event in EVENTS):
            raise ConfigError(
                f"{made.__module__}.{made.__qualname__}: the callback '{name}' has no method of {', '.join(EVENTS)}"
            )
        return CALLBACKS.add(name, settings, {})(made)

    return register


def metric(name: str, meaning: str, settings: type | None = None) -> Callable[[T], T]:
    """A function of its settings and the `Run` to a number that is equal on every rank, called on every rank after each
    step that is logged. It stands in metrics.jsonl as `user/NAME`."""
    return METRICS.add(name, settings, {"meaning": meaning})


def sink(name: str, settings: type | None = None) -> Callable[[T], T]:
    """A class with `write(record)` and `close(status)`, made on the first rank from its settings and a `SinkPlace`. One
    that takes the texts of `eval.generate` has `samples(step, [(prompt, continuation), ...])`, too."""
    return SINKS.add(name, settings, {})


def schedule(name: str, settings: type | None = None) -> Callable[[T], T]:
    """A function of its settings and a `Progress` to a share, for `lr.schedule`: 1 stands for lr.peak and 0 for
    lr.final of it, as a scalar tensor on the device of the progress. The warm-up comes before it."""
    return SCHEDULES.add(name, settings, {})


def optimizer(
    name: str, settings: type | None = None, *, moments: tuple[str, ...], elementwise: bool
) -> Callable[[T], T]:
    """A function of its settings and an `Update` to the new weight and the new moments by name, for `optimizer.name`
    and `precision.types`. It returns new tensors and changes none, so that a step without an update can drop them.

    moments: what is kept of a parameter beside it, zero at first. elementwise: whether each element is updated by
    itself, so that a rank can update its part; others are refused where ranks share parameters."""
    return OPTIMIZERS.add(name, settings, {"moments": moments, "elementwise": elementwise})


def data_source(name: str, settings: type | None = None) -> Callable[[T], T]:
    """A class made from its settings, for `data.sources.NAME.kind`: documents that can be read in any order. `len` is
    their number, `read(first, last)` yields the texts of some, `identity()` is JSON data that changes with them."""
    return SOURCES.add(name, settings, {})


def loss_term(name: str, settings: type | None = None) -> Callable[[T], T]:
    """A function of its settings, scores and targets to what is added to each token's loss, for `loss.terms`.

    scores: fp32 [tokens, vocab], of some of the tokens; targets: int [tokens], below 0 where there is none; result:
    [tokens], differentiable, of each token by itself. Its mean stands in metrics.jsonl as `term/NAME`."""
    return LOSS_TERMS.add(name, settings, {})


def feed_forward(
    name: str,
    settings: type | None = None,
    *,
    parameters: Callable[..., Mapping[str, Any]],
    saved: Numbers | None = None,
    tensor_parallel: bool = False,
) -> Callable[[T], T]:
    """A `Block` of `trainer.model.layers`, for `model.feed_forward.kind`: made from its settings, the `FeedForwardSpec`
    and the width of the residual stream, it maps this rank's tokens [tokens, width] to as many.

    parameters: from the same three, without torch, the `ParameterInfo` of each parameter that the block declares, by
    name, in order. saved: from the layer and the bytes of its projections' results, the bytes that it holds of a token
    for backward; without it, two of each projection's result. tensor_parallel: whether the axes of the parameters, and
    what the block does with each `Linear`, are right where tensor parallelism cuts them; otherwise that is refused."""
    return FEED_FORWARD.add(
        name, settings, {"parameters": parameters, "saved": saved, "tensor_parallel": tensor_parallel}
    )


def attention(
    name: str,
    settings: type | None = None,
    *,
    parameters: Callable[..., Mapping[str, Any]],
    flops: Numbers,
    saved: Numbers | None = None,
    tensor_parallel: bool = False,
) -> Callable[[T], T]:
    """The same for `model.attention.kind`, with an `AttentionSpec`; it is called as `Attention` of
    `trainer.model.layers` is. flops: from settings, spec and the number of keys that a token sees, the forward FLOPs of
    a token beside the products with the parameters."""
    facts = {"parameters": parameters, "flops": flops, "saved": saved, "tensor_parallel": tensor_parallel}
    return ATTENTION.add(name, settings, facts)
