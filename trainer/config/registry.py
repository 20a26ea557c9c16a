"""What settings choose by name: the project's own kinds, and those that packages of the user register.

A registry knows names, settings and what is registered; the rooms that use it say what that is called with.
`register.py` has the decorators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.fields import ConfigError, assign_fields, suggest_nearest

T = TypeVar("T", bound=Callable[..., Any])


@dataclass
class NoSettings:
    """Of what is registered without any."""


@dataclass(frozen=True)
class RegisteredKind:
    """made: the class or function, which is called with its settings first. settings: their dataclass. facts: what else
    its kind asks for."""

    name: str
    made: Callable[..., Any]
    settings: type
    facts: Mapping[str, Any]

    @property
    def home(self) -> str:
        return f"{self.made.__module__}.{self.made.__qualname__}"

    def chosen(self, settings: Mapping[str, Mapping[str, Any]]) -> Any:
        """Its settings, of a mapping that may have those of others."""
        return self.of(settings.get(self.name, {}))

    def of(self, given: Mapping[str, Any]) -> Any:
        """Its settings: those `given`, the others at their defaults."""
        settings = self.settings()
        assign_fields(settings, dict(given), self.name)
        return settings


class KindRegistry:
    """The legal names of one setting: `own` ones, then those that are registered.

    kind: what a name stands for. Iterating, `in` and `len` tell of the names, as a tuple of choices does."""

    def __init__(self, kind: str, own: tuple[str, ...] = ()):
        self.kind, self.own, self.registered = kind, own, dict[str, RegisteredKind]()

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self.registered))

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.registered

    def __len__(self) -> int:
        return len(self.own) + len(self.registered)

    def __bool__(self) -> bool:
        return True  # one that is empty yet says which names are legal, too

    def __getitem__(self, name: str) -> RegisteredKind:
        """What is registered under a name. Raises `ConfigError` where nothing is."""
        if name not in self.registered:
            raise ConfigError(self.unknown(name))
        return self.registered[name]

    def unknown(self, name: str) -> str:
        """What to say of a name that nothing has registered."""
        if name in self.own:
            return f"the {self.kind} '{name}' is the project's own, and has no settings here"
        registered = suggest_nearest(name, list(self.registered)) if self.registered else "nothing has registered any"
        return f"there is no {self.kind} '{name}' to be set up; {registered} (imports=[PACKAGE] registers more)"

    def add(self, name: str, settings: type | None, facts: Mapping[str, Any]) -> Callable[[T], T]:
        """A decorator that registers what it decorates. Raises `ConfigError` for a name that is taken, or is no name.

        What a module registers again, as a notebook's cell or a reload does, takes the place of what it was."""

        def register(made: T) -> T:
            entry = RegisteredKind(name, made, settings or NoSettings, facts)
            before = self.registered.get(name)
            if not name.isidentifier():
                raise ConfigError(f"{entry.home}: '{name}' is no name for a {self.kind}; take letters, digits and _")
            if name in self.own or before and before.home != entry.home:
                owner = before.home if before else "the project"
                raise ConfigError(
                    f"{entry.home}: the name '{name}' of a {self.kind} is taken by {owner}; register it under another"
                )
            self.registered[name] = entry
            return made

        return register


CALLBACKS = KindRegistry("callback")
METRICS = KindRegistry("metric")
SINKS = KindRegistry("sink")
SCHEDULES = KindRegistry("learning-rate schedule", ("cosine", "wsd", "linear", "constant"))
SOURCES = KindRegistry("data source", ("stdlib", "text", "jsonl", "parquet", "hub", "chat", "tokens"))
LOSS_TERMS = KindRegistry("loss term")
OPTIMIZERS = KindRegistry("optimizer", ("adamw", "lion", "sgd", "muon"))
ATTENTION = KindRegistry("attention block", ("softmax", "latent"))
FEED_FORWARD = KindRegistry("feed-forward block", ("gated", "plain"))
REGISTRIES = (CALLBACKS, METRICS, SINKS, SCHEDULES, SOURCES, LOSS_TERMS, OPTIMIZERS, ATTENTION, FEED_FORWARD)
