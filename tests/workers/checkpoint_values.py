"""The tensors that checkpoint tests save: odd sizes, fewer rows than ranks, every kind of element."""

import torch
from torch import nn

FSDP_NAMES = ("linear.weight", "linear.bias")


def expected() -> dict[str, torch.Tensor]:
    """Values by name, the same in every process."""
    generator = torch.Generator().manual_seed(5)
    return {
        "matrix": torch.randn(13, 50, generator=generator),
        "short": torch.randn(2, 3, generator=generator),
        "vector": torch.randn(7, generator=generator),
        "half": torch.randn(6, 4, generator=generator).bfloat16(),
        "counts": torch.randint(2**40, (5,), generator=generator),
        "step": torch.tensor(17.0),
        "nothing": torch.empty(0, 4),
        "linear.weight": torch.randn(5, 9, generator=generator),
        "linear.bias": torch.randn(5, generator=generator),
        **{f"layers.{i}": torch.randn(31, 64, generator=generator) for i in range(8)},
    }


def linear(values: dict[str, torch.Tensor]) -> nn.Linear:
    """A module that holds the values of FSDP_NAMES."""
    module = nn.Linear(9, 5)
    module.load_state_dict({name.removeprefix("linear."): values[name] for name in FSDP_NAMES})
    return module
