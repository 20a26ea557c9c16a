"""The Triton kernels that go over many tensors beside torch code of the same formulas, bit by bit: on a GPU, or in
Triton's interpreter with TRITON_INTERPRET=1, which rounds conversions to bf16 toward zero, so that those are left to
GPUs. On a GPU also the optimizer beside itself on the CPU.

    python tests/workers/multi_tensor.py cpu|cuda
"""

from __future__ import annotations

import copy
import itertools
import sys

import torch
from torch import Tensor, nn

from trainer.config import OptimizerConfig
from trainer.kernels import multi_tensor
from trainer.optim.optimizer import Optimizer, ParameterPolicy
from trainer.planning.parameters import MOMENTS

SHAPES = [(16,), (0,), (3, 5), (2048,), (64, 48), (2049,), (4, 1600), (1,), (9, 1001)]
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.1


def tensors(dtype: torch.dtype, shift: int, choose: torch.Generator, size: float = 1.0) -> list[Tensor]:
    """One of each shape, `shift` elements behind an aligned address."""
    made = []
    for shape in SHAPES:
        count = torch.Size(shape).numel()
        spread = 10.0 ** (-6 * torch.rand(count + shift, generator=choose))
        flat = (torch.randn(count + shift, generator=choose) * spread * size).to(dtype)
        made.append(flat[shift:].view(shape))
    return made


def moved(some: list[Tensor], shift: int, device: torch.device) -> list[Tensor]:
    """The same on the device, as far from an aligned address."""
    return [torch.cat([value.new_zeros(shift), value.flatten()]).to(device)[shift:].view(value.shape) for value in some]


def expected(kind: str, weight: Tensor, gradient: Tensor, moments: list[Tensor], scalars: Tensor) -> None:
    """The formulas of an update, each operation rounded to fp32."""
    _, rate, divisor, step, root = scalars
    w, g, m = weight.float(), gradient.float() / divisor, moments[0].float()
    first, second = (torch.tensor(1 - beta, dtype=torch.float32) for beta in BETAS)
    decay = torch.tensor(DECAY, dtype=torch.float32)
    if kind == "adamw":
        v = moments[1].float()
        m, v = m + (g - m) * first, v + (g * g - v) * second
        w = w - w * (rate * decay)
        w = w - m / (v.double().sqrt().float() / root + EPSILON) * step  # torch's own root may be off in the last bit
        moments[1].copy_(v)
    elif kind == "lion":
        w = w - (torch.sign(m + (g - m) * first) + w * decay) * rate
        m = m + (g - m) * second
    else:
        m = m * BETAS[0] + g
        w = w - (m + w * decay) * rate
    weight.copy_(w)
    moments[0].copy_(m)


def updates_differ(
    kind: str, weight: torch.dtype, gradient: torch.dtype, state: torch.dtype, shift: int, device: torch.device
) -> list[str]:
    """What differs over four steps, of which the third is skipped."""
    choose, wrong = torch.Generator().manual_seed(1), []
    weights = tensors(weight, shift, choose)
    moments = [[torch.zeros(w.shape, dtype=state) for w in weights] for _ in range(2 if kind == "adamw" else 1)]
    there = [moved(weights, shift, device), *(moved(some, shift, device) for some in moments)]
    for number in range(1, 5):
        gradients = tensors(gradient, shift, choose, size=8.0)
        broken = number == 3
        if broken:
            gradients[0][0] = float("nan")
        scalars = multi_tensor.update_scalars(
            *(torch.tensor(value) for value in (1e-2 / number, 8.3, float(broken), number)), BETAS
        )
        multi_tensor.update_parameters(
            kind, there[0], moved(gradients, shift, device), there[1:], scalars.to(device), BETAS, EPSILON, DECAY
        )
        for place, w in enumerate(weights):
            if not broken:
                expected(kind, w, gradients[place], [some[place] for some in moments], scalars)
        for what, mine, other in zip(("weights", "first", "second"), [weights, *moments], there):
            wrong += [
                f"{kind}, {weight}, {gradient}, {state}, shift {shift}, step {number}: {what} of {a.shape}, off by "
                f"{(a.float() - b.cpu().float()).abs().max()}"
                for a, b in zip(mine, other)
                if not torch.equal(a, b.cpu())
            ]
    return wrong


def norms_differ(dtype: torch.dtype, shift: int, device: torch.device) -> list[str]:
    """Sums of whole numbers are exact in any order; others have an error, but the same bits again."""
    choose = torch.Generator().manual_seed(2)
    whole = [torch.randint(-9, 9, value.shape, generator=choose).to(dtype) for value in tensors(dtype, shift, choose)]
    others = tensors(dtype, shift, choose)
    others[3][5], others[6][0, 1] = float("inf"), float("nan")
    results = []
    for some in (whole, others, others):
        results.append(multi_tensor.squared_norms(moved(some, shift, device)).cpu())
    exact, near = (torch.stack([value.double().square().sum() for value in some]) for some in (whole, others))
    told = f"squared norms, {dtype}, shift {shift}"
    wrong = [f"{told}: {results[0]} in place of {exact}"] * (not torch.equal(exact, results[0]))
    wrong += [f"{told}: {results[1]} in place of {near}"] * (
        not torch.allclose(near, results[1], rtol=1e-14, atol=0, equal_nan=True)
    )
    return wrong + [f"{told}: other bits the second time"] * (
        not torch.equal(results[1].nan_to_num(), results[2].nan_to_num())
    )


def sums_differ(dtype: torch.dtype, shift: int, device: torch.device) -> list[str]:
    """Gradients in fewer bits that are added to sums in fp32."""
    choose, wrong = torch.Generator().manual_seed(4), []
    totals, gradients = tensors(torch.float32, shift, choose), tensors(dtype, shift, choose)
    there = moved(totals, shift, device), moved(gradients, shift, device)
    for total, gradient, sum_there, gradient_there in zip(totals, gradients, *there):
        if total.numel():
            multi_tensor.add_in_place(sum_there, gradient_there)
        if not torch.equal(total + gradient, sum_there.cpu()):
            wrong.append(f"sums, {dtype}, shift {shift}, {total.shape}")
    return wrong


def optimizers_differ(kind: str, state: torch.dtype) -> list[str]:
    """The optimizer on a GPU beside the one on a CPU, over several steps: rounding apart, the same numbers."""
    choose = torch.Generator().manual_seed(3)
    names = [f"p{place}" for place in range(len(SHAPES))]
    here = dict(zip(names, (nn.Parameter(value) for value in tensors(torch.float32, 0, choose))))
    there = {name: nn.Parameter(parameter.detach().cuda()) for name, parameter in here.items()}
    policies = {name: ParameterPolicy(kind, state, place % 2 * 0.1, 1.0) for place, name in enumerate(names)}
    both = [Optimizer(parameters, copy.copy(policies), OptimizerConfig()) for parameters in (here, there)]
    for number in range(5):
        gradients = tensors(torch.float32, 0, choose, size=4.0)
        for parameters, optimizer in zip((here, there), both):
            device = optimizer.updates.device
            for parameter, gradient in zip(parameters.values(), gradients):
                parameter.grad = gradient.to(device, copy=True)
            optimizer.step(*(torch.tensor(value, device=device) for value in (1e-3, 4.0, float(number == 2))))
    kinds = {"weights": [here, there]}
    for moment in MOMENTS[kind]:
        kinds[moment] = [{name: optimizer.state[name, moment] for name in names} for optimizer in both]
    wrong = []
    for what, (mine, theirs) in kinds.items():
        a, b = (torch.cat([some[name].detach().float().cpu().flatten() for name in names]) for some in (mine, theirs))
        error = ((a - b).abs().max() / a.abs().max()).item()
        tolerance = 1e-6 if state is torch.float32 else 1e-5 if what == "weights" else 1e-2
        wrong += [f"{kind}, {state}: {what} off by {error:.1e} of the largest"] * (not error <= tolerance)
    return wrong + [f"{kind}, {state}: updates"] * (not both[0].updates == both[1].updates.cpu() == 4)


def main(device: torch.device) -> int:
    real = device.type == "cuda"
    narrow = (torch.float32, torch.bfloat16 if real else torch.float16)
    wrong, count = [], 0
    combinations = list(itertools.product(("adamw", "lion", "sgd"), narrow, narrow, (0, 1)))
    for kind, state, gradient, shift in combinations if real else combinations[::5]:  # the interpreter is slow
        wrong += updates_differ(kind, torch.float32, gradient, state, shift, device)
        count += 1
    for dtype, shift in itertools.product((torch.float32, torch.float16, torch.bfloat16), (0, 3)):
        wrong += norms_differ(dtype, shift, device)
        count += 1
    for dtype, shift in itertools.product((torch.float16, torch.bfloat16), (0, 3)):
        wrong += sums_differ(dtype, shift, device)
        count += 1
    for kind, state in itertools.product(("adamw", "lion", "sgd"), narrow) if real else ():
        wrong += optimizers_differ(kind, state)
        count += 1
    print(*wrong[:40], f"{count} cases, {len(wrong)} differences", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main(torch.device(sys.argv[1])))
