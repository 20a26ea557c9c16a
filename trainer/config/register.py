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

from collections.abc import Callable

from trainer.config.fields import ConfigError
from trainer.config.registry import CALLBACKS, METRICS, SCHEDULES, SINKS, SOURCES, T

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
    """A class with `write(record)` and `close(status)`, made on the first rank from its settings and a `SinkPlace`."""
    return SINKS.add(name, settings, {})


def schedule(name: str, settings: type | None = None) -> Callable[[T], T]:
    """A function of its settings and a `Progress` to a share, for `lr.schedule`: 1 stands for lr.peak and 0 for
    lr.final of it, as a scalar tensor on the device of the progress. The warm-up comes before it."""
    return SCHEDULES.add(name, settings, {})


def data_source(name: str, settings: type | None = None) -> Callable[[T], T]:
    """A class made from its settings, for `data.sources.NAME.kind`: documents that can be read in any order. `len` is
    their number, `read(first, last)` yields the texts of some, `identity()` is JSON data that changes with them."""
    return SOURCES.add(name, settings, {})
