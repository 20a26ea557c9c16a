"""Steps that are replayed as one CUDA graph beside those that run as they come, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.reference import random_batch, settings, tiny_spec

import trainer
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.distributed.mesh import join_world
from trainer.distributed.tensors import local_values
from trainer.model.experts import multiplies_groups
from trainer.model.initial import Weights
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.features import check_whole_plan, resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.state import TrainState
from trainer.training.step import ControlFlag, train_step
from trainer.training.trainer import WARM, CUDAGraphStep

TINY = ["+config=debug", "run.steps=3", "lr.warmup=1", "checkpoint=never", "logging=quiet"]
STEPS = WARM + 4


@pytest.fixture
def process():
    joined = dist.is_initialized()
    yield
    if not joined and dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_replayed_steps_on_a_gpu_train_alike(process: None, compute: str, stage: int) -> None:
    """In fp16 the loss scale is so large that the first steps overflow, of those that are replayed as well."""
    device, spec = torch.device("cuda", 0), tiny_spec(vocab_size=1029, max_length=64)
    config = settings(precision__compute=compute, parallel__zero__stage=stage, optimizer__ema__decay=0.9)
    config.precision.loss_scale = 2.0**23
    plain = compare_replayed(config, spec, device)
    if compute == "fp16":
        assert {loss[3] for loss in plain[WARM:]} == {0, 1}, "of the replayed steps, not some overflow"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "falcon_h1"])
def test_replayed_steps_of_transformers_code_on_a_gpu_train_alike(process: None, name: str) -> None:
    """Windows and soft caps, experts, and a recurrence."""
    pytest.importorskip("transformers", minversion="5")
    from support.code_models import small_values

    from trainer.hf.accepted import code_spec, plain_values
    from trainer.hf.proof import drawn_weight

    device = torch.device("cuda", 0)
    if name == "gpt_oss" and not multiplies_groups(device):
        pytest.skip("the host waits for routers")
    spec = code_spec(plain_values(small_values(name, hidden_size=64, head_dim=16)))
    config = settings(precision__compute="bf16", run__cuda_graphs=True)
    compare_replayed(config, spec, device, drawn_weight)


def compare_replayed(
    config: Config, spec: ModelSpec, device: torch.device, weights: Weights | None = None
) -> list[list[float]]:
    """Asserts that replayed steps train as steps do that run as they come. Returns the numbers of each step."""
    plan = resolve_plan(config.parallel, 1, spec)
    assert not check_whole_plan(config, spec, plan, 1)
    pipeline = resolve_pipeline(config, spec, plan, BatchPlan(16, 4, 2, 2))
    world, found = join_world(plan, device), []
    for recorded in (False, True):
        state = TrainState.build(config, spec, plan, pipeline, world, weights)
        step = CUDAGraphStep(state) if recorded else partial(train_step, state)
        losses, asked = [], []
        for number in range(STEPS):
            batches = [random_batch(2 * number + part, 2, 16, spec.vocab_size, False, device) for part in range(2)]
            scalars = step(batches, ControlFlag.SAVE if number == STEPS - 2 else ControlFlag(0))
            losses.append([scalars[name].item() for name in ("loss", "grad_norm", "loss_scale", "found_inf", "lr")])
            asked.append(scalars["asked"].tolist())
        tensors = [*state.optimizer.parameters.values(), *state.optimizer.tensors().values()]
        found.append((losses, asked, state.step, [local_values(tensor).detach().clone() for tensor in tensors]))
        assert not recorded or step.graph is not None
    plain, replayed = found
    torch.testing.assert_close(replayed[0], plain[0], rtol=1e-5, atol=1e-7, equal_nan=True)
    assert replayed[1:3] == plain[1:3] and replayed[1][-2] != replayed[1][-1]
    torch.testing.assert_close(replayed[3], plain[3], rtol=1e-4, atol=1e-6)
    return plain[0]


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["parallel=zero1", "parallel.zero.engine=deepspeed"], "parallel.zero.engine=torch"),
        (["parallel=zero3_offload"], "parallel.zero.offload=false"),
        (["activation=full", "activation.offload=true"], "activation.offload=false"),
        (["logging.profile=5"], "logging.profile=0"),
        (["logging.trace=[3]"], "logging.trace=[]"),
    ],
)
def test_what_cannot_be_replayed_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        trainer.compose([*TINY, "run.cuda_graphs=true", *overrides], world_size=1)
    assert any("run.cuda_graphs=true" in text and words in text for text in refusal.value.problems), (
        refusal.value.problems
    )


def test_several_processes_and_cpus_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="run.cuda_graphs=true with 2 processes.*start 1, or run.cuda_graphs=false"):
        trainer.compose([*TINY, "run.cuda_graphs=true"], world_size=2)
    config = trainer.compose([*TINY, "run.cuda_graphs=true", "run.device=cpu", f"run.dir={tmp_path}"], world_size=1)
    with pytest.raises(ConfigError, match="runs on the CPU.*set run.cuda_graphs=false"):
        trainer.run(config)
