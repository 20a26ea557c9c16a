"""A plan's numbers beside the reference's: tolerances, verdicts, and the table of them."""
from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from trainer.config import PrecisionConfig
from trainer.observe.tables import _console as console_for
from trainer.observe.tables import _print as print_table
from trainer.parity.reference import Trajectory


class Limits(NamedTuple):
    """The largest relative errors of a first step: loss, gradient norm, any parameter's gradient, any updated parameter. The
    n-th step may be off n times as much, since it starts from weights that are off already."""
    loss: float
    norm: float
    gradient: float
    parameters: float


TOLERANCES = {"fp32": Limits(1e-6, 1e-6, 5e-6, 5e-6), "tf32": Limits(1e-4, 2e-3, 3e-2, 1e-2),
              "fp16": Limits(1e-4, 2e-3, 3e-2, 1e-2), "bf16": Limits(1e-4, 5e-3, 5e-2, 1e-2)}
"""By the coarsest type that forward, backward and reduction use. fp32 leaves room for sums taken in another order only."""


def tolerance(precision: PrecisionConfig) -> Limits:
    """What may be expected of a plan's numeric types."""
    if "bf16" in (precision.compute, precision.reduce):
        return TOLERANCES["bf16"]
    return TOLERANCES["tf32" if precision.compute == "fp32" and precision.matmul == "high" else precision.compute]


@dataclass
class Result:
    """One row of the table. steps: of each the loss, the norm, their errors, the worst gradient error and whose it is;
    parameters: the worst error after the last step and whose; reasons: why it failed or was refused."""
    plan: str
    description: list[str]
    verdict: str
    reasons: list[str] = field(default_factory=list)
    limits: Limits | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    parameters: tuple[float, str] | None = None
    overflows: int = 0


def compare(name: str, description: list[str], seen: Trajectory, expected: Trajectory, limits: Limits) -> Result:
    """Judges a plan's trajectory by the reference's."""
    result = Result(name, description, "PASS", list(seen.problems), limits, overflows=seen.overflows)
    different = [name for name in expected.initial if name not in seen.initial or not torch.equal(seen.initial[name], expected.initial[name])]
    if different:
        result.reasons.append(f"the initial weights differ in {', '.join(different[:5])}")
    for number, (loss, norm) in enumerate(zip(seen.losses, seen.norms)):
        gradient, where = worst(seen.gradients[number], expected.gradients[number])
        step = {"loss": loss, "norm": norm, "loss_error": relative(loss, expected.losses[number]),
                "norm_error": relative(norm, expected.norms[number]), "gradient_error": gradient, "where": where}
        result.steps.append(step)
        result.reasons += exceeded(f"step {number + 1}: the loss is off", step["loss_error"], limits.loss, number + 1)
        result.reasons += exceeded(f"step {number + 1}: the gradient norm is off", step["norm_error"], limits.norm, number + 1)
        result.reasons += exceeded(f"step {number + 1}: the gradient of {where} is off", gradient, limits.gradient, number + 1)
    result.parameters = worst(seen.parameters, expected.parameters, skip=vanishing(expected))
    result.reasons += exceeded(f"after the last step {result.parameters[1]} is off", result.parameters[0], limits.parameters, len(seen.losses))
    if result.reasons:
        result.verdict = "FAIL"
    return result


def exceeded(text: str, error: float, limit: float, step: int) -> list[str]:
    """Says by how much, if it is too much."""
    return [] if error <= limit * step else [f"{text} by {error:.1e}, the limit is {limit * step:.0e}"]


def worst(seen: dict[str, Tensor], expected: dict[str, Tensor], skip: Iterable[str] = ()) -> tuple[float, str]:
    """The largest error of a tensor, relative to its own norm (or a hundredth of the global one), and whose it is."""
    norms = {name: value.norm(dtype=torch.float64) for name, value in expected.items()}
    floor = 1e-2 * torch.stack([*norms.values()]).norm()
    errors = {name: ((seen[name] - value).norm() / torch.maximum(norms[name], floor)).item() if name in seen else math.inf
              for name, value in expected.items() if name not in skip}
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[name], name


def vanishing(expected: Trajectory) -> set[str]:
    """Parameters whose gradient is zero but for rounding, which Adam's division turns into a step of any direction: the
    bias of the keys, where nothing depends on the position."""
    return {name for gradients, norm in zip(expected.gradients, expected.norms) for name, value in gradients.items() if value.norm() <= 1e-6 * norm}


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), sys.float_info.min)


def show(expected: Trajectory, results: Sequence[Result]) -> None:
    """Prints one table, a row a step, the limits under each plan; then the reasons of what did not pass."""
    console, frame = console_for(None)
    table = Table(box=frame, title="parity with one process", title_justify="left", title_style="bold cyan", header_style="dim", pad_edge=frame is not None)
    for name in ("plan", "step", "loss", "norm", "loss error", "norm error", "gradient error", "worst in", "weights error", "verdict"):
        table.add_column(name, justify="left" if name in ("plan", "worst in", "verdict") else "right", overflow="fold")
    for number, (loss, norm) in enumerate(zip(expected.losses, expected.norms)):
        table.add_row("" if number else "reference: one process, fp32", str(number + 1), f"{loss:.6f}", f"{norm:.6f}")
    table.add_section()
    colours = {"PASS": "green", "FAIL": "bold red", "REFUSED": "yellow"}
    for result in results:
        lines = result.description or [result.plan]
        rows = [(str(number), f"{step['loss']:.6f}", f"{step['norm']:.6f}", *(f"{step[name]:.1e}" for name in ("loss_error", "norm_error", "gradient_error")),
                 step["where"], "", "") for number, step in enumerate(result.steps, start=1)]
        verdict = f"[{colours[result.verdict]}]{result.verdict}[/]" + f", {result.overflows} overflows" * bool(result.overflows)
        if rows:
            rows[-1] = (*rows[-1][:-2], f"{result.parameters[0]:.1e}", verdict)
            loss, norm, gradient, parameters = (f"{limit:.0e}" for limit in result.limits)
            rows.append(("limit x step", "", "", loss, norm, gradient, "", parameters, ""))
        else:
            rows.append(("",) * 8 + (verdict,))
        for index in range(max(len(lines), len(rows))):
            table.add_row(lines[index] if index < len(lines) else "", *(rows[index] if index < len(rows) else ()))
        table.add_section()
    print_table(console, table)
    for result in results:
        for reason in result.reasons:
            console.print(f"{result.verdict} {result.plan}: {reason}", markup=False, soft_wrap=True)
    verdicts = [result.verdict for result in results]
    console.print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in colours if verdict in verdicts))
