"""The grouped GEMM of experts on a device: its kernel against products in fp64, more than 2**31 elements, and whether
the host waits in a layer.

    grouped.py DEVICE
"""

from __future__ import annotations

import sys
from itertools import accumulate

import torch

from trainer.config.model import ExpertsSpec, FeedForwardSpec
from trainer.model.experts import grouped_weight_gradient, multiply_grouped
from trainer.model.layers import Mixture


def compare(counts: list[int], inputs: int, outputs: int, device: torch.device) -> float:
    """The largest relative error of the product and both gradients in bf16, over experts that have rows."""
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, device=device)
    make = torch.Generator(device).manual_seed(sum(counts))
    x, gradient = (
        torch.randn(sum(counts), width, generator=make, device=device, dtype=torch.bfloat16)
        for width in (inputs, outputs)
    )
    weight = torch.randn(len(counts), outputs, inputs, generator=make, device=device, dtype=torch.bfloat16)
    found = multiply_grouped(x, weight.transpose(1, 2), ends), multiply_grouped(gradient, weight, ends)
    to_weight = grouped_weight_gradient(gradient, x, ends)
    errors = [0.0]
    rows = zip(
        x.split(counts), gradient.split(counts), weight, found[0].split(counts), found[1].split(counts), to_weight
    )
    for a, g, w, y, to_a, to_w in rows:
        if not len(a):
            errors.append(float(to_w.abs().max()))
            continue
        a, g, w = a.double(), g.double(), w.double()
        for one, other in ((y, a @ w.t()), (to_a, g @ w), (to_w, g.t() @ a)):
            errors.append(float((one.double() - other).norm() / other.norm()))
    return max(errors)


def reach_far(device: torch.device) -> float:
    """The same for the last rows of a product whose input has more than 2**31 elements."""
    width, last = 4096, 64
    total = 2**31 // width + 4096
    x = torch.zeros(total, width, dtype=torch.bfloat16, device=device)
    x[-last:] = torch.randn(last, width, device=device)
    weight = torch.randn(2, 128, width, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([total - last, total], dtype=torch.int32, device=device)
    y = multiply_grouped(x, weight.transpose(1, 2), ends)
    expected = x[-last:].double() @ weight[1].double().t()
    return float((y[-last:].double() - expected).norm() / expected.norm()) + float(y[:-last].abs().max())


def host_waits(device: torch.device) -> bool:
    """Whether the host waits for the device in a forward and a backward pass of a layer in bf16."""
    block = Mixture(FeedForwardSpec(width=64, experts=ExpertsSpec(count=8)), 64).to(device, torch.bfloat16).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    block(x).sum().backward()  # whatever is set up once
    torch.cuda.set_sync_debug_mode("error")
    try:
        block(x).sum().backward()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def main(name: str) -> None:
    device = torch.device(name)
    for counts in ([5, 0, 11], [0, 0, 300], [300, 0, 0], [1] * 64, [0] * 3 + [2048] + [0] * 4, [17] * 33):
        error = compare(counts, 128, 256, device)
        assert error < 6e-3, (counts, error)
    if device.type == "cuda":
        error = reach_far(device)
        assert error < 6e-3, error
        assert not host_waits(device)
    print("the grouped GEMM is right")


if __name__ == "__main__":
    main(*sys.argv[1:])
