"""Blocks of the user's packages: what is planned of them is what they are, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.registries import forgotten, package

from trainer.config import ConfigError
from trainer.model.initial import initialize_model, parameter_infos
from trainer.model.transformer import Transformer
from trainer.parallel.parallelize import check_model
from trainer.parallel.pipeline.plan import layer_costs
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.features import check_plan
from trainer.planning.layer import flops_per_token, model_programs, parameter_counts
from trainer.planning.parameters import declare_parameters
from trainer.planning.recompute import SaveEntry, is_saved
from trainer.planning.resolve import compose, resolve_layout

AVERAGE = """
from dataclasses import dataclass
import torch
from trainer.model.layers import Block, Linear
from trainer.planning.parameters import join_tables, linear_table

@dataclass
class Settings:
    inner: int = option(24, "width of what is averaged", range="[1, inf)")

def parameters(settings, spec, width):
    modules = [("v", linear_table(width, settings.inner, ("mlp", "embed"), False))]
    return join_tables([*modules, ("o", linear_table(settings.inner, width, ("embed", "mlp"), False, residual=True))])

@register.attention("average", Settings, parameters=parameters, flops=lambda settings, spec, keys: 2 * settings.inner)
class Average(Block):
    def __init__(self, settings, spec, width):
        super().__init__()
        self.v = Linear(width, settings.inner, ("mlp", "embed"))
        self.o = Linear(settings.inner, width, ("embed", "mlp"), residual=True)

    def forward(self, x, shape, rotation, mask):
        v = self.v(x).view(*shape, -1)
        return self.o((v.cumsum(1) / torch.arange(1, shape[1] + 1)[:, None]).flatten(0, 1))

def one_matrix(settings, spec, width):
    return linear_table(width, width, ("mlp", "embed"), False)

@register.feed_forward("lying", parameters=one_matrix)
class Lying(Block):
    def __init__(self, settings, spec, width):
        super().__init__()
        self.up = Linear(width, width, ("mlp", "embed"))

def four_matrices(settings, spec, width):
    up, down = (linear_table(*shape, axes, False) for shape, axes in (
        ((width, spec.width), ("mlp", "embed")), ((spec.width, width), ("embed", "mlp"))
    ))
    return join_tables([("a", up), ("b", down), ("c", up), ("d", down)])

@register.feed_forward("twice", parameters=four_matrices, tensor_parallel=True)
class Twice(Block):
    def __init__(self, settings, spec, width):
        super().__init__()

@register.feed_forward("bare", parameters=lambda settings, spec, width: {})
class Bare(torch.nn.Module):
    def __init__(self, settings, spec, width):
        super().__init__()
"""
SMALL = ["imports=[average]", "model.width=32", "model.depth=3", "model.vocab_size=64", "data.tokenizer=bytes"]
SMALL += [
    "model.vocab_size=300",
    "model.attention.heads=4",
    "model.feed_forward.width=40",
    "model.attention.kind=average",
]
SMALL += ["model.overrides={0: {attention: {kind: softmax}}, 2: {attention: {settings: {average: {inner: 12}}}}}"]


@pytest.fixture(autouse=True)
def mine(tmp_path: Path) -> Iterator[None]:
    with forgotten(tmp_path):
        package(tmp_path, "average", AVERAGE)
        yield


def test_an_attention_block_is_planned_as_it_is():
    config = compose(SMALL, world_size=1)
    spec = config.model
    check_model(config, spec, torch.device("cpu"))
    model = Transformer(spec)
    assert declare_parameters(spec) == parameter_infos(model)
    shapes = [tuple(model.layers[str(index)].attention.v.weight.shape) for index in range(3)]
    assert shapes == [(16, 32), (24, 32), (12, 32)], "settings of a layer over those of all"
    assert parameter_counts(spec)["total"] == sum(parameter.numel() for parameter in model.parameters())
    matrices = parameter_counts(spec)["matmul"]
    softmax = 4 * 32 * (1 + 8) / 2
    assert flops_per_token(spec, 8, causal=True) == 3 * (2 * matrices + softmax + 2 * 24 + 2 * 12)
    assert all(work.saved > 0 for work in model_programs(spec, 8, 1, 2)) and layer_costs(spec, 8, 1, 1).f
    initialize_model(model, spec, 0, torch.device("cpu"))
    tokens = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    logits, changed = model(tokens), tokens.clone()
    changed[:, 5:] = 1
    torch.testing.assert_close(model(changed)[:, :5], logits[:, :5])
    logits.sum().backward()
    assert model.layers["1"].attention.v.weight.grad.abs().sum() > 0


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError) as error:
        compose([*SMALL, "parallel=tp2"], world_size=2)
    [problem] = error.value.problems
    assert "parallel.tp=2: the attention block 'average' (average.Average) does not say" in problem
    with pytest.raises(ConfigError, match="parallel.cp=2: the attention block 'average' .* of its own rank alone"):
        compose([*SMALL, "parallel.cp=2"], world_size=2)
    assert "tensor_parallel=True" in problem and not check_plan(compose(SMALL, world_size=1).parallel, 2)
    for kind, said in (("lying", "feed_forward.weight: a registered block declares None"), ("bare", "is no trainer")):
        config = compose([*SMALL, f"model.feed_forward.kind={kind}"], world_size=1)
        with pytest.raises(ConfigError, match=said):
            check_model(config, config.model, torch.device("cpu"))
    with pytest.raises(ConfigError, match="model.attention.settings.average: .* is not chosen"):
        compose([*SMALL[:-2], "model.attention.settings.average.inner=3"], world_size=1)


def test_the_operations_of_a_block_are_in_the_order_that_it_declares():
    """`activation.save=[matmul/2]` keeps every second of them."""
    config = compose([*SMALL, "model.feed_forward.kind=twice"], world_size=1)
    (program, *_) = model_programs(config.model, 64, 1, 2)
    assert [name for name in program.gemms if name.startswith("feed_forward")] == [
        f"feed_forward.{name}" for name in "abcd"
    ]
    entries = [SaveEntry("matmul", 2, None)]
    kept = [name for name in program.gemms if is_saved(program, name, entries)]
    assert kept == ["attention.k", "attention.o", "feed_forward.b", "feed_forward.d"]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("tile", [0, 16])
@pytest.mark.parametrize("kind", ["bare", "lying", "twice"])
def test_memory_of_blocks_of_any_shape_is_predicted(kind, tile, mode):
    """Of a block without matrices, with one that reads its input alone, and with several one after the other."""
    settings = [f"model.feed_forward.kind={kind}", f"activation.tile={tile}", f"activation.mode={mode}"]
    config = compose([*SMALL, *settings, "batch.sequence_length=64", "batch.micro_size=1"], world_size=1)
    (peak,) = find_peaks(config, resolve_layout(config, 1, config.model))
    assert peak.reserved > 0 and all(size >= 0 for size in peak.categories.values())
