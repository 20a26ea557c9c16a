"""Measures the machines that it runs on, and writes them down for `trainer estimate`.

    trainer probe +config=RECIPE out=FOLDER/hardware/NAME.yaml                              one device
    trainer probe --gpus 8 +config=RECIPE out=...                                           with the links between them
    torchrun --nproc-per-node 8 ... -m trainer probe +config=RECIPE out=...                 of several nodes

The recipe says at which shapes, in which types and over which groups of ranks. The file is one as of
`configs/hardware/`: `trainer estimate hardware=PATH` predicts with it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainer.commands.grammar import Command, LaunchOptions, RecipeOptions, missing_folder
from trainer.config import ConfigError
from trainer.config.fields import option
from trainer.util.reading import write_atomic


@dataclass
class ProbeOptions(LaunchOptions, RecipeOptions):
    out: str = option("", "the file to write, such as FOLDER/hardware/NAME.yaml; '': it is printed alone")
    hardware: str = option("", "a file of configs/hardware, or a path, for what is not measured; '': the device's own")
    seconds: float = option(0.0, "time to measure in, about; 0: 60 on GPUs, 15 on CPUs", range="[0, inf)")

    def list_problems(self) -> list[str]:
        return missing_folder("out", self.out)


def run(options: ProbeOptions) -> None:
    from trainer.hf import with_known_model
    from trainer.planning.hardware import load_hardware
    from trainer.planning.neighbours import compose_variant
    from trainer.planning.resolve import check_config, resolve_layout

    world = int(os.environ.get("WORLD_SIZE", 1))
    config = with_known_model(compose_variant(options.overrides, options.config_dir, world, corpus=False))
    if problems := check_config(config, world):
        raise ConfigError(problems)
    layout = resolve_layout(config, world, config.model)
    known = load_hardware(options.hardware, config_dir=options.config_dir) if options.hardware else None
    from trainer.cluster.probe import probe_machine  # torch, which no refusal above needs

    words = [f"{name}={value}" for name in main.keys if (value := getattr(options, name))]
    text, writes = probe_machine(config, layout, known, options.seconds, " ".join([*options.overrides, *words]))
    if writes:
        print(text, end="")
    if writes and options.out:
        write_atomic(Path(options.out), text)
        print(f"written to {options.out}: trainer estimate hardware={options.out} +config=...", flush=True)


main = Command(
    "probe",
    "Measures this machine at the shapes of a recipe, and writes the file of hardware for trainer estimate.",
    "trainer probe --gpus 8 +config=llama3_8b out=node.yaml",
    ProbeOptions,
    run,
    device="run.device=cuda",
)
