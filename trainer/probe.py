"""Measures the machines that it runs on, and writes them down for `trainer.estimate`.

    python -m trainer.probe +config=RECIPE out=FOLDER/hardware/NAME.yaml                     one device
    torchrun --nproc-per-node 8 ... -m trainer.probe +config=RECIPE out=...                  with the links between them

The recipe says at which shapes, in which types and over which groups of ranks. The file is one as of
`configs/hardware/`: `trainer.estimate hardware=PATH` predicts with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from trainer.config import Config, ConfigError
from trainer.config.extend import extend_spec
from trainer.config.fields import option
from trainer.config.options import escape_unprintable, format_usage, parse_options
from trainer.config.schema import ModelConfig
from trainer.planning.estimate.hardware import load_hardware
from trainer.planning.plan_overrides import compose_variant, split_words
from trainer.planning.resolve import Layout, check_config, resolve_layout
from trainer.util.exit_codes import DONE, refuse_config
from trainer.util.files import write_atomic

PROGRAM = "trainer.probe"


@dataclass
class ProbeOptions:
    out: str = option("", "the file to write, such as FOLDER/hardware/NAME.yaml; '': it is printed alone")
    hardware: str = option("", "a file of configs/hardware, or a path, for what is not measured; '': the device's own")
    seconds: float = option(0.0, "time to measure in, about; 0: 60 on GPUs, 15 on CPUs")


def parse_arguments(arguments: Sequence[str]) -> tuple[ProbeOptions, list[str], str | None]:
    """Splits a command line into options, overrides and configuration folder. Raises `ConfigError`."""
    own, overrides, config_dir = split_words(arguments, [field.name for field in fields(ProbeOptions)], PROGRAM)
    return parse_options(ProbeOptions, [f"{name}={value}" for name, value in own.items()]), overrides, config_dir


def requested_recipe(options: ProbeOptions, overrides: list[str], config_dir: str | None) -> tuple[Config, Layout]:
    """The recipe, on the processes that run. Raises `ConfigError` with everything that is wrong."""
    problems = []
    if not options.seconds >= 0:
        problems.append(f"seconds={options.seconds} must be at least 0")
    if options.out and not Path(options.out).absolute().parent.is_dir():
        problems.append(f"out={options.out}: there is no folder {Path(options.out).parent}; make it, or name another")
    world = int(os.environ.get("WORLD_SIZE", 1))
    config = compose_variant(overrides, config_dir, world, corpus=False)
    if config.model.from_hf:
        from trainer.hf import spec_from_hf

        config.model = ModelConfig(**vars(extend_spec(spec_from_hf(config.model.from_hf), config.model.extend)))
    problems += check_config(config, world)
    if problems:
        raise ConfigError(problems)
    return config, resolve_layout(config, world, config.model)


def run(arguments: Sequence[str]) -> None:
    options, overrides, config_dir = parse_arguments(arguments)
    config, layout = requested_recipe(options, overrides, config_dir)
    known = load_hardware(options.hardware, config_dir=config_dir) if options.hardware else None
    from trainer.cluster.probe import probe_machine  # torch, which no refusal above needs

    text, writes = probe_machine(config, layout, known, options.seconds, " ".join(arguments))
    if writes:
        print(text, end="")
    if writes and options.out:
        write_atomic(Path(options.out), text)
        print(f"written to {options.out}: python -m trainer.estimate hardware={options.out} +config=...", flush=True)


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit code is 0, or 2 after one message about what is wrong."""
    escape_unprintable()
    if {"-h", "--help"} & set(arguments):
        page = format_usage(ProbeOptions, PROGRAM)
        print(page.replace(PROGRAM, f"{PROGRAM} +config=RECIPE [SETTING=VALUE ...]", 1))
        return DONE
    try:
        run(arguments)
    except ConfigError as error:
        return refuse_config(error)
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
