"""Speed of the training step of PEFT's adapters on a model of transformers, on random tokens and one device.

    python bench/peft_step.py model=FILE length=4096 micro=2 [adapters=fp32] [compile=false] [recompute=false] \
        [attention=sdpa] [warm=10] [steps=10]

The model is ours, as `trainer export` would write it, in bf16. Its file says rank, alpha and scale of the adapters,
which stand beside all linear layers. adapters: their type. fp32 is PEFT's default, and then forward runs under
autocast, as transformers' Trainer does with bf16=True; with bf16 there is none. AdamW is torch's fused one. Prints a
JSON line as bench/step.py does."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from specs import read_spec
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config.model import AdapterSpec
from trainer.hf.config import config_from_spec

OWN = {
    "model": "",
    "length": "256",
    "micro": "1",
    "adapters": "fp32",
    "compile": "false",
    "recompute": "false",
    "attention": "sdpa",
    "warm": "10",
    "steps": "10",
}


def main() -> None:
    given = OWN | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := given.keys() - OWN.keys():
        raise SystemExit(f"no option {', '.join(sorted(unknown))}")
    spec = read_spec(given["model"])
    adapter, spec = spec.adapter, replace(spec, adapter=AdapterSpec())
    length, micro, warm, steps = (int(given[name]) for name in ("length", "micro", "warm", "steps"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = config_from_spec(spec)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=given["attention"])
    if given["recompute"] == "true":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    lora = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        use_rslora=adapter.scale == "root",
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    wide = given["adapters"] == "fp32"
    model = get_peft_model(model, lora, autocast_adapter_dtype=wide).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=device.type == "cuda")
    run = torch.compile(model) if given["compile"] == "true" else model
    tokens = torch.randint(spec.vocab_size, (micro, length), device=device)
    times = []
    for _ in range(warm + steps):
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=wide):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == loss.item()
        times.append(time.perf_counter() - begun)
    seconds = statistics.median(times[warm:])
    reserved = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    line = {"case": "peft", "seconds": round(seconds, 4), "reserved_gib": round(reserved, 2)}
    line |= {"trained": sum(parameter.numel() for parameter in trained)}
    print(json.dumps(line | {"tokens_per_second_per_gpu": round(micro * length / seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
