"""Callbacks and metrics of the user's packages: what they see of a run, what they may ask of it, and who is to blame
when one fails."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.config import Config, ConfigError
from trainer.config.registry import CALLBACKS, METRICS, RegisteredKind
from trainer.distributed.mesh import World
from trainer.distributed.tensors import local_values
from trainer.training.step import ControlFlag

if TYPE_CHECKING:
    from trainer.observe.sinks import Logger
    from trainer.training.state import TrainState


class HookFailed(RuntimeError):
    """A callback or metric of the user raised an error, which is its cause."""


class RunView:
    """What callbacks and metrics see of a run, and what they may ask of it. All ranks call them, in the same order.

    config: the resolved configuration. folder: the run's. step: optimizer steps done, and tokens: trained on, since the
    first step. rank: of this process, of `processes`. metrics: the newest known number of each name of metrics.jsonl;
    on a GPU they are those of the step before. Loss, gradient norm, learning rate and registered metrics are the same
    on all ranks; times and memory are so on rank 0's console only. checkpoint: where the newest checkpoint is or will
    be, None before the first.
    """

    def __init__(self, config: Config, world: World):
        self.config, self.folder, self.world = config, Path(config.run.dir), world
        self.rank, self.processes, self.device = world.rank, world.size, world.device
        self.step, self.tokens, self.checkpoint = 0, 0, None
        self.metrics: dict[str, Any] = {}
        self.asked = ControlFlag(0)
        self._state: TrainState | None = None
        self._scalars: dict[str, Tensor] = {}
        self._log: Logger | None = None

    def save(self) -> None:
        """Asks for a checkpoint, which one rank's wish is enough for: after the next step, or the one behind it."""
        self.asked |= ControlFlag.SAVE

    def evaluate(self) -> None:
        """Asks for an evaluation, likewise."""
        self.asked |= ControlFlag.EVALUATE

    def finish(self) -> None:
        """Asks to end the run as done, likewise, with its last checkpoint."""
        self.asked |= ControlFlag.FINISH

    def say(self, text: str) -> None:
        """Shows a notice of one line on the console and in console.log, by rank 0."""
        self._log.event(text)

    def sum(self, value: Tensor | float) -> Tensor:
        """The sum over all ranks in fp64, the same bits on each. All ranks have to call it together."""
        mine = torch.as_tensor(value, dtype=torch.float64, device=self.device).clone()
        return self.world.sum_all(mine)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By global name, what this rank holds of each fp32 parameter: over all ranks, every element once."""
        shared = self._state.shared
        counted = dict(zip(shared.parameters, shared.counted_here))
        return {
            name: local_values(parameter).detach()
            for name, parameter in self._state.parameters.items()
            if counted[name]
        }

    @property
    def gradient_norms(self) -> dict[str, Tensor]:
        """Of the newest step, the L2 norm of each parameter's gradient by global name, before clipping: scalars in fp64
        on the device, the same on all ranks."""
        return dict(zip(self._state.names, self._scalars["squares"].sqrt().unbind()))

    @property
    def statistics(self) -> dict[str, Tensor]:
        """What blocks reported of the newest step, summed over ranks and micro-batches: vectors by name."""
        sizes = self._state.reports
        return dict(zip(sizes, self._scalars["statistics"].split(list(sizes.values()))))

    def begin(self, state: TrainState, tokens: int, metrics: dict[str, Any], log: Logger) -> None:
        """A run is about to train. metrics: which its log keeps up to date."""
        self._state, self.step, self.tokens, self.metrics, self._log = state, state.step, tokens, metrics, log

    def advance(self, state: TrainState, scalars: dict[str, Tensor], tokens: int) -> None:
        """A step has been taken; its numbers may still be on their way."""
        self._state, self._scalars, self.step, self.tokens = state, scalars, state.step, tokens

    def take_asked(self) -> ControlFlag:
        """What was asked for since the last call."""
        asked, self.asked = self.asked, ControlFlag(0)
        return asked


class Hooks:
    """The callbacks and metrics that a configuration names. Raises `ConfigError` where one cannot be made."""

    def __init__(self, config: Config, world: World):
        self.run = RunView(config, world)
        self.callbacks = {}
        for name, given in config.callbacks.items():
            entry = CALLBACKS[name]
            with self.blaming(entry, "callback", "when it was made"):
                self.callbacks[name] = entry.made(entry.of(given))
        self.metrics = {
            name: (METRICS[name], METRICS[name].of(given)) for name, given in config.logging.metrics.items()
        }

    def call(self, event: str) -> None:
        """Calls every callback that has a method of this name; see `register.EVENTS`. All ranks call it together."""
        for name, callback in self.callbacks.items():
            if method := getattr(callback, event, None):
                with self.blaming(CALLBACKS[name], "callback", f"in {event}()"):
                    method(self.run)

    def measure(self) -> dict[str, Tensor]:
        """The value of every metric after the step just taken: scalars on the device. All ranks call it together."""
        values = {}
        for name, (entry, settings) in self.metrics.items():
            with self.blaming(entry, "metric"):
                value = entry.made(settings, self.run)
                values[f"user/{name}"] = torch.as_tensor(value, dtype=torch.float64, device=self.run.device).reshape(())
        return values

    def states(self) -> dict[str, Any]:
        """What callbacks want to find again on resume: plain data of those that have `state_dict`."""
        states = {}
        for name, callback in self.callbacks.items():
            if hasattr(callback, "state_dict"):
                with self.blaming(CALLBACKS[name], "callback", "in state_dict(), which returns JSON's types"):
                    states[name] = json.loads(json.dumps(callback.state_dict()))
        return states

    def load(self, states: dict[str, Any]) -> None:
        """Gives callbacks what `states` returned when the checkpoint was written."""
        for name, callback in self.callbacks.items():
            if name in states and hasattr(callback, "load_state_dict"):
                with self.blaming(CALLBACKS[name], "callback", "in load_state_dict()"):
                    callback.load_state_dict(states[name])

    @contextlib.contextmanager
    def blaming(self, entry: RegisteredKind, kind: str, where: str = "") -> Iterator[None]:
        """Names what raises an error, and the step. A `ConfigError` stays one."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError([f"{kind} '{entry.name}': {problem}" for problem in error.problems]) from error
        except Exception as error:
            place = " ".join(filter(None, [where, f"after step {self.run.step}"]))
            raise HookFailed(
                f"{kind} '{entry.name}' ({entry.home}) failed {place}: {type(error).__name__}: {error}"
            ) from error
