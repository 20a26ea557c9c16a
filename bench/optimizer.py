"""The optimizer's part of a step alone: gradient norm, clipping, AdamW, and the copies into FSDP's all-gathers.

    python bench/optimizer.py [OUT.jsonl] [shards=2] [depth=32] [tiles]
    torchrun --nproc-per-node 2 bench/optimizer.py OUT.jsonl

On the shapes that one of `shards` ranks (of all, under torchrun) holds of Llama-3 8B, in fp32, 16 bytes an element.
Each line says milliseconds (median of 12), bytes an element that have to move, GB/s, and the ratio to a copy. `fused`
is torch's fused AdamW with `grad_scale`, which writes gradients back; `clipped` is torch's norm, a pass that clips, and
the fused AdamW without scale; `ours` is the project's. First it compares the three with fp64 on small tensors. `tiles`
tries sizes of tiles."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from elapsed import elapsed
from specs import read_spec
from torch import Tensor, nn

from trainer.config import OptimizerConfig
from trainer.kernels import multi_tensor
from trainer.optim.groups import Policy
from trainer.optim.optimizer import Optimizer
from trainer.planning.cost.parameters import declarations

CONFIG = OptimizerConfig()
CLIP, RATE, SCALE = 1.0, 3e-4, 8.0


class Case:
    """Parameters of one rank with moments, and gradients as FSDP leaves them: views of one buffer for each unit."""

    def __init__(self, units: list[list[tuple[int, ...]]], device: torch.device, dtype: torch.dtype = torch.float32):
        choose = torch.Generator(device).manual_seed(0)
        self.flat = [
            torch.randn(sum(map(math.prod, unit)), device=device, dtype=dtype, generator=choose).mul_(SCALE * 1e-3)
            for unit in units
        ]
        self.gradients = [
            part.view(shape)
            for flat, unit in zip(self.flat, units)
            for part, shape in zip(flat.split([math.prod(shape) for shape in unit]), unit)
        ]
        self.weights = [
            torch.randn(g.shape, device=device, dtype=dtype, generator=choose).mul_(0.02) for g in self.gradients
        ]
        names = [f"p{index}" for index in range(len(self.weights))]
        parameters = {name: nn.Parameter(weight) for name, weight in zip(names, self.weights)}
        for parameter, gradient in zip(parameters.values(), self.gradients):
            parameter.grad = gradient
        decayed = {
            name: Policy("adamw", dtype, CONFIG.weight_decay if weight.dim() > 1 else 0.0, 1.0)
            for name, weight in zip(names, self.weights)
        }
        self.optimizer = Optimizer(parameters, decayed, CONFIG)
        self.rate = torch.tensor(RATE, device=device)
        self.scale = torch.tensor(SCALE, device=device, dtype=torch.float64)
        self.found_inf = torch.zeros((), device=device)

    def moments(self, name: str) -> list[Tensor]:
        return [value for (_, moment), value in self.optimizer.state.items() if moment == name]

    def divisor(self, squares: Tensor) -> Tensor:
        """Loss scale over clip coefficient."""
        norm = squares.sum().sqrt() / self.scale
        return self.scale / (CLIP / (norm + 1e-6)).clamp(max=1.0)

    def torch_squares(self) -> Tensor:
        return torch.stack(torch._foreach_norm(self.gradients, 2, torch.float64)).square()

    def torch_update(self, divisor: Tensor | None) -> None:
        for policy, names in self.optimizer.groups.items():
            places = [int(name[1:]) for name in names]
            torch._fused_adamw_(
                [self.weights[place] for place in places],
                [self.gradients[place] for place in places],
                *([self.optimizer.state[name, moment] for name in names] for moment in ("exp_avg", "exp_avg_sq")),
                [],
                [self.optimizer.updates + 1] * len(names),
                lr=self.rate,
                beta1=CONFIG.beta1,
                beta2=CONFIG.beta2,
                weight_decay=policy.weight_decay,
                eps=CONFIG.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None if divisor is None else divisor.float(),
                found_inf=self.found_inf,
            )
        self.optimizer.updates += 1 - self.found_inf

    def fused(self) -> None:
        self.torch_update(self.divisor(self.torch_squares()))

    def clipped(self) -> None:
        torch._foreach_div_(self.gradients, self.divisor(self.torch_squares()).float())
        self.torch_update(None)

    def ours(self) -> None:
        divisor = self.divisor(multi_tensor.squared_norms(self.gradients))
        self.optimizer.step(self.rate, divisor.float(), self.found_inf)

    def exact(self, steps: int) -> list[Tensor]:
        """Weights after so many steps with the same gradients, in fp64."""
        weights, gradients = [w.double() for w in self.weights], [g.double() for g in self.gradients]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt() / SCALE
        divisor = SCALE / min(1.0, CLIP / (norm.item() + 1e-6))
        gradients = [g / divisor for g in gradients]
        first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        for step, (w, g, m, v) in itertools.product(range(1, steps + 1), zip(weights, gradients, first, second)):
            m.lerp_(g, 1 - CONFIG.beta1)
            v.lerp_(g * g, 1 - CONFIG.beta2)
            root = v.sqrt() / math.sqrt(1 - CONFIG.beta2**step)
            w.mul_(1 - RATE * (CONFIG.weight_decay if w.dim() > 1 else 0.0))
            w.sub_(m / (root + CONFIG.eps) * RATE / (1 - CONFIG.beta1**step))
        return weights


def gathers(case: Case, units: list[list[tuple[int, ...]]]) -> dict[str, Callable[[], None]]:
    """What FSDP copies before the all-gathers of a step's forward or backward pass: two passes as it does, and one."""
    device, largest = case.rate.device, max(flat.numel() for flat in case.flat)
    cast, out = (torch.empty(largest, dtype=torch.bfloat16, device=device) for _ in range(2))
    weights = iter(case.weights)
    inputs = [[next(weights).flatten() for _ in unit] for unit in units]

    def parts(flat: Tensor, some: list[Tensor]) -> list[Tensor]:
        sizes = [value.numel() for value in some]
        return list(flat[: sum(sizes)].split(sizes))

    def two() -> None:
        for some in inputs:
            torch._foreach_copy_(parts(cast, some), some)
            torch._foreach_copy_(parts(out, some), parts(cast, some))

    def one() -> None:
        for some in inputs:
            torch._foreach_copy_(parts(out, some), some)

    return {"two": two, "one": one}


def milliseconds(work: Callable[[], object], repeats: int = 12) -> float:
    """Median time on the device, of the slowest rank."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        times.append(elapsed(work))
    median = torch.tensor(sorted(times[3:])[repeats // 2], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


def copy_speed(device: torch.device) -> float:
    """Bytes read and written in a second by one large copy, in GB/s."""
    source, target = (torch.empty(2**30, dtype=torch.float32, device=device) for _ in range(2))
    return 8 * 2**30 / milliseconds(lambda: target.copy_(source)) / 1e6


def errors(device: torch.device) -> dict[str, float]:
    """Largest error of an update's sum over five steps, relative to what it moves, beside fp64."""
    units = [[(64, 96), (96,), (33, 7), (1, 5)], [(128, 257), (128,)]]
    found = {}
    for name in ("fused", "clipped", "ours"):
        case = Case(units, device)
        before, gradients = [w.clone() for w in case.weights], [g.clone() for g in case.gradients]
        exact = case.exact(5)
        for _ in range(5):
            torch._foreach_copy_(case.gradients, gradients)
            getattr(case, name)()
        found[name] = max(
            ((w.double() - e).abs().max() / (e - b.double()).abs().max()).item()
            for w, e, b in zip(case.weights, exact, before)
        )
    squares, exact = multi_tensor.squared_norms(gradients), torch.stack([g.double().square().sum() for g in gradients])
    found["norm"] = ((squares - exact).abs() / exact).max().item()
    return found


def shapes(depth: int, shards: int) -> list[list[tuple[int, ...]]]:
    """What a rank holds of each parameter, by FSDP's units: the layers, then the rest."""
    spec = read_spec("configs/model/llama3_8b.yaml")
    spec.depth = depth
    units: dict[str, list[tuple[int, ...]]] = {}
    for name, info in declarations(spec).items():
        unit = name.split(".")[1] if name.startswith("layers.") else "model"
        units.setdefault(unit, []).append((-(-info.shape[0] // shards), *info.shape[1:]))
    return list(units.values())


def main(arguments: list[str]) -> None:
    settings = {"shards": "2", "depth": "32"} | dict(a.split("=") for a in arguments if "=" in a)
    path = next((a for a in arguments if "=" not in a and a != "tiles"), "")
    device, shards = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), int(settings["shards"])
    torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl", device_id=device)
        shards = dist.get_world_size()
    file = open(path, "a") if path and int(os.environ.get("RANK", 0)) == 0 else None

    def say(**values: Any) -> None:
        if int(os.environ.get("RANK", 0)) == 0:
            text = json.dumps(values)
            print(text, flush=True)
            print(text, file=file, flush=True) if file else None

    with torch.no_grad():
        found = errors(device)
        say(errors={name: f"{error:.1e}" for name, error in found.items()})
        assert found["ours"] <= max(2 * found["fused"], 5e-5) and found["norm"] < 1e-13, found
        units = shapes(int(settings["depth"]), shards)
        case = Case(units, device)
        elements = sum(flat.numel() for flat in case.flat)
        ceiling = copy_speed(device)
        say(elements=elements, tensors=len(case.weights), copy_gb_s=round(ceiling), device=torch.cuda.get_device_name())

        def line(name: str, per_element: int, work: Callable[[], object]) -> None:
            taken = milliseconds(work)
            speed = elements * per_element / taken / 1e6
            say(what=name, ms=round(taken, 2), bytes=per_element, gb_s=round(speed), of_copy=round(speed / ceiling, 3))

        divisor = case.divisor(case.torch_squares())
        line("norm, torch", 4, case.torch_squares)
        line("norm, ours", 4, lambda: multi_tensor.squared_norms(case.gradients))
        line("update, torch with grad_scale", 32, lambda: case.torch_update(divisor))
        line("update, torch without", 28, lambda: case.torch_update(None))
        line("update, ours", 28, lambda: case.optimizer.step(case.rate, divisor.float(), case.found_inf))
        line("step, fused", 36, case.fused)
        line("step, clipped", 40, case.clipped)
        line("step, ours", 32, case.ours)
        line("gather copies, two passes", 10, gathers(case, units)["two"])
        line("gather copies, one pass", 6, gathers(case, units)["one"])
        for tile, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8)) if "tiles" in arguments else ():
            multi_tensor.UPDATE |= {"TILE": tile, "num_warps": warps}
            line(
                f"update, tile {tile}, warps {warps}",
                28,
                lambda: case.optimizer.step(case.rate, divisor.float(), case.found_inf),
            )
            multi_tensor.NORM |= {"TILE": 2 * tile, "num_warps": warps}
            line(f"norm, tile {2 * tile}, warps {warps}", 4, lambda: multi_tensor.squared_norms(case.gradients))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
