"""Speed of what many run today: a model of transformers under DeepSpeed's ZeRO-3, on random tokens.

    torchrun --nproc-per-node N bench/transformers_zero3.py model=configs/model/llama3_8b.yaml length=8192 micro=1 \
        [recompute=true] [attention=sdpa] [experts=grouped_mm] [warm=10] [steps=10] [depth=]

The model is ours, as `trainer export` would write it, in bf16 with fp32 master weights; AdamW is DeepSpeed's fused one,
recompute that of transformers: whole layers. experts: how transformers multiplies the experts of a mixture (`eager`
loops over them; without a value it takes its own default). Prints a JSON line as bench/step.py does."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import deepspeed
import torch
import torch._dynamo  # which transformers imports with the model, and which cannot be imported under `zero.Init`
from specs import read_spec
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.hf.config import config_from_spec

OWN = {
    "model": "configs/model/tiny.yaml",
    "length": "256",
    "micro": "1",
    "recompute": "true",
    "attention": "sdpa",
    "experts": "",
    "warm": "10",
    "steps": "10",
    "depth": "",
}


def settings(micro: int, ranks: int) -> dict:
    """DeepSpeed's, as its documentation of ZeRO-3 gives them; in fp32 on CPUs."""
    return {
        "train_micro_batch_size_per_gpu": micro,
        "train_batch_size": micro * ranks,
        "bf16": {"enabled": torch.cuda.is_available()},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": not torch.cuda.is_available()}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }


def fill_matrices(model: torch.nn.Module) -> None:
    """Draws random matrices. Experts and routers are no `torch.nn.Linear`, which fills its own, and transformers cannot
    fill parameters that `zero.Init` has cut to shards."""
    for parameter in model.parameters():
        if len(parameter.ds_shape) > 1:
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                parameter.normal_(std=0.02)


def main() -> None:
    given = OWN | dict(argument.split("=", 1) for argument in sys.argv[1:])
    spec = read_spec(given["model"])
    spec.depth = int(given["depth"] or spec.depth)
    length, micro, warm, steps = (int(given[name]) for name in ("length", "micro", "warm", "steps"))
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    values, options = config_from_spec(spec), settings(micro, ranks)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    kinds = {"attn_implementation": given["attention"]}
    if given["experts"]:
        kinds["experts_implementation"] = given["experts"]
    with deepspeed.zero.Init(config_dict_or_path=options):
        model = AutoModelForCausalLM.from_config(config, **kinds)
    fill_matrices(model)
    if given["recompute"] == "true":
        model.gradient_checkpointing_enable()
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
    tokens = torch.randint(spec.vocab_size, (micro, length), device=device)
    times = []
    for _ in range(warm + steps):
        begun = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        assert loss.item() == loss.item()
        times.append(time.perf_counter() - begun)
    seconds = statistics.median(times[warm:])
    reserved = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    line = {"case": "transformers", "seconds": round(seconds, 4), "reserved_gib": round(reserved, 2)}
    if rank == 0:
        print(json.dumps(line | {"tokens_per_second_per_gpu": round(micro * length / seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
