"""Steps that are replayed as one CUDA graph beside those that run as they come, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.reference import settings, tiny_spec
from support.steps import compare_steps

import trainer
from trainer.config import ConfigError
from trainer.model.experts import multiplies_groups
from trainer.training.trainer import WARM

TINY = ["+config=debug", "run.steps=3", "lr.warmup=1", "checkpoint=never", "logging=quiet"]


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
    plain = compare_steps(config, spec, device, 1)
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
    compare_steps(config, spec, device, 1, drawn_weight)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["parallel.pp=2", "batch.accumulation=2"], "parallel.pp=1"),
        (["model=tiny_experts", "parallel.ep=2"], "parallel.ep=1"),
        (["parallel=zero3", "parallel.zero.collectives=copy_engine"], "parallel.zero.collectives=nccl"),
        (["parallel.tp=2", "parallel.tp_overlap=copy_engine"], "parallel.tp_overlap=off"),
        (["parallel=zero1", "parallel.grad_comm.inner.codec=int8"], "parallel.grad_comm.inner.codec=none"),
        (["parallel=zero1", "parallel.zero.engine=deepspeed"], "parallel.zero.engine=torch"),
        (["parallel=zero3_offload"], "parallel.zero.offload=false"),
        (["activation=full", "activation.offload=true"], "activation.offload=false"),
        (["logging.profile=5"], "logging.profile=0"),
        (["logging.trace=[3]"], "logging.trace=[]"),
    ],
)
def test_what_cannot_be_replayed_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        trainer.compose([*TINY, "run.cuda_graphs=true", *overrides], world_size=2)
    assert any("run.cuda_graphs=true" in text and words in text for text in refusal.value.problems), (
        refusal.value.problems
    )


def test_cpus_are_refused(tmp_path) -> None:
    config = trainer.compose([*TINY, "run.cuda_graphs=true", "run.device=cpu", f"run.dir={tmp_path}"], world_size=1)
    with pytest.raises(ConfigError, match="runs on the CPU.*set run.cuda_graphs=false"):
        trainer.run(config)
