"""The parity command, over the trainer as it is and over one that forgets to add up what tensor-parallel ranks
share, with what was decided of the plans of the latter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from trainer import parity
from trainer.commands.parity import main
from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.parallel.tensor.apply import SharedParameters
from trainer.parity.compare import Trajectory
from trainer.planning.plan import Plan

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    codes = {"sound": main([*arguments, f"json={folder}/sound.json"])}
    SharedParameters.sum = lambda self: None
    decided, train_plan = [], parity.train_plan

    def record_decision(config: Config, spec: ModelSpec, plan: Plan, *more: Any) -> Trajectory:
        decided.append([config.parallel.zero.collectives, plan.casts_once])
        return train_plan(config, spec, plan, *more)

    parity.train_plan = record_decision
    codes["broken"] = main(
        [
            *(word for word in arguments if not word.startswith("plans=")),
            "plans=[zero3, parallel.tp=2, zero2 precision=fp8 precision.float8.ends=0 batch.micro_size=2]",
            f"json={folder}/broken.json",
        ]
    )
    if int(os.environ["RANK"]) == 0:
        (Path(folder) / "codes.json").write_text(json.dumps(codes | {"decided": decided}))
    sys.stdout.flush()
    os._exit(0)
