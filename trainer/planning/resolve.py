"""From what is asked to what is decided: a checked configuration, and the layout of its run.

`resolve_layout` is the one place where plan, batch and pipeline follow from settings, model and number of processes:
the command line checks by it, and runs and the parity tool train what it returns. Pure: needs neither torch nor a
process group, so that every refusal comes before either exists.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from trainer.config import (
    ActivationConfig,
    Config,
    ConfigError,
    CorpusConfig,
    DataConfig,
    GenerateConfig,
    ModelSpec,
    SourceConfig,
    typed,
)
from trainer.config.compose import gather_values, to_config
from trainer.config.fields import suggest_nearest
from trainer.config.model import runs_foreign_code
from trainer.config.registry import ATTENTION, FEED_FORWARD, OPTIMIZERS, SCHEDULES, SOURCES, KindRegistry
from trainer.config.typed import join_path, out_of_range
from trainer.parallel.compress.plan import enabled_codecs
from trainer.parallel.context.plan import ContextPlan, resolve_context
from trainer.parallel.pipeline.plan import PipelinePlan, resolve_pipeline
from trainer.parallel.zero.plan import check_settings
from trainer.planning import documents
from trainer.planning.features import FEATURES, check_plan, check_whole_plan, resolve_plan
from trainer.planning.parameters import (
    UpdateSettings,
    declare_parameters,
    find_adapter_problems,
    float8_setting,
    layer_specs,
)
from trainer.planning.plan import BatchPlan, Plan, node_size, resolve_batch, training_steps
from trainer.planning.recompute import entry_problems
from trainer.util.objects import check_url, hide_secrets, is_url

# What a type does not say: ranges, and settings that contradict each other. Pure: needs neither torch nor a process
# group, so that every refusal comes before either exists.


READ_BY = {
    "path": ("text", "jsonl", "parquet", "chat", "tokens", "hub"),
    "field": ("jsonl", "parquet", "hub"),
    "messages": ("chat",),
    "subset": ("hub",),
    "split": ("hub",),
    "dtype": ("tokens",),
}
"""By setting of a corpus, the kinds that read it: another kind would leave out what was asked for."""


def config_problems(config: Config) -> list[str]:
    """Everything that is wrong with a typed configuration on any number of processes, one sentence each."""
    model = [] if config.model.from_hf else config.model.check()
    unused = [text for used in _chosen(config) for text in _unused(*used)]
    return [*out_of_range(config), *model, *_contradictions(config), *unused]


def _chosen(config: Config) -> Iterator[tuple[KindRegistry, str, dict, set[str]]]:
    """Where settings of registered kinds stand: the registry, section, settings by kind, and the kinds in use."""
    yield OPTIMIZERS, "optimizer", config.optimizer.settings, UpdateSettings.of(config).names()
    yield SCHEDULES, "lr", config.lr.settings, {config.lr.schedule}
    if not config.model.from_hf and not config.model.check():
        for kinds, name in ((ATTENTION, "attention"), (FEED_FORWARD, "feed_forward")):
            blocks = [getattr(layer, name) for layer in layer_specs(config.model)]
            settings = {kind: given for block in blocks for kind, given in block.settings.items()}
            yield kinds, f"model.{name}", settings, {block.kind for block in blocks}
    for name, source in config.data.sources.items():
        yield SOURCES, f"data.sources.{name}", source.settings, {source.kind}
    for name, one in config.eval.sets.items():
        yield SOURCES, f"eval.sets.{name}", one.settings, {one.kind}


def check_under_plan(config: Config, spec: ModelSpec | None, plan: Plan, node: int) -> list[str]:
    """What features, registered optimizers and CUDA graphs of the configuration cannot do under a plan, one sentence
    each. node: processes on a machine."""
    registered = [OPTIMIZERS[name] for name in UpdateSettings.of(config).names() & OPTIMIZERS.registered.keys()]
    whole = (plan.shard, plan.tp, plan.engine) == (1, 1, "torch")
    optimizers = [
        f"the optimizer '{entry.name}' ({entry.home}) needs whole parameters, and under {plan.describe()} ranks share "
        "them; set parallel.zero.stage=0, parallel.tp=1 and parallel.zero.engine=torch"
        for entry in registered
        if not (whole or entry.facts["elementwise"])
    ]
    return check_whole_plan(config, spec, plan, node) + optimizers + check_graphs(config, plan)


def check_graphs(config: Config, plan: Plan) -> list[str]:
    """What of a step cannot be replayed as a CUDA graph."""
    if not config.run.cuda_graphs:
        return []
    without, parallel = "or run.cuda_graphs=false", config.parallel
    reasons = {
        f"parallel.pp={plan.pp} sends between stages, which is not recorded; set parallel.pp=1": plan.pp > 1,
        f"parallel.ep={plan.ep} reads on the host how many rows each rank gets; set parallel.ep=1": plan.ep > 1,
        "parallel.zero.collectives=copy_engine counts its copies on the host; set parallel.zero.collectives=nccl": (
            plan.shard > 1 and parallel.zero.collectives == "copy_engine"
        ),
        f"parallel.tp_overlap={parallel.tp_overlap} counts its copies on the host; set parallel.tp_overlap=off": (
            plan.tp > 1 and parallel.tp_overlap != "off"
        ),
        "quantised gradients, which were never recorded; set parallel.grad_comm.inner.codec=none and "
        "parallel.grad_comm.outer.codec=none": bool(enabled_codecs(parallel.grad_comm)),
        "parallel.zero.engine=deepspeed decides on the host; set parallel.zero.engine=torch": plan.engine != "torch",
        "parallel.zero.offload=true updates on the host; set parallel.zero.offload=false": plan.offload,
        "activation.offload=true copies to the host; set activation.offload=false": bool(config.activation.offload),
        "logging.profile and logging.trace look at the operations of a step, of which a graph shows none; set "
        "logging.profile=0 and logging.trace=[]": bool(config.logging.profile or config.logging.trace),
    }
    return [f"run.cuda_graphs=true with {reason}, {without}" for reason, applies in reasons.items() if applies]


def _unused(registry: KindRegistry, section: str, settings: dict, used: set[str]) -> Iterator[str]:
    for name in settings.keys() - used:
        place = join_path(section, f"settings.{name}")
        yield f"{place}: the {registry.kind} '{name}' is not chosen; choose it, or leave its settings out"


def _contradictions(config: Config) -> Iterator[str]:
    model, data = config.model, config.data
    if not config.run.dir.strip():
        yield f"run.dir={config.run.dir} names no folder; leave it out for runs/NAME"
    elif not config.run.name.strip():
        yield f"run.name={config.run.name} would put the run into the folder of all runs, runs/; give it a name"
    if config.run.tokens is None:
        yield from check_length(config, config.run.steps)
    if model.learned_positions and not model.from_hf and config.batch.sequence_length > model.max_length:
        yield (
            f"batch.sequence_length={config.batch.sequence_length} exceeds the learned positions of "
            f"model.max_length={model.max_length}"
        )
    if model.extend and not model.from_hf:
        yield f"model.extend={model.extend} changes what model.from_hf reads; without it set model.attention.rope"
    if model.code_unproven and not model.from_hf:
        yield "model.code_unproven=true is about the code of model.from_hf, which is not given; leave it out"
    if model.code != "auto" and not (model.from_hf or runs_foreign_code(model)):
        yield f"model.code={model.code} says whose code runs model.from_hf, which is not given; leave it out"
    tokens = {"bpe": data.vocab_size, "bytes": 257}.get(data.tokenizer, 0)
    sets = {f"eval.sets.{name}": one for name, one in config.eval.sets.items()}
    corpora = {**sets, **{f"data.sources.{name}": source for name, source in data.sources.items()}}
    tokenised = any(source.kind != "tokens" for source in data.sources.values())
    if tokenised and not model.from_hf and model.vocab_size < tokens:
        size = (
            f"data.vocab_size={tokens}" if data.tokenizer == "bpe" else f"the {tokens} tokens of data.tokenizer=bytes"
        )
        other = f" or data.vocab_size={model.vocab_size}" if data.tokenizer == "bpe" else ""
        yield f"model.vocab_size={model.vocab_size} has no rows for {size}; set model.vocab_size={tokens}{other}"
    if 0 < config.guard.stall_factor <= 1:
        yield (
            f"guard.stall_factor={config.guard.stall_factor:g} would end ordinary steps; set 2 or more, or 0 for no "
            "watchdog"
        )
    yield from _narrow(config)
    yield from _recompute(config)
    yield from check_varied_settings(config)
    yield from _evaluations(config)
    yield from _conversations(config, corpora)
    yield from _check_stages(config.data)
    if not data.sources:
        yield "data.sources is empty; name a corpus, such as data=stdlib"
    elif all(source.weight == 0 for source in data.sources.values()):
        yield "data.sources: every weight is 0; give at least one corpus a share"
    for name, source in corpora.items():
        for field, kinds in READ_BY.items():
            given = getattr(source, field)
            if source.kind not in kinds and given != getattr(SourceConfig(), field):
                yield (
                    f"{name}.{field}={given} is not read by kind={source.kind}; leave it out, or set {name}.kind="
                    f"{' or '.join(kinds)}"
                )
        if source.streaming and source.kind in ("chat", "tokens", *SOURCES.registered):
            yield f"{name}.streaming=true: kind={source.kind} is prepared before the run; set {name}.streaming=false"
        if source.kind in READ_BY["path"] and not source.path:
            yield f"{name}.kind={source.kind} needs {name}.path"
        if source.kind not in ("stdlib", "hub") and source.path and is_url(source.path):
            yield from check_url(f"{name}.path", source.path)
    yield from _check_stores(config)


def _check_stores(config: Config) -> Iterator[str]:
    """What may not be a URL of an object store, or is none that can be used."""
    run, data, checkpoint = config.run, config.data, config.checkpoint
    folders = {
        "run.dir": run.dir,
        "data.cache": data.cache,
        "data.tokenizer": data.tokenizer,
        "data.chat_template": data.chat_template,
        "model.from_hf": config.model.from_hf,
        "checkpoint.peer_folder": checkpoint.peer_folder,
    }
    for name, path in folders.items():
        if path and is_url(path):
            yield (
                f"{name}={hide_secrets(path)} must be on a disk; URLs of object stores are read by the path of "
                "data.sources and eval.sets, by checkpoint.upload and by checkpoint.resume"
            )
    if checkpoint.upload is not None:
        yield from check_url("checkpoint.upload", checkpoint.upload)
    if is_url(checkpoint.resume):
        yield from check_url("checkpoint.resume", checkpoint.resume)


def _narrow(config: Config) -> Iterator[str]:
    """What does not go with products in fp8, or with gradients in fewer bits."""
    narrow, plain = float8_setting(config.precision)
    if config.parallel.zero.collectives == "copy_engine" and (codecs := enabled_codecs(config.parallel.grad_comm)):
        yield (
            f"parallel.zero.collectives={config.parallel.zero.collectives} sends gradients as they are, and "
            + ", ".join(f"parallel.grad_comm.{name}.codec={hop.codec}" for name, hop in codecs.items())
            + " quantises them; set parallel.zero.collectives=nccl, or codec=none"
        )
    if narrow and config.precision.compute != "bf16":
        yield (
            f"{narrow} multiplies in fp8 what is bf16 elsewhere, and precision.compute={config.precision.compute}; set "
            f"precision.compute=bf16, or {plain}"
        )


def check_length(config: Config, steps: int) -> Iterator[str]:
    """What does not fit a run of so many steps: of the learning rate's schedule, and steps that never come."""
    run, lr = config.run, config.lr
    length = f"run.steps={steps}" if run.tokens is None else f"the {steps} steps of run.tokens={run.tokens}"
    if steps > 0 and lr.warmup >= steps:
        yield f"lr.warmup={lr.warmup} must be below {length}"
    elif lr.schedule == "wsd" and lr.warmup + (lr.decay or steps // 5) > steps:
        decay = f"lr.decay={lr.decay}" if lr.decay else f"lr.decay={steps // 5} (a fifth of the run)"
        yield f"lr.warmup={lr.warmup} + {decay} exceeds {length}; set lr.decay={steps - lr.warmup} or less"
    if late := [step for step in config.logging.trace if step > steps]:
        yield f"logging.trace={late} comes after {length}; name steps from 1 to {steps}"


def _evaluations(config: Config) -> Iterator[str]:
    every, sets, data = config.eval.every, config.eval.sets, config.data
    if every and not data.eval_fraction and not sets:
        yield (
            f"eval.every={every} needs held-out documents; data.eval_fraction=0 holds out none, 0.01 would do, or name "
            "a corpus in eval.sets"
        )
    if not every and (sets or config.eval.at_start):
        given = f"eval.sets.{next(iter(sets))}" if sets else "eval.at_start=true"
        yield f"{given} is for evaluations, and eval.every=0 makes none; set eval.every to a number of steps"
    if config.eval.ema and not (config.optimizer.ema.decay and every):
        yield (
            "eval.ema=true evaluates an average of the weights; set optimizer.ema.decay=0.999 and eval.every, or "
            "eval.ema=false"
        )
    yield from _samples(config.eval.generate)
    for name in sets.keys() & data.sources.keys():
        yield f"eval.sets.{name} and data.sources.{name} have one name, and so their losses would; give the set another"


def _samples(generate: GenerateConfig) -> Iterator[str]:
    if not generate.every and generate != GenerateConfig():
        names = (field.name for field in fields(generate))
        name = next(name for name in names if getattr(generate, name) != getattr(GenerateConfig(), name))
        yield (
            f"eval.generate.{name}={getattr(generate, name)} is for samples, and eval.generate.every=0 makes none; set "
            "eval.generate.every to a number of steps"
        )
    if not generate.prompts:
        yield "eval.generate.prompts=[] has nothing to continue; name a text, or [''] for new documents"


def _conversations(config: Config, corpora: dict[str, CorpusConfig]) -> Iterator[str]:
    chats, data = [name for name, source in corpora.items() if source.kind == "chat"], config.data
    if chats and not data.mask_documents:
        yield f"{chats[0]}.kind=chat needs data.mask_documents=true, so that conversations do not see each other"
    yield from documents.length_problems(data)
    if data.chat_template and not chats:
        yield f"data.chat_template={data.chat_template} is for conversations, and no corpus has kind=chat; leave it out"


def _check_stages(data: DataConfig) -> Iterator[str]:
    starts: dict[int, str] = {}
    for name, stage in data.stages.items():
        setting = f"data.stages.{name}"
        for unknown in stage.weights.keys() - data.sources.keys():
            yield (
                f"{setting}.weights names {unknown}, which is none of data.sources; "
                f"{suggest_nearest(unknown, list(data.sources))}"
            )
        if any(not 0 <= weight < math.inf for weight in stage.weights.values()) or not any(stage.weights.values()):
            yield f"{setting}.weights={stage.weights} must be at least 0, and one of them above; give a source a share"
        if stage.start in starts:
            yield (
                f"{setting}.start={stage.start} is that of data.stages.{starts[stage.start]} too; give each stage a "
                "start of its own"
            )
        starts[stage.start] = name


def _recompute(config: Config) -> Iterator[str]:
    """What `activation.save` cannot mean, and settings that the mode has no use for."""
    activation, unset = config.activation, ActivationConfig()
    if activation.mode == "selective":
        yield from entry_problems(activation.save, None if config.model.from_hf else config.model.depth)
    if activation.mode == "auto":
        if activation.save != unset.save:
            yield (
                f"activation.save={format_setting(activation.save)}: activation.mode=auto chooses by itself what is "
                f"recomputed; leave it out (set activation.save={format_setting(unset.save)} where a recipe has it), "
                "or set activation.mode=selective"
            )
    elif activation.hardware is not None:
        yield (
            f"activation.hardware={activation.hardware} is read by activation.mode=auto alone; leave it out, or set "
            "activation=auto"
        )
    decided = activation.mode != "auto" and None not in (activation.tile, activation.offload, config.loss.tile)
    if activation.memory is not None and decided:
        yield (
            f"activation.memory={activation.memory:g} leaves nothing to decide: activation.mode, activation.tile, "
            "activation.offload and loss.tile are all given; leave it out, or set activation=auto"
        )


def format_setting(value: object) -> str:
    """As on a command line."""
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def check_varied_settings(config: Config) -> Iterator[str]:
    """Contradictions between settings that a search of plans changes, one sentence each."""
    yield from check_settings(config)
    activation = config.activation
    if config.loss.terms and config.parallel.tp > 1:
        yield (
            f"loss.terms={', '.join(config.loss.terms)}: a registered term reads the scores of the whole vocabulary, "
            f"of which each of parallel.tp={config.parallel.tp} ranks has a part; set parallel.tp=1"
        )
    if activation.offload and activation.mode == "none":
        yield (
            "activation.offload=true keeps inputs of recomputed layers, and there are none with activation.mode=none; "
            "set activation=full, or activation=selective"
        )


@dataclass(frozen=True)
class Layout:
    """How a model is trained on a number of processes: who holds what of it, who reads what, who computes what when,
    and how sequences are shared, if they are."""

    spec: ModelSpec
    plan: Plan
    batch: BatchPlan
    pipeline: PipelinePlan
    context: ContextPlan | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a rank computes: ranks of one tensor group compute the same."""
        return self.batch.sequence_length * self.batch.micro_size // self.plan.cp


def resolve_layout(config: Config, world_size: int, spec: ModelSpec, node: int | None = None) -> Layout:
    """The layout that the configuration asks for on `world_size` processes.

    spec: the model that is trained; node: processes on this machine, as LOCAL_WORLD_SIZE has them if None. Raises
    `ConfigError` with everything that is wrong.
    """
    layout, problems = _decide(config, world_size, spec, node)
    if problems or layout is None:
        raise ConfigError(problems)
    return layout


def check_config(config: Config, world_size: int, node: int | None = None) -> list[str]:
    """Everything that is wrong with a typed configuration on `world_size` processes, one sentence each.

    node: as for `resolve_layout`. The model of `model.from_hf` is not known before it is read: what depends on it is
    left to `resolve_layout`.
    """
    spec = None if config.model.from_hf or config.model.check() else config.model
    found = [*config_problems(config), *_decide(config, world_size, spec, node)[1]]
    return list(dict.fromkeys(found))  # plan and batch find by themselves what lies outside of their ranges


def _decide(
    config: Config, world_size: int, spec: ModelSpec | None, node: int | None
) -> tuple[Layout | None, list[str]]:
    """The layout, or None where the model is unknown or something is wrong; and what is wrong."""
    layout, node = None, node or node_size(world_size)
    problems = check_plan(config.parallel, world_size, spec, node)
    plan = None if problems else resolve_plan(config.parallel, world_size, spec, node)
    try:
        # Without a plan the number of ranks is unknown; what cannot be divided on one rank is wrong on any number.
        batch = resolve_batch(config.batch, *((plan.dp, plan.tp, plan.pp, plan.cp) if plan else (1,)))
        if plan and config.run.tokens:
            problems = problems + list(check_length(config, training_steps(config.run, batch)))
        if plan and spec:
            context = resolve_context(config, spec, plan, node)
            layout = Layout(spec, plan, batch, resolve_pipeline(config, spec, plan, batch), context)
    except ConfigError as error:
        problems = problems + error.problems
    if spec:
        problems = problems + list(find_adapter_problems(spec))
        problems = problems + UpdateSettings.of(config).problems(declare_parameters(spec))
    if plan:
        problems = problems + check_under_plan(config, spec, plan, node)
    return layout, problems


def compose(
    overrides: Sequence[str] = (), config_dir: str | os.PathLike | None = None, world_size: int | None = None
) -> Config:
    """The checked configuration of a run on `world_size` processes (default: WORLD_SIZE of the environment, else 1).

    `overrides` is what stands on the command line: `["+config=debug", "lr.peak=1e-3"]`. Leaves no Hydra state behind.
    Raises `ConfigError` with everything that is wrong.
    """
    values, problems = gather_values(overrides, config_dir)
    return check_values(values, problems, int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size)


def check_values(values: dict, problems: typed.Problems, world: int | None) -> Config:
    """The configuration of what `gather_values` returned, checked for `world` processes, or for any number of them if
    None.

    Raises `ConfigError` with everything that is wrong."""
    config = to_config(values, problems, world or 1)
    contradictions = config_problems(config) if world is None else check_config(config, world)
    if problems:
        # A setting that was refused stands at its default: what contradicts only that default is no news.
        refused = re.compile(r"\b(" + "|".join(map(re.escape, problems)) + r")\b")
        recipe = "config" not in problems
        raise ConfigError(
            [*problems.values(), *(text for text in contradictions if recipe and not refused.search(text))]
        )
    if contradictions:
        raise ConfigError(contradictions)
    return config


# What is legal and may still be a mistake: said at the start of a run and by an estimate, and refused by neither.


def collect_warnings(config: Config, layout: Layout, node: int) -> list[str]:
    """Sentences on a run with nodes of `node` processes."""
    found = list(_positions(layout.spec, layout.batch.sequence_length))
    for feature in FEATURES:
        found += feature.collect_warnings(config, layout.spec, layout.plan, node)
    return found


def _positions(spec: ModelSpec, length: int) -> Iterator[str]:
    """Rotary positions beyond those that a model is built for; `dynamic` scaling follows the sequence by itself."""
    rotary = [layer.attention for layer in layer_specs(spec) if layer.attention.positions == "rope"]
    if length > spec.max_length and any(attention.rope.scaling != "dynamic" for attention in rotary):
        rope, factor = spec.attention.rope, length / spec.max_length
        if runs_foreign_code(spec):
            yield (
                f"batch.sequence_length={length} exceeds max_position_embeddings={spec.max_length} of model.from_hf, "
                "beyond which rotary positions are new to the model; change rope_parameters in its config.json"
            )
            return
        extend = f"{{max_length: {length}, scaling: yarn, factor: {factor:g}, original_length: {spec.max_length}}}"
        if rope.scaling != "none":  # the frequencies that the model knows are scaled already, and go on from there
            extend = f"{{max_length: {length}, factor: {rope.factor * factor:g}}}"
        yield (
            f"batch.sequence_length={length} exceeds model.max_length={spec.max_length}, beyond which rotary positions "
            f"are new to the model; for one that is read set model.extend={extend}, and for one that is trained from "
            f"its beginning model.max_length={length}"
        )
