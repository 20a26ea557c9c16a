"""Speed of what many run today, on random tokens: a model of transformers under DeepSpeed's ZeRO-3, or under
accelerate's FSDP2 by transformers' Trainer.

    torchrun --nproc-per-node N bench/transformers_step.py model=configs/model/llama3_8b.yaml length=8192 micro=1 \
        [engine=deepspeed|fsdp2] [recompute=true] [compile=false] [attention=sdpa] [experts=grouped_mm] [warm=10] \
        [steps=10] [depth=]

The model is ours, as `trainer export` would write it, in bf16 with fp32 master weights; AdamW is fused, recompute that
of the engine: whole layers. compile: by torch.compile, FSDP2 only. experts: how transformers multiplies the experts of
a mixture (`eager` loops over them; without a value it takes its own default). Prints a JSON line as bench/step.py
does."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # which transformers imports with the model, and which cannot be imported under `zero.Init`
from specs import read_spec
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from trainer.hf.config import config_from_spec

OWN = {
    "model": "configs/model/tiny.yaml",
    "length": "256",
    "micro": "1",
    "engine": "deepspeed",
    "recompute": "true",
    "compile": "false",
    "attention": "sdpa",
    "experts": "",
    "warm": "10",
    "steps": "10",
    "depth": "",
}
GPUS = torch.cuda.is_available()
RATE = 1e-5


def time_deepspeed(make: Callable[[], Any], tokens: Tensor, count: int, recompute: bool, compiled: bool) -> list[float]:
    """The seconds of each step. make: the model. The settings are those of DeepSpeed's documentation of ZeRO-3, in fp32
    on CPUs."""
    import deepspeed

    if compiled:
        raise SystemExit("compile=true is for engine=fsdp2")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on CPUs, where compiling it takes minutes
    deepspeed.init_distributed("nccl" if GPUS else "gloo")
    options = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "train_batch_size": len(tokens) * int(os.environ["WORLD_SIZE"]),
        "bf16": {"enabled": GPUS},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": not GPUS}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    with deepspeed.zero.Init(config_dict_or_path=options):
        model = make()
    # Experts and routers are no `nn.Linear`, which fills its own, and transformers cannot fill parameters that
    # `zero.Init` has cut to shards.
    for parameter in model.parameters():
        if len(parameter.ds_shape) > 1:
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                parameter.normal_(std=0.02)
    if recompute:
        model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=model.parameters(), config=options)
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        assert loss.item() == loss.item()
        times.append(time.perf_counter() - begun)
    return times


class StepClock(TrainerCallback):
    """Notes when a step has ended and its loss was read."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_log(self, *arguments: Any, logs: dict[str, Any], **more: Any) -> None:
        if "loss" in logs:
            assert logs["loss"] == logs["loss"]
            self.ends.append(time.perf_counter())


def time_fsdp2(make: Callable[[], Any], tokens: Tensor, count: int, recompute: bool, compiled: bool) -> list[float]:
    """The seconds of each step but the first. make: the model."""
    from accelerate import PartialState
    from torch.distributed.fsdp import FSDPModule

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=len(tokens),
            max_steps=count + 1,
            learning_rate=RATE,
            bf16=GPUS,
            use_cpu=not GPUS,
            fsdp=True,  # type: ignore[arg-type]  # annotated for the command line
            fsdp_config={"version": 2, "reshard_after_forward": True, "activation_checkpointing": recompute},
            torch_compile=compiled,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        )
        if not GPUS:  # accelerate would leave out FSDP on CPUs, and asks for nothing else of GPUs
            PartialState().distributed_type = "MULTI_GPU"
        # Weights are made on the device: FSDP2 cuts them there, and drawing them on the host takes minutes.
        with arguments.device:
            model = make()
        rows = [{"input_ids": row, "labels": row} for row in tokens.cpu()] * (count + 1) * arguments.world_size
        clock = StepClock()
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[clock])
        trainer.train()
        assert any(isinstance(module, FSDPModule) for module in trainer.model_wrapped.modules())
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def main() -> None:
    given = OWN | dict(argument.split("=", 1) for argument in sys.argv[1:])
    spec = read_spec(given["model"])
    spec.depth = int(given["depth"] or spec.depth)
    length, micro, warm, steps = (int(given[name]) for name in ("length", "micro", "warm", "steps"))
    values = config_from_spec(spec)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    kinds = {"attn_implementation": given["attention"]}
    if given["experts"]:
        kinds["experts_implementation"] = given["experts"]

    def make() -> nn.Module:
        return AutoModelForCausalLM.from_config(config, **kinds)

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
    if GPUS:
        torch.cuda.set_device(device)
    tokens = torch.randint(spec.vocab_size, (micro, length), device=device)
    run = {"deepspeed": time_deepspeed, "fsdp2": time_fsdp2}[given["engine"]]
    times = run(make, tokens, warm + steps, given["recompute"] == "true", given["compile"] == "true")
    seconds = statistics.median(times[warm:])
    reserved = torch.cuda.max_memory_reserved() / 2**30 if GPUS else 0.0
    line = {"case": f"transformers_{given['engine']}", "seconds": round(seconds, 4), "reserved_gib": round(reserved, 2)}
    if os.environ["RANK"] == "0":
        print(json.dumps(line | {"tokens_per_second_per_gpu": round(micro * length / seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
