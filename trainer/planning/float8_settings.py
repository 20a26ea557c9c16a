"""Which settings ask for products in fp8: `precision.float8.recipe`, and by type and name of parameters
`precision.types`."""

from __future__ import annotations

import dataclasses

from trainer.config import Float8Config, ParameterTypes, PrecisionConfig
from trainer.planning.cost.parameters import ROLES


def float8_settings(precision: PrecisionConfig) -> dict[str, str]:
    """Settings that ask for products in fp8 -> their recipes, the most general first."""
    types = precision.types
    named: dict[str, str | None] = {"precision.float8.recipe": precision.float8.recipe}
    named |= {f"precision.types.{role}.float8": getattr(types, role).float8 for role in ROLES}
    for pattern, rule in types.rules.items():
        policy = rule if isinstance(rule, dict) else dataclasses.asdict(rule)
        named[f"precision.types.rules.{pattern}.float8"] = policy.get("float8")
    return {name: recipe for name, recipe in named.items() if recipe and recipe != "none"}


def float8_setting(precision: PrecisionConfig) -> tuple[str, str]:
    """The most general of them as it was written, and what would take it back; "" where none is."""
    for name, recipe in float8_settings(precision).items():
        return f"{name}={recipe}", f"{name}=none"
    return "", ""


def without_float8(precision: PrecisionConfig) -> PrecisionConfig:
    """The same numeric types with all products in the compute type."""
    types = precision.types
    plain = {role: dataclasses.replace(getattr(types, role), float8=None) for role in ROLES}
    rules = {
        pattern: {key: value for key, value in rule.items() if key != "float8"}
        if isinstance(rule, dict)
        else dataclasses.replace(rule, float8=None)
        for pattern, rule in types.rules.items()
    }
    return dataclasses.replace(precision, float8=Float8Config(), types=ParameterTypes(**plain, rules=rules))
