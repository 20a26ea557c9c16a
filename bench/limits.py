"""How near a step under ZeRO-3 comes to what this machine could do: the floor, and an account of the rest.

    python bench/limits.py OUT_FOLDER [model=configs/model/llama3_8b.yaml] [length=8192] [micro=2] [device=auto] \
        [SETTING=VALUE ...]
    python bench/limits.py OUT_FOLDER draw

The floor is what products, attention and the optimizer's update take by themselves, one after the other, with nothing
between them: each product of a layer and of the head at its own shape, three times (output, gradients of input and
weight), causal attention forward and backward, and 32 bytes for each element that a rank updates at the rate of a large
copy. Measured on one GPU in bf16; then the step runs on all of them, with what recompute need not repeat kept, and
other settings as given. OUT_FOLDER/limits.json has the numbers; a table says what each kind of kernel takes beside its
floor. Kinds on different streams overlap, so their shares may add up to more than one. `draw` makes
OUT_FOLDER/limits.png of the numbers, which needs no GPU."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compare import ROOT, launch
from specs import read_spec
from torch import Tensor

from trainer.cluster.stopwatch import Stopwatch
from trainer.config import Config, RunConfig
from trainer.config.model import ModelSpec
from trainer.distributed.world import join, local_device
from trainer.model.attention import attend, kernel_priority
from trainer.planning.cost.flops import matrices, parameter_counts
from trainer.planning.cost.parameters import head_rows, layer_specs
from trainer.planning.plan import resolve_plan
from trainer.precision.products import Role, matmul

UPDATE = 32
"""Bytes of an element: norm and AdamW in fp32."""
COPY = {"cuda": 2**31, "cpu": 2**26}
"""Bytes of the copy."""
LIMIT = 0.3
"""Seconds for one measurement."""
SETTINGS = [
    *("precision.compute=bf16", "parallel.zero.stage=3", "compile=true"),
    *("activation.mode=selective", "activation.save=[attention,matmul]"),
]


class Limits:
    """Seconds of one GPU, for a micro-batch of `tokens` in sequences of `length`."""

    def __init__(self, spec: ModelSpec, length: int, micro: int, device: torch.device):
        self.spec, self.length, self.micro, self.device = spec, length, micro, device
        self.watch = Stopwatch(join(resolve_plan(Config().parallel, 1).mesh, device))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def seconds(self, work: Callable[[], Any]) -> float:
        return self.watch.seconds(work, LIMIT)

    def products(self) -> float:
        total, tokens = 0.0, self.length * self.micro
        for (columns, inputs), number in Counter(matrix.shape for matrix in matrices(self.spec)).items():
            outputs = int(head_rows(columns))
            x, weight, gradient = (
                self.random(tokens, inputs),
                self.random(outputs, inputs),
                self.random(tokens, outputs),
            )
            calls = {Role.OUTPUT: (x, weight), Role.INPUT_GRADIENT: (gradient, weight)}
            calls[Role.WEIGHT_GRADIENT] = (gradient, x)
            for role, operands in calls.items():
                total += number * self.seconds(lambda: matmul(*operands, role))
        return total

    def attention(self) -> float:
        total = 0.0
        for (heads, groups, size, scale), number in Counter(
            (a.heads, a.kv_heads, a.head_dim, a.scale) for a in (layer.attention for layer in layer_specs(self.spec))
        ).items():
            query = self.random(self.micro, heads, self.length, size).requires_grad_()
            key, value = (self.random(self.micro, groups, self.length, size).requires_grad_() for _ in "kv")
            gradient = self.random(*query.shape)

            def both() -> Any:
                return torch.autograd.grad(attend(query, key, value, None, scale), (query, key, value), gradient)

            with kernel_priority(False):
                total += number * self.seconds(both)
        return total

    def update(self, ranks: int) -> float:
        source = torch.empty(COPY[self.device.type], dtype=torch.uint8, device=self.device).fill_(1)
        target = torch.empty_like(source)
        rate = 2 * len(source) / self.seconds(lambda: target.copy_(source))
        return UPDATE * parameter_counts(self.spec)["total"] / ranks / rate


KINDS = {
    **{"matmul": "products", "attention": "attention", "optimizer": "update", "pointwise": "other kernels"},
    **{"copy": "copies", "exposed_communication": "exposed communication", "idle": "idle"},
}


def draw(folder: Path) -> None:
    """The floor and the step below each other, by kind of kernel."""
    from matplotlib import pyplot

    from trainer.plots.runs import COLOURS, STYLE

    found = json.loads((folder / "limits.json").read_text())
    floor, step = found["floor"], found["step"]
    took = {kind: step["shares"].get(kind, 0.0) * step["seconds"] for kind in KINDS}
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 1.9), layout="constrained")
        for place, times in enumerate((took, floor)):
            at = 0.0
            for colour, (kind, label) in zip(COLOURS, KINDS.items()):
                wide = 1e3 * times.get(kind, 0.0)
                axes.barh(place, wide, left=at, color=colour, label=label if place == 0 else None)
                if wide > 0.04e3 * step["seconds"]:
                    axes.text(at + wide / 2, place, f"{wide:.0f}", color="white", ha="center", va="center", fontsize=8)
                at += wide
        axes.set_yticks([0, 1], ["step", "floor"])
        axes.set_xlabel("ms")
        axes.grid(axis="y", visible=False)
        figure.legend(ncols=len(KINDS), fontsize=7, loc="outside upper center")
        figure.savefig(folder / "limits.png")


def main(arguments: list[str]) -> None:
    out, *words = arguments
    if words == ["draw"]:
        draw(Path(out))
        return
    own = {"model": "configs/model/llama3_8b.yaml", "length": "8192", "micro": "2", "device": "auto"}
    given = own | {name: value for name, value in (word.split("=", 1) for word in words) if name in own}
    settings = [word for word in words if word.split("=", 1)[0] not in own]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    spec = read_spec(given["model"])
    device, ranks = local_device(RunConfig(device=given["device"])), max(1, torch.cuda.device_count())
    limits = Limits(spec, int(given["length"]), int(given["micro"]), device)
    floor = {"matmul": limits.products(), "attention": limits.attention(), "optimizer": limits.update(ranks)}
    del limits
    if device.type == "cuda":
        torch.cuda.empty_cache()
    shape = [f"{name}={given[name]}" for name in ("model", "length", "micro")]
    text = launch("limits", folder, ["bench/step.py", "case=limits", *shape, *SETTINGS, *settings], ROOT)
    step = next(json.loads(line) for line in text.splitlines() if line.startswith('{"case"'))
    taken, least = step["seconds"], sum(floor.values())
    for kind, share in step.get("shares", {}).items():
        if kind != "longest_kernels":
            print(f"{kind:24}{1e3 * share * taken:8.0f} ms" + (f"{1e3 * floor[kind]:8.0f}" if kind in floor else ""))
    print(f"{'step':24}{1e3 * taken:8.0f} ms{1e3 * least:8.0f}: {least / taken:.3f} of it is the floor")
    (folder / "limits.json").write_text(json.dumps({"floor": floor, "of_step": least / taken, "step": step}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
