"""Packages of a user for tests, and registries that forget them."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from trainer.config.registry import REGISTRIES


def package(folder: Path, name: str, text: str) -> str:
    """Writes a module and returns its name."""
    (folder / f"{name}.py").write_text("from trainer import option, register\n" + textwrap.dedent(text))
    return name


@contextlib.contextmanager
def forgotten(*folders: Path) -> Iterator[None]:
    """Modules are found in `folders` meanwhile. What is registered and imported is forgotten afterwards."""
    registered, loaded = [dict(registry.registered) for registry in REGISTRIES], set(sys.modules)
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        del sys.path[: len(folders)]
        for name in set(sys.modules) - loaded:
            file = getattr(sys.modules[name], "__file__", None)
            # What was installed stays: parts of a library that is loaded a second time do not know those of the first.
            if file and "site-packages" not in file and not name.startswith("trainer"):
                del sys.modules[name]
        for registry, before in zip(REGISTRIES, registered):
            registry.registered.clear()
            registry.registered.update(before)
