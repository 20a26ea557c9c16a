"""Speed of the training step of PEFT's adapters on a model of transformers, on random tokens and one device.

    python bench/peft_step.py model=FILE length=4096 micro=2 [adapters=fp32] [compile=false] [recompute=false] \
        [attention=sdpa] [warm=10] [steps=10]

The model is ours, as `trainer export` would write it, in bf16. Its file says rank, alpha and scale of the adapters,
which stand beside all linear layers. adapters: their type. fp32 is PEFT's default, and then forward runs under
autocast, as transformers' Trainer does with bf16=True; with bf16 there is none. AdamW is torch's fused one. Prints a
JSON line as bench/step.py does.

    python bench/peft_step.py follow=RUN_FOLDER

trains as a finished run with adapters did, by PEFT and transformers in fp32: from the same base, the same adapters, on
the same batches, with the same learning rates. Prints the loss of each step, a JSON line each."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from specs import read_spec
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import typed
from trainer.config.model import AdapterSpec
from trainer.data.batches import BatchLoader
from trainer.data.corpus import open_corpus
from trainer.hf.adapters import write_adapter
from trainer.hf.config import config_from_spec
from trainer.optim.optimizer import learning_rate
from trainer.planning.parameters import declare_parameters
from trainer.planning.resolve import resolve_layout
from trainer.training.run import starting_point

OWN = {
    "follow": "",
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


def follow(run: Path) -> None:
    """Trains the adapters of a run anew by PEFT, in fp32 on one CPU."""
    problems: typed.Problems = {}
    config = typed.build_typed(yaml.safe_load((run / "config.yaml").read_text()), problems)
    assert not problems and config.optimizer.name == "adamw" and not config.optimizer.weight_decay
    spec, weights, _ = starting_point(config)
    infos = declare_parameters(spec)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), spec, lambda name: weights(name, infos[name]), config.model.from_hf)
        base = AutoModelForCausalLM.from_pretrained(config.model.from_hf, dtype=torch.float32, trust_remote_code=False)
        model = PeftModel.from_pretrained(base, folder, is_trainable=True, trust_remote_code=False).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = config.optimizer.beta1, config.optimizer.beta2
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=betas, eps=config.optimizer.eps, weight_decay=0.0)
    batch, corpus = resolve_layout(config, 1, spec).batch, open_corpus(config)
    loader = BatchLoader(corpus.train, batch, 0, 1, seed=config.run.seed, mask_documents=config.data.mask_documents)
    for step, micro_batches in zip(range(config.run.steps), loader):
        total, valid = 0.0, sum(int((one.targets >= 0).sum()) for one in micro_batches)
        for one in micro_batches:
            logits = model(input_ids=one.tokens).logits.flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, one.targets.flatten(), reduction="sum") / valid
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(trained, config.optimizer.clip_norm)
        rate = learning_rate(config.lr, config.run.steps, torch.tensor(step)).item()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step + 1, "loss": total}), flush=True)
    loader.close()


def main() -> None:
    given = OWN | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := given.keys() - OWN.keys():
        raise SystemExit(f"no option {', '.join(sorted(unknown))}")
    if given["follow"]:
        follow(Path(given["follow"]))
        return
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
