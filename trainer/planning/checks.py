"""What no single setting can know: ranges, and settings that contradict each other.

Pure: needs neither torch nor a process group, so that every refusal comes before either exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from trainer.config import Config
from trainer.planning.deepspeed import check_settings

RANGES = {  # as in mathematics: [ includes its bound, ( does not
    "run.steps": "[1, inf)",
    "run.seed": "[0, inf)",
    "data.vocab_size": "[1, inf)",
    "data.eval_fraction": "[0, 1)",
    "data.workers": "[0, inf)",
    "data.prefetch": "[0, inf)",
    "precision.loss_scale": "(0, inf)",
    "precision.scale_growth": "(1, inf)",
    "precision.scale_backoff": "(0, 1)",
    "precision.growth_interval": "[1, inf)",
    "activation.every": "[1, inf)",
    "activation.budget": "[0, 1]",
    "loss.z_loss": "[0, inf)",
    "loss.chunk": "[0, inf)",
    "optimizer.beta1": "[0, 1)",
    "optimizer.beta2": "[0, 1)",
    "optimizer.eps": "(0, inf)",
    "optimizer.weight_decay": "[0, inf)",
    "optimizer.clip_norm": "[0, inf)",
    "lr.peak": "(0, inf)",
    "lr.warmup": "[0, inf)",
    "lr.final": "[0, 1]",
    "lr.decay": "[0, inf)",
    "checkpoint.every": "[0, inf)",
    "checkpoint.keep_last": "[0, inf)",
    "checkpoint.keep_every": "[0, inf)",
    "eval.every": "[0, inf)",
    "eval.sequences": "[1, inf)",
    "parallel.pipeline.probe_steps": "[1, inf)",
    "parallel.grad_comm.min_size": "[0, inf)",
    "guard.max_skipped": "[1, inf)",
    "guard.stall_factor": "[0, inf)",
    "guard.stall_seconds": "(0, inf)",
    "guard.stall_allowance": "(0, inf)",
    "guard.straggler_factor": "(1, inf)",
    "guard.straggler_lines": "[1, inf)",
    "logging.every": "[1, inf)",
}


def check(config: Config) -> list[str]:
    """Everything that is wrong with a typed configuration on any number of processes, one sentence each."""
    ranges = [outside(path, attrgetter(path)(config), interval) for path, interval in RANGES.items()]
    model = [] if config.model.from_hf else config.model.check()
    return [*filter(None, ranges), *model, *_contradictions(config), *check_settings(config)]


def outside(path: str, value: float, interval: str) -> str | None:
    """What is wrong with a value outside an interval such as `[0, 1)`; NaN lies in none."""
    low, high = map(float, interval[1:-1].split(","))
    if (low < value or interval[0] == "[" and value == low) and (value < high or interval[-1] == "]" and value == high):
        return None
    bound = "at least" if interval[0] == "[" else "above"
    words = f"lie in {interval}" if high < float("inf") else f"be {bound} {low:g}"
    return f"{path}={value} must {words}"


def _contradictions(config: Config) -> Iterator[str]:
    run, model, data, lr = config.run, config.model, config.data, config.lr
    if run.steps > 0 and lr.warmup >= run.steps:
        yield f"lr.warmup={lr.warmup} must be below run.steps={run.steps}"
    elif lr.schedule == "wsd" and lr.warmup + (lr.decay or run.steps // 5) > run.steps:
        decay = f"lr.decay={lr.decay}" if lr.decay else f"lr.decay={run.steps // 5} (a fifth of the run)"
        yield (
            f"lr.warmup={lr.warmup} + {decay} exceeds run.steps={run.steps}; "
            f"set lr.decay={run.steps - lr.warmup} or less"
        )
    if model.learned_positions and not model.from_hf and config.batch.sequence_length > model.max_length:
        yield (
            f"batch.sequence_length={config.batch.sequence_length} exceeds the learned positions of "
            f"model.max_length={model.max_length}"
        )
    tokens = {"bpe": data.vocab_size, "bytes": 257}.get(data.tokenizer, 0)
    tokenised = any(source.kind != "tokens" for source in data.sources.values())
    if tokenised and not model.from_hf and model.vocab_size < tokens:
        size = (
            f"data.vocab_size={tokens}" if data.tokenizer == "bpe" else f"the {tokens} tokens of data.tokenizer=bytes"
        )
        other = f" or data.vocab_size={model.vocab_size}" if data.tokenizer == "bpe" else ""
        yield f"model.vocab_size={model.vocab_size} has no rows for {size}; set model.vocab_size={tokens}{other}"
    if 0 < config.guard.stall_factor <= 1:
        yield (
            f"guard.stall_factor={config.guard.stall_factor:g} would end ordinary steps; set 2 or more, or 0 for "
            "no watchdog"
        )
    if config.activation.mode == "budget" and not config.compile:
        yield (
            "activation.mode=budget lets the compiler choose and needs compile=true; without it use "
            "activation=selective"
        )
    for name in ("memory_cap", "chunks", "group_size"):
        value = getattr(config.parallel.pipeline, name)
        yield from filter(
            None, [outside(f"parallel.pipeline.{name}", value, "[1, inf)") if value is not None else None]
        )
    if config.eval.every and not data.eval_fraction:
        yield (
            f"eval.every={config.eval.every} needs held-out documents; data.eval_fraction=0 holds out none, 0.01 "
            "would do"
        )
    if not data.sources:
        yield "data.sources is empty; name a corpus, such as data=stdlib"
    elif all(source.weight == 0 for source in data.sources.values()):
        yield "data.sources: every weight is 0; give at least one corpus a share"
    for name, source in data.sources.items():
        yield from filter(
            None,
            [
                outside(f"data.sources.{name}.weight", source.weight, "[0, inf)"),
                outside(f"data.sources.{name}.limit", source.limit, "[0, inf)"),
            ],
        )
        if source.kind != "stdlib" and not source.path:
            yield f"data.sources.{name}.kind={source.kind} needs data.sources.{name}.path"
    for step in config.logging.trace:
        yield from filter(None, [outside("logging.trace", step, "[1, inf)")])
    for role, policy in vars(config.precision.types).items():
        rules = policy.items() if role == "rules" else [(role, vars(policy))]
        for name, values in rules:
            path = f"precision.types.{'rules.' if role == 'rules' else ''}{name}"
            for field in ("weight_decay", "lr_scale"):
                if values.get(field) is not None:
                    yield from filter(None, [outside(f"{path}.{field}", values[field], "[0, inf)")])
