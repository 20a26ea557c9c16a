"""Trains large language models with data, tensor and pipeline parallelism and ZeRO, configured by Hydra.

From Python: `trainer.run(trainer.compose(["+config=debug", "run.steps=20"])).metrics`. Importing this package imports
neither torch nor Hydra. `trainer.register` and `trainer.option` are for packages that add to it (docs/extending.md).
"""

import importlib

__version__ = "0.2.0.dev0"
__all__ = ["Config", "ConfigError", "compose", "option", "register", "run"]

_HOMES = {
    "Config": "trainer.config",
    "ConfigError": "trainer.config",
    "compose": "trainer.planning.resolve",
    "option": "trainer.config.fields",
    "register": "trainer.config",
    "run": "trainer.training.run",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
