"""From what is asked to what is decided: a checked configuration, and the layout of its run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from trainer.config import Config, ConfigError
from trainer.config.compose import gather, to_config
from trainer.planning.checks import check


def compose(
    overrides: Sequence[str] = (), config_dir: str | os.PathLike | None = None, world_size: int | None = None
) -> Config:
    """The checked configuration of a run on `world_size` processes (default: WORLD_SIZE of the environment, else 1).

    `overrides` is what stands on the command line: `["+config=debug", "lr.peak=1e-3"]`. Leaves no Hydra state behind.
    Raises `ConfigError` with everything that is wrong.
    """
    values, problems = gather(overrides, config_dir)
    world = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    config = to_config(values, problems, world)
    contradictions = check(config, world)
    if problems:
        # A setting that was refused stands at its default: what contradicts only that default is no news.
        refused = re.compile(r"\b(" + "|".join(map(re.escape, problems)) + r")\b")
        recipe = "config" not in problems
        raise ConfigError(
            [*problems.values(), *(text for text in contradictions if recipe and not refused.search(text))]
        )
    if contradictions:
        raise ConfigError(contradictions)
    return config
