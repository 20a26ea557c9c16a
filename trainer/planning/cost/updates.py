"""How each parameter is updated: its optimizer and what that keeps of it, by role and name (`precision.types`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from trainer.config import Config, OptimizerConfig, ParameterTypes, TypePolicy
from trainer.config.model import ModelSpec
from trainer.config.registry import OPTIMIZERS
from trainer.planning.cost.parameters import ROLES, ParameterInfo, by_value, layer_tables

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum",), "muon": ("momentum_buffer",)}
"""What each optimizer of ours keeps of a parameter beside it, by the names in checkpoints."""


DECAYS = {
    "adamw": ("optimizer.beta1", "optimizer.beta2"),
    "lion": ("optimizer.beta2",),
    "sgd": ("optimizer.beta1",),
    "muon": ("optimizer.muon.momentum",),
}
"""The settings by which the moments of each optimizer of ours decay."""

SLOWEST_IN_BF16 = 0.99
"""The largest decay of a moment in bf16, which holds 8 binary digits.

A step changes a moment by at most its share of 1 - decay. Where that is below half of the last digit, the moment is
rounded back to what it was. After gradients fell tenfold, AdamW's steps are smaller than with a second moment in fp32
by 0.3% with beta2=0.95, 1.7% with 0.99, 25% with 0.995, and 88% with 0.998 and above (root mean square, gradients whose
noise is 0.1 of their mean or more; without any noise 2.8%, 17%, 46%, 88%)."""


def moment_count(optimizer: str) -> tuple[str, ...]:
    """The same of any optimizer."""
    entry = OPTIMIZERS.registered.get(optimizer)
    return entry.facts["moments"] if entry else MOMENTS[optimizer]


@dataclass(frozen=True)
class UpdateSettings:
    """The settings from which every parameter's update follows."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    types: ParameterTypes = field(default_factory=ParameterTypes)

    @classmethod
    def of(cls, config: Config) -> UpdateSettings:
        return cls(config.optimizer, config.precision.types)

    def policies(self, infos: Mapping[str, ParameterInfo]) -> dict[str, TypePolicy]:
        """Global name -> policy, with nothing left open: the settings of the parameter's role, changed by every rule
        whose pattern matches, in order. Muon by default is for hidden matrices; the others get AdamW."""
        found = {}
        for name, info in infos.items():
            policy = self.chosen(name, info)
            usual = self.optimizer.name if self.optimizer.name != "muon" or hidden_matrix(info) else "adamw"
            decay = self.optimizer.weight_decay if policy.weight_decay is None else float(policy.weight_decay)
            found[name] = dataclasses.replace(policy, optimizer=policy.optimizer or usual, weight_decay=decay)
        return found

    def problems(self, infos: Mapping[str, ParameterInfo]) -> list[str]:
        """What is wrong with them for a model of such parameters, one sentence each."""
        names = [
            name
            for name, info in infos.items()
            if not hidden_matrix(info) and self.chosen(name, info).optimizer == "muon"
        ]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        misplaced = [
            f"precision.types gives {name}{more} optimizer=muon, which is for hidden matrices; leave it out there, or "
            "name the matrices alone, such as precision.types.matrix.optimizer=muon"
            for name in names[:1]
        ]
        return misplaced + self._too_slow(infos)

    def _too_slow(self, infos: Mapping[str, ParameterInfo]) -> list[str]:
        """Moments in bf16 that decay so slowly that they do not: one sentence for each setting and role."""
        found = {}
        for name, policy in self.policies(infos).items():
            for setting in DECAYS.get(policy.optimizer or "", ()) if policy.state_dtype == "bf16" else ():
                decay = attrgetter(setting.removeprefix("optimizer."))(self.optimizer)
                if decay > SLOWEST_IN_BF16:
                    role = infos[name].role
                    found[setting, role] = (
                        f"{setting}={decay} is too near to 1 for moments in bf16, which round away what a step takes "
                        f"from them: those of {name} would not decay; set {setting} to at most {SLOWEST_IN_BF16}, or "
                        f"state_dtype=fp32 in precision.types.{role} or in the rule that gives it bf16"
                    )
        return list(found.values())

    def names(self) -> set[str]:
        """Every optimizer that a setting names."""
        rules = [rule if isinstance(rule, dict) else dataclasses.asdict(rule) for rule in self.types.rules.values()]
        given = [getattr(self.types, role).optimizer for role in ROLES] + [rule.get("optimizer") for rule in rules]
        return {self.optimizer.name, *filter(None, given)}

    def chosen(self, name: str, info: ParameterInfo) -> TypePolicy:
        """The settings of a parameter as they were given: of its role, changed by every rule that matches, in order."""
        chosen = dataclasses.asdict(getattr(self.types, info.role))
        for changes in self._matching(name):
            chosen.update(changes)
        return TypePolicy(**chosen)

    def _matching(self, name: str) -> Iterator[dict[str, Any]]:
        for pattern, changes in self.types.rules.items():
            if fnmatchcase(name, pattern):
                yield changes if isinstance(changes, dict) else dataclasses.asdict(changes)


def hidden_matrix(info: ParameterInfo) -> bool:
    """Whether a parameter is a matrix between hidden states: neither embedding nor head."""
    return info.role == "matrix" and len(info.shape) == 2


NEWTON_SCHULZ_STEPS = 5
"""Of Muon's iteration, as published (Jordan et al. 2024)."""


def orthogonalisation_flops(shape: Sequence[int], steps: int) -> int:
    """FLOPs of Muon's Newton-Schulz iteration for a matrix: in each step, three products with its smaller Gram
    matrix."""
    small, large = sorted(shape)
    return 2 * steps * small**2 * (2 * large + small)


@by_value
def muon_flops(spec: ModelSpec, updates: UpdateSettings) -> tuple[int, ...]:
    """FLOPs of an update's orthogonalisations in each layer."""
    found = []
    for index, table in enumerate(layer_tables(spec)):
        infos = {f"layers.{index}.{name}": info for name, info in table.items()}
        policies = updates.policies(infos)
        found.append(
            sum(
                orthogonalisation_flops(info.shape, NEWTON_SCHULZ_STEPS)
                for name, info in infos.items()
                if policies[name].optimizer == "muon"
            )
        )
    return tuple(found)
