"""Packages that only some commands and settings need: the extras of the distribution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.config.fields import ConfigError

DISTRIBUTION = "composable-trainer"
"""The name under which pip knows the project, as in pyproject.toml."""


@contextmanager
def requires_extra(extra: str, what: str) -> Iterator[None]:
    """Around the imports of an extra's packages; raises `ConfigError` with the command that installs them."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {error.name or extra}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'"
        ) from None
