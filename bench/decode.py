"""Tokens per second of generation, beside `transformers.generate` on the same exported model.

    python bench/decode.py OUT.jsonl [model=configs/model/tiny.yaml] [depth=2] [dtype=fp32] [device=cpu] \
        [batch=1,8] [prompt=32] [tokens=64] [repeat=3]

The model has random weights; both sides choose the most likely token, and the share of tokens in which they agree is
noted. The first round of each is not counted; then both take turns, and the fastest round of each counts."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from specs import read_spec

from trainer.config.model import ModelSpec
from trainer.generate.sampling import SamplingOptions, TokenGenerator
from trainer.generate.sharded_model import ShardedModel
from trainer.hf import export_model
from trainer.model.initial import initialize_model
from trainer.model.transformer import Transformer
from trainer.parallel.parallelize import keep_buffers
from trainer.precision.products import DTYPES

OWN = {
    "model": "configs/model/tiny.yaml",
    "depth": "",
    "dtype": "fp32",
    "device": "cuda" if torch.cuda.is_available() else "cpu",
    "batch": "1,8",
    "prompt": "32",
    "tokens": "64",
    "repeat": "3",
}


def main() -> None:
    out, given = sys.argv[1], OWN | dict(argument.split("=", 1) for argument in sys.argv[2:])
    spec = read_spec(given["model"])
    spec.depth, device, dtype = int(given["depth"] or spec.depth), torch.device(given["device"]), DTYPES[given["dtype"]]
    prompt, tokens, repeat = (int(given[name]) for name in ("prompt", "tokens", "repeat"))
    spec.init.std = 0.1  # the next token is far from a tie
    model = Transformer(spec)
    initialize_model(model, spec, 0, torch.device("cpu"))
    theirs = exported(spec, model).to(device, dtype)
    model.to(device, dtype)
    keep_buffers(model, device)
    ours = ShardedModel(spec, {0: model.eval()}, device, dtype)
    for batch in map(int, given["batch"].split(",")):
        contexts = torch.randint(0, spec.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(batch))

        def mine() -> list[list[int]]:
            generation = TokenGenerator(ours, contexts.tolist(), tokens, SamplingOptions())
            with ours.inference():
                for _ in generation:
                    pass
            return [found[prompt:] for found in generation.tokens]

        def other() -> list[list[int]]:
            same = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0)
            inputs = contexts.to(device)
            return theirs.generate(inputs, attention_mask=torch.ones_like(inputs), **same)[:, prompt:].tolist()

        (seconds, beside), (found, expected) = fastest((mine, other), repeat, device)
        agree = torch.tensor(found).eq(torch.tensor(expected)).double().mean().item()
        record = {
            **{name: given[name] for name in ("model", "depth", "dtype", "device", "prompt", "tokens")},
            "batch": batch,
            "tokens_per_second": batch * tokens / seconds,
            "transformers": batch * tokens / beside,
            "ratio": beside / seconds,
            "agree": agree,
        }
        print(json.dumps(record))
        with open(out, "a") as file:
            file.write(json.dumps(record) + "\n")


def exported(spec: ModelSpec, model: Transformer) -> torch.nn.Module:
    """The same model as transformers opens it."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        export_model(spec, dict(model.named_parameters()), folder, torch.float32)
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()


def fastest(
    sides: tuple[Callable[[], list[list[int]]], ...], repeat: int, device: torch.device
) -> tuple[list[float], list[list[list[int]]]]:
    """Seconds of the fastest round of each side, which take turns, and what it generated."""
    times, found = [[] for _ in sides], [side() for side in sides]
    for _ in range(repeat):
        for side, seconds in zip(sides, times):
            begun = time.perf_counter()
            side()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
    return [min(seconds) for seconds in times], found


if __name__ == "__main__":
    main()
