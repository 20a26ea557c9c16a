"""The reference, and how a plan is compared with it: errors, tolerances, verdicts, and the table of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import Config, GradCommConfig, PrecisionConfig
from trainer.config.model import ModelSpec
from trainer.data.batches import MicroBatch
from trainer.model.experts import MARGIN_POINTS, Router, WideLinear
from trainer.model.initial import InitialWeights, RoundedWeights, Weights, initialize_model, name_seed, parameter_infos
from trainer.model.loss import loss_terms
from trainer.model.stage import Stage, split_report
from trainer.optim.muon import COEFFICIENTS, MOMENTUM
from trainer.optim.optimizer import learning_rate, parameter_policies
from trainer.parallel.parallelize import make_stage, multiply_in_float8
from trainer.parity.routing import Choices, RoutingReplay
from trainer.planning.parameters import NEWTON_SCHULZ_STEPS, UP, ParameterInfo, float8_settings
from trainer.util.tables import console_for, print_table, titled_table

# The reference that every plan is compared with: one process, plain modules and autograd, fp32, torch's AdamW, and
# Muon by singular values.


IGNORE = -100
"""The target of a token that has no target."""

LOSS_SCALE = 4096.0
"""The first loss scale of an fp16 reference. It halves while a gradient overflows, as a run's does."""


@dataclass
class Trajectory:
    """What is compared: losses, norms, and whole fp32 tensors on the CPU by global name.

    problems: faults on the way, whatever the numbers. overflows: how many steps the loss scaler skipped. choices: the
    experts that tokens went to. differing: the share of tokens that would have chosen other experts than those of the
    reference, which they were sent to; None where they went where they chose.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    overflows: int = 0
    choices: Choices = field(default_factory=Choices)
    differing: float | None = None


def train_reference(
    config: Config,
    spec: ModelSpec,
    steps: Iterable[list[MicroBatch]],
    device: torch.device,
    weights: Weights | None = None,
    compute: torch.dtype = torch.float32,
    float8: PrecisionConfig | None = None,
    choices: Choices | None = None,
) -> Trajectory:
    """Trains in this process with none of the project's parallel, optimizer or loss code.

    steps: the micro-batches of each optimizer step, of any size. compute: the type of forward and backward, float8: of
    products; a type other than fp32 shows how much accuracy the type by itself costs. choices: of another trajectory,
    where tokens are to go to the experts that they went to there."""
    with torch.device("meta"):
        model = make_stage(spec)
    model.to_empty(device=device)
    if float8 is not None:
        multiply_in_float8(model, spec, float8)
    weights = RoundedWeights(weights or InitialWeights(spec, config.run.seed, device))
    initialize_model(model, spec, config.run.seed, device, weights)
    optimizers = optimizers_of(model, config)
    wide = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, WideLinear)
        for key in module.declared
    }
    seen, scale = Trajectory(initial=copy_parameters(model)), LOSS_SCALE if compute is torch.float16 else 1.0
    updates, replay = 0, RoutingReplay(choices)
    replay.watch(model)
    for number, batches in enumerate(steps):
        replay.begin_step(number, batches)
        targets = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
        valid = max(1, targets)
        while True:
            loss, counts = 0.0, dict[str, Tensor]()
            for batch in batches:
                copies = {
                    name: parameter if name in wide else parameter.to(compute)
                    for name, parameter in model.named_parameters()
                }
                with replay.active():
                    output = torch.func.functional_call(model, copies, (batch.tokens,), {"documents": batch.documents})
                objective, entropy = losses_of(output, batch.targets.flatten(), config)
                (objective * (scale / valid)).backward()
                loss += entropy.item() / valid
                add_counts(counts, output)
            trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
            if scale <= 1 or all(parameter.grad.isfinite().all() for parameter in trained.values()):
                break
            scale /= 2
            model.zero_grad()
        for parameter in trained.values():
            parameter.grad /= scale
        seen.losses.append(loss)
        seen.gradients.append({name: parameter.grad.to("cpu", copy=True) for name, parameter in trained.items()})
        norm = torch.stack(
            [parameter.grad.norm(dtype=torch.float64) for parameter in trained.values()]
        ).norm()  # fp32 loses digits
        torch.nn.utils.clip_grads_with_norm_(trained.values(), config.optimizer.clip_norm or math.inf, norm.float())
        seen.norms.append(norm.item())
        rate = learning_rate(config.lr, config.run.steps, torch.tensor(float(updates))).item()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * rate
            if targets:
                optimizer.step()
            optimizer.zero_grad()
        if targets:
            rebalance_experts(model, counts)
        updates += targets > 0
    seen.parameters, seen.choices = copy_parameters(model), replay.choices
    seen.differing = None if choices is None else replay.differing / max(1, replay.tokens)
    return seen


def add_counts(counts: dict[str, Tensor], output: Any) -> None:
    """Adds up what routers count of a micro-batch, by the names of the statistics."""
    _, report = split_report(output)
    for name, values in report.statistics.items() if report is not None else ():
        if name.endswith((".load", ".margins")):
            counts[name] = counts.get(name, 0) + values


def rebalance_experts(model: Stage, counts: dict[str, Tensor]) -> None:
    """Moves biases towards equal load, and notes the load for the next step's balance loss."""
    for name, router in model.named_modules():
        if not isinstance(router, Router):
            continue
        block = name.removesuffix("router")
        load = counts[f"{block}load"].tolist()
        mean = sum(load) / len(load)
        changes = [(count < mean) - (count > mean) for count in load]
        if (margins := counts.get(f"{block}margins")) is not None:
            rows = margins.view(len(load), -1).tolist()
            changes = [find_quantile(row, router.spec.top_k / router.spec.count) for row in rows]
            changes = [change - sum(changes) / len(changes) for change in changes]
        for expert, count in enumerate(load):
            if router.balance is not None:
                router.balance[expert] += router.spec.bias_rate * changes[expert]
            if router.usage is not None:
                router.usage[expert] = count / mean


def find_quantile(counts: list[float], share: float) -> float:
    """The margin above those of a share of the tokens. counts: at `MARGIN_POINTS`, each half below its point."""
    wanted, sums = share * sum(counts), accumulate(counts)
    below = [total - count / 2 for total, count in zip(sums, counts)]
    place = next((number for number, amount in enumerate(below) if amount >= wanted), len(below))
    if place in (0, len(below)):
        return MARGIN_POINTS[0 if place == 0 else -1]
    (start, end), (lower, upper) = below[place - 1 : place + 1], MARGIN_POINTS[place - 1 : place + 1]
    return lower + (wanted - start) / (end - start) * (upper - lower)


def optimizers_of(model: Stage, config: Config) -> list[torch.optim.Optimizer]:
    """torch's AdamW, and `ReferenceMuon`, with a parameter group for each policy."""
    policies = parameter_policies(parameter_infos(model), config.precision.types, config.optimizer)
    groups: dict[Any, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        groups.setdefault(policies[name], []).append(parameter)
    by_optimizer: dict[str, list[dict[str, Any]]] = {}
    for policy, parameters in groups.items():
        by_optimizer.setdefault(policy.optimizer, []).append(
            {"params": parameters, "weight_decay": policy.weight_decay, "scale": policy.lr_scale}
        )
    betas, eps = (config.optimizer.beta1, config.optimizer.beta2), config.optimizer.eps
    return [
        ReferenceMuon(some) if name == "muon" else torch.optim.AdamW(some, betas=betas, eps=eps)
        for name, some in by_optimizer.items()
    ]


def losses_of(output: Any, targets: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The objective and the cross-entropy of a micro-batch, both sums over its valid targets.

    output: what the model returned, logits [batch, length, vocab]; targets: [batch x length]."""
    logits, report = split_report(output)
    logits, valid = logits.flatten(0, 1).float(), targets != IGNORE
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    auxiliary = 0.0 if report is None or report.objective is None else report.objective
    added = sum(term(logits, targets)[valid].sum() for term in loss_terms(config.loss).values())
    square = logits.logsumexp(-1)[valid].square().sum()
    return entropy + config.loss.z_loss * square + added + auxiliary, entropy


class ReferenceMuon(torch.optim.Optimizer):
    """Muon without its iteration: that changes singular values alone, which are changed here one by one, in fp64."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        a, b, c = COEFFICIENTS
        for group in self.param_groups:
            for weight in group["params"]:
                moment = self.state[weight].setdefault("moment", torch.zeros_like(weight))
                moment.lerp_(weight.grad, 1 - MOMENTUM)
                direction = weight.grad.lerp(moment, MOMENTUM)
                left, values, right = torch.linalg.svd(direction.double(), full_matrices=False)
                values /= values.norm(dim=-1, keepdim=True).clamp(min=1e-7)
                for _ in range(NEWTON_SCHULZ_STEPS):
                    values = a * values + b * values**3 + c * values**5
                factor = 0.2 * max(weight.shape[-2:]) ** 0.5  # of one matrix, or of each expert's
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(((left * values[..., None, :]) @ right * (group["lr"] * factor)).to(weight.dtype))


def copy_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """The trained parameters, and the buffers that checkpoints hold."""
    kept = {name: value for name, value in model.named_buffers() if ".router." in name}
    kept |= {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {name: value.detach().to("cpu", copy=True) for name, value in kept.items()}


class StartedAdapters:
    """The weights of `base`, but with a matrix B of every adapter that is not zero: the gradient of A would be zero in
    the first step and tiny afterwards, and a comparison would find no fault in it."""

    def __init__(self, base: Weights, seed: int):
        self.base, self.seed = base, seed

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        return self.start(name, info, self.base(name, info))

    def experts(self, name: str, info: ParameterInfo, numbers: range) -> Tensor:
        """Some of a stack of experts."""
        return self.start(name, info, self.base.experts(name, info, numbers), numbers.start)

    def start(self, name: str, info: ParameterInfo, value: Tensor, first: int = 0) -> Tensor:
        """The value as it is, or drawn where it is a matrix B. first: of a stack, the number of the first expert."""
        if name.endswith(f".{UP}"):
            for number, part in enumerate(value if info.stacked else [value], first):
                generator = torch.Generator(value.device).manual_seed(name_seed(self.seed, f"{name}/{number}"))
                part.normal_(0.0, 0.3 * info.shape[-1] ** -0.5, generator=generator)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


# The errors of a plan, and how large they may be.


class ErrorLimits(NamedTuple):
    """The largest relative errors: loss, gradient norm, any parameter's gradient, any parameter after the last step."""

    loss: float
    norm: float
    gradient: float
    weights: float


FP8 = "fp8 products"

TOLERANCES = {
    "fp32": ErrorLimits(1e-6, 1e-6, 5e-6, 1e-5),
    "tf32": ErrorLimits(1e-4, 2e-3, 3e-2, 2e-2),
    "fp16": ErrorLimits(1e-4, 2e-3, 3e-2, 2e-2),
    "bf16": ErrorLimits(2e-4, 1e-2, 5e-2, 3e-2),
    "int8": ErrorLimits(1e-3, 1.5e-2, 8e-2, 6e-2),
    FP8: ErrorLimits(2e-3, 5e-2, 0.3, 0.15),
    "int4": ErrorLimits(1e-2, 8e-2, 0.4, 0.3),
}
"""By the coarsest type in which forward, backward or reduction compute, or gradients are sent. Those of fp32 allow only
for sums in another order."""

SLACK = {"fp32": 10, "tf32": 3, "fp16": 3, "bf16": 3, "int8": 3, FP8: 3, "int4": 3}
"""A plan's error may also be so many times the error of one plain process in the same type, if that is the wider limit.

In fp32 the plain process starts with weights that differ in the last bit, and takes its sums in another order. Adam
turns the rounding error of a tiny gradient into a step in any direction, so that from the second step on `TOLERANCES`
alone would be too tight."""

PLAIN = {"fp16": (1e-4, 4e-3, 2e-2), "bf16": (5e-4, 2.5e-2, 0.15)}
"""The largest relative errors of one plain process in 16 bits in its first step, whose weights are those of the fp32
reference: loss, gradient norm, any parameter's gradient.

A fault of the model's own code is in the plain process too, and would widen the limits of every plan. These limits are
at least five times the largest errors of 108 models of all families on CPUs, of 1 to 12 layers and 256 to 8,192 tokens
(bf16: 9.7e-5, 4.2e-3 and 2.7e-2; fp16: 1.9e-5, 6.7e-4 and 3.9e-3). An embedding whose gradient was summed in 16 bits
was off by up to 0.6 (bf16) and 0.05 (fp16) at 8,192 tokens."""


def coarsest_tolerance(precision: PrecisionConfig, grad_comm: GradCommConfig | None = None) -> str:
    """The row of `TOLERANCES` for a plan's numeric types, and for the codecs of its gradients."""
    codecs = {hop.codec for hop in (grad_comm.inner, grad_comm.outer)} if grad_comm is not None else set()
    if float8_settings(precision):
        codecs.add(FP8)
    for kind in ("int4", FP8, "int8"):
        if kind in codecs:
            return kind
    if "bf16" in (precision.compute, precision.reduce):
        return "bf16"
    return "tf32" if precision.compute == "fp32" and precision.matmul == "high" else precision.compute


class StepErrors(NamedTuple):
    """The relative errors of a step. gradient: of the parameter `where`, whose error is the largest."""

    loss: float
    norm: float
    gradient: float
    where: str


@dataclass
class RunComparison:
    """The errors of each step. weights: the error after the last step of the parameter `where`, the largest."""

    steps: list[StepErrors]
    weights: float
    where: str


def compare_runs(seen: Trajectory, expected: Trajectory, kind: str = "fp32") -> RunComparison:
    """The errors of `seen`. kind: see `TOLERANCES`. Buffers of routers are compared in fp32 only: a token that goes to
    another expert can turn the sign by which a bias moves."""
    steps = [
        StepErrors(
            relative_error(loss, expected.losses[number]),
            relative_error(norm, expected.norms[number]),
            *largest_tensor_error(seen.gradients[number], expected.gradients[number]),
        )
        for number, (loss, norm) in enumerate(zip(seen.losses, seen.norms))
    ]
    skip = vanishing_gradients(expected)
    if kind != "fp32" and expected.gradients:
        skip |= expected.parameters.keys() - expected.gradients[0].keys()
    return RunComparison(steps, *largest_tensor_error(seen.parameters, expected.parameters, skip))


def largest_tensor_error(
    seen: dict[str, Tensor], expected: dict[str, Tensor], skip: Iterable[str] = ()
) -> tuple[float, str]:
    """The largest relative error of a tensor, and its name.

    Errors are relative to the tensor's norm, or to a hundredth of the global norm if that is larger."""
    norms = {name: value.norm(dtype=torch.float64) for name, value in expected.items()}
    floor = 1e-2 * torch.stack([*norms.values()]).norm()
    errors = {
        name: ((seen[name] - value).norm() / torch.maximum(norms[name], floor)).item() if name in seen else math.inf
        for name, value in expected.items()
        if name not in skip
    }
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[name], name


def vanishing_gradients(expected: Trajectory) -> set[str]:
    """Parameters whose gradient is zero but for rounding, so that Adam moves them in any direction.

    The bias of the keys is one, where attention does not depend on positions."""
    return {
        name
        for gradients, norm in zip(expected.gradients, expected.norms)
        for name, value in gradients.items()
        if value.norm() <= 1e-6 * norm
    }


def relative_error(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), sys.float_info.min)


def error_limits(kind: str, plain: RunComparison | None = None) -> list[ErrorLimits]:
    """The limits of each step in a numeric type; one element for all steps without `plain`.

    plain: the errors of one plain process in that type. A step's limits follow from the largest of its errors up to
    that step: the error of a loss or norm has a sign, and is small by chance in the step in which the sign changes.
    From the second step on, the loss in 16 bits may be off by as much as `PLAIN` grants: the optimizer has turned the
    rounding of gradients into other weights, at which the loss need not be off by less than a rounded forward is."""
    table = TOLERANCES[kind]
    if plain is None:
        return [table]
    found, largest = [], [0.0, 0.0, 0.0]
    for step in plain.steps:
        least = table._replace(loss=max(table.loss, PLAIN[kind][0])) if found and kind in PLAIN else table
        largest = [max(errors) for errors in zip(largest, step[:3])]
        errors = (*largest, plain.weights)
        found.append(ErrorLimits(*(max(limit, SLACK[kind] * error) for limit, error in zip(least, errors))))
    return found


def plain_problems(kind: str, plain: RunComparison | None) -> list[str]:
    """What is wrong with the plain process that stands for a numeric type of 16 bits; see `PLAIN`."""
    if plain is None or kind not in PLAIN or not plain.steps:
        return []
    (loss, norm, gradient), first = PLAIN[kind], plain.steps[0]
    prefix = f"one plain process in {kind} is wrong by itself, step 1: the"
    return [
        *describe_excess(f"{prefix} loss is off", first.loss, loss),
        *describe_excess(f"{prefix} gradient norm is off", first.norm, norm),
        *describe_excess(f"{prefix} gradient of {first.where} is off", first.gradient, gradient),
    ]


@dataclass
class PlanResult:
    """The outcome of a plan.

    description: the resolved plan, in short lines. kind: the key of its `TOLERANCES`. reasons: why it failed or was
    refused. overflows: how many steps the loss scaler skipped. differing: see `Trajectory`."""

    plan: str
    verdict: str
    reasons: list[str]
    description: list[str] = field(default_factory=list)
    kind: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    errors: RunComparison | None = None
    overflows: int = 0
    differing: float | None = None


def judge_plan(
    plan: str,
    description: list[str],
    kind: str,
    seen: Trajectory,
    expected: Trajectory,
    plain: RunComparison | None = None,
) -> PlanResult:
    """The verdict on a plan, from what was `seen` under it."""
    reasons = [*plain_problems(kind, plain), *seen.problems]
    different = [
        name
        for name, value in expected.initial.items()
        if name not in seen.initial or not torch.equal(seen.initial[name], value)
    ]
    if different:
        reasons.append(f"the initial weights differ in {', '.join(different[:5])}")
    errors, allowed = compare_runs(seen, expected, kind), error_limits(kind, plain)
    for number, step in enumerate(errors.steps):
        limit, prefix = allowed[min(number, len(allowed) - 1)], f"step {number + 1}: the"
        reasons += describe_excess(f"{prefix} loss is off", step.loss, limit.loss)
        reasons += describe_excess(f"{prefix} gradient norm is off", step.norm, limit.norm)
        reasons += describe_excess(f"{prefix} gradient of {step.where} is off", step.gradient, limit.gradient)
    reasons += describe_excess(f"after the last step {errors.where} is off", errors.weights, allowed[-1].weights)
    verdict = "FAIL" if reasons else "PASS"
    return PlanResult(
        plan, verdict, reasons, description, kind, seen.losses, seen.norms, errors, seen.overflows, seen.differing
    )


def describe_excess(text: str, error: float, limit: float) -> list[str]:
    """A reason to fail where the error is above the limit."""
    return [] if error <= limit else [f"{text} by {error:.1e}, the limit is {limit:.1e}"]


COLUMNS = {
    "plan": "left",
    "step": "right",
    "loss": "right",
    "norm": "right",
    "loss error": "right",
    "norm error": "right",
    "gradient error": "right",
    "worst in": "left",
    "weights error": "right",
    "verdict": "left",
}
COLOURS = {"PASS": "green", "FAIL": "bold red", "REFUSED": "yellow"}


def print_comparison(expected: Trajectory, results: Sequence[PlanResult], plain: dict[str, RunComparison]) -> None:
    """Prints one table with a row a step: the reference, the limits, the plans; then why plans did not pass."""
    console, frame = console_for(None)
    table = titled_table("parity with one process", frame)
    for name, side in COLUMNS.items():
        table.add_column(name, justify=side, overflow="fold")

    def add(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        for index in range(max(len(labels), len(rows))):
            table.add_row(*labels[index : index + 1] or [""], *rows[index] if index < len(rows) else [])
        table.add_section()

    add(
        ["reference: one process, fp32"],
        [
            [str(number), f"{loss:.6f}", f"{norm:.6f}"]
            for number, (loss, norm) in enumerate(zip(expected.losses, expected.norms), start=1)
        ],
    )
    for kind in dict.fromkeys(result.kind for result in results if result.kind):
        allowed = error_limits(kind, plain[kind])
        add(
            [f"limits for {kind}"],
            [
                [
                    str(number),
                    "",
                    "",
                    *(f"{limit:.1e}" for limit in step[:3]),
                    "",
                    f"{step.weights:.1e}" if step is allowed[-1] else "",
                ]
                for number, step in enumerate(allowed, start=1)
            ],
        )
    for result in results:
        verdict = f"[{COLOURS[result.verdict]}]{result.verdict}[/]"
        verdict += f", {result.overflows} overflows" * bool(result.overflows)
        if result.differing is not None:
            verdict += f", {result.differing:.2%} of tokens would have chosen other experts"
        steps = result.errors.steps if result.errors else []
        rows = [
            [str(number), f"{loss:.6f}", f"{norm:.6f}", *(f"{error:.1e}" for error in step[:3]), step.where]
            for number, (loss, norm, step) in enumerate(zip(result.losses, result.norms, steps), start=1)
        ]
        if result.errors:
            rows[-1] += [f"{result.errors.weights:.1e}", verdict]
        add(result.description or [result.plan], rows or [[""] * 8 + [verdict]])
    print_table(console, table)
    for result in results:
        if result.reasons:
            console.print(
                f"{result.verdict}: {result.plan}",
                *(f"  {reason}" for reason in result.reasons),
                sep="\n",
                markup=False,
                soft_wrap=True,
            )
    verdicts = [result.verdict for result in results]
    console.print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in COLOURS if verdict in verdicts))
