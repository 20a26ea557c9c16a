"""What a type does not say: ranges, and settings that contradict each other.

Pure: needs neither torch nor a process group, so that every refusal comes before either exists.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import Config, SourceConfig
from trainer.config.registry import ATTENTION, FEED_FORWARD, OPTIMIZERS, SCHEDULES, SOURCES, Registry
from trainer.config.typed import join, out_of_range
from trainer.planning.cost.updates import Updates
from trainer.planning.deepspeed import check_settings
from trainer.planning.plan import Plan


def check(config: Config) -> list[str]:
    """Everything that is wrong with a typed configuration on any number of processes, one sentence each."""
    model = [] if config.model.from_hf else config.model.check()
    unused = [text for used in _chosen(config) for text in _unused(*used)]
    return [*out_of_range(config), *model, *_contradictions(config), *unused, *check_settings(config)]


def _chosen(config: Config) -> Iterator[tuple[Registry, str, dict, set[str]]]:
    """Where settings of registered kinds stand: the registry, section, settings by kind, and the kinds in use."""
    yield OPTIMIZERS, "optimizer", config.optimizer.settings, Updates.of(config).names()
    yield SCHEDULES, "lr", config.lr.settings, {config.lr.schedule}
    if not config.model.from_hf and not config.model.check():
        layers = [config.model.layer(index) for index in range(config.model.depth)]
        for kinds, name in ((ATTENTION, "attention"), (FEED_FORWARD, "feed_forward")):
            blocks = [getattr(layer, name) for layer in layers]
            settings = {kind: given for block in blocks for kind, given in block.settings.items()}
            yield kinds, f"model.{name}", settings, {block.kind for block in blocks}
    for name, source in config.data.sources.items():
        yield SOURCES, f"data.sources.{name}", source.settings, {source.kind}


def check_optimizers(config: Config, plan: Plan) -> list[str]:
    """Registered optimizers that cannot update what a rank holds under the plan."""
    registered = [OPTIMIZERS[name] for name in Updates.of(config).names() & OPTIMIZERS.registered.keys()]
    if (plan.shard, plan.tp, plan.engine) == (1, 1, "torch"):
        return []
    return [
        f"the optimizer '{entry.name}' ({entry.home}) needs whole parameters, and under {plan.describe()} ranks share "
        "them; set parallel.zero.stage=0, parallel.tp=1 and parallel.zero.engine=torch"
        for entry in registered
        if not entry.facts["elementwise"]
    ]


def _unused(registry: Registry, section: str, settings: dict, used: set[str]) -> Iterator[str]:
    for name in settings.keys() - used:
        place = join(section, f"settings.{name}")
        yield f"{place}: the {registry.kind} '{name}' is not chosen; choose it, or leave its settings out"


def _contradictions(config: Config) -> Iterator[str]:
    run, model, data, lr = config.run, config.model, config.data, config.lr
    if run.steps > 0 and lr.warmup >= run.steps:
        yield f"lr.warmup={lr.warmup} must be below run.steps={run.steps}"
    elif lr.schedule == "wsd" and lr.warmup + (lr.decay or run.steps // 5) > run.steps:
        decay = f"lr.decay={lr.decay}" if lr.decay else f"lr.decay={run.steps // 5} (a fifth of the run)"
        yield (
            f"lr.warmup={lr.warmup} + {decay} exceeds run.steps={run.steps}; set lr.decay={run.steps - lr.warmup} or "
            "less"
        )
    if model.learned_positions and not model.from_hf and config.batch.sequence_length > model.max_length:
        yield (
            f"batch.sequence_length={config.batch.sequence_length} exceeds the learned positions of "
            f"model.max_length={model.max_length}"
        )
    if model.extend and not model.from_hf:
        yield f"model.extend={model.extend} changes what model.from_hf reads; without it set model.attention.rope"
    tokens = {"bpe": data.vocab_size, "bytes": 257}.get(data.tokenizer, 0)
    tokenised = any(source.kind != "tokens" for source in data.sources.values())
    if tokenised and not model.from_hf and model.vocab_size < tokens:
        size = (
            f"data.vocab_size={tokens}" if data.tokenizer == "bpe" else f"the {tokens} tokens of data.tokenizer=bytes"
        )
        other = f" or data.vocab_size={model.vocab_size}" if data.tokenizer == "bpe" else ""
        yield f"model.vocab_size={model.vocab_size} has no rows for {size}; set model.vocab_size={tokens}{other}"
    if config.loss.terms and config.parallel.tp > 1:
        yield (
            f"loss.terms={', '.join(config.loss.terms)}: a registered term reads the scores of the whole vocabulary, "
            f"of which each of parallel.tp={config.parallel.tp} ranks has a part; set parallel.tp=1"
        )
    if 0 < config.guard.stall_factor <= 1:
        yield (
            f"guard.stall_factor={config.guard.stall_factor:g} would end ordinary steps; set 2 or more, or 0 for no "
            "watchdog"
        )
    if config.activation.mode == "budget" and not config.compile:
        yield (
            "activation.mode=budget lets the compiler choose and needs compile=true; without it use "
            "activation=selective"
        )
    yield from _long_sequences(config)
    if config.eval.every and not data.eval_fraction:
        yield (
            f"eval.every={config.eval.every} needs held-out documents; data.eval_fraction=0 holds out none, 0.01 "
            "would do"
        )
    if config.eval.ema and not (config.optimizer.ema.decay and config.eval.every):
        yield (
            "eval.ema=true evaluates an average of the weights; set optimizer.ema.decay=0.999 and eval.every, or "
            "eval.ema=false"
        )
    if not data.sources:
        yield "data.sources is empty; name a corpus, such as data=stdlib"
    elif all(source.weight == 0 for source in data.sources.values()):
        yield "data.sources: every weight is 0; give at least one corpus a share"
    for name, source in data.sources.items():
        if source.kind in SOURCES.registered:
            ours = ("path", "field", "subset", "split", "streaming", "dtype")
            for field in (field for field in ours if getattr(source, field) != getattr(SourceConfig(), field)):
                yield (
                    f"data.sources.{name}.{field}={getattr(source, field)} is not read by kind={source.kind}; what it "
                    f"takes is in data.sources.{name}.settings.{source.kind}"
                )
        elif source.kind != "stdlib" and not source.path:
            yield f"data.sources.{name}.kind={source.kind} needs data.sources.{name}.path"


def _long_sequences(config: Config) -> Iterator[str]:
    """What tiles and host memory cannot go with."""
    activation = config.activation
    if activation.tile and activation.mode == "budget":
        yield (
            f"activation.tile={activation.tile} recomputes feed-forward blocks, and activation.mode=budget lets the "
            "compiler choose; set activation.tile=0, or activation=selective"
        )
    if activation.offload and (activation.mode not in ("full", "selective") or activation.modules):
        yield (
            "activation.offload=true keeps inputs of recomputed layers, and there are none with activation.mode="
            f"{activation.mode}{' and activation.modules' * bool(activation.modules)}; set activation=full, or "
            "activation=selective"
        )
