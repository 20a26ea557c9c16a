"""A training run, from a configuration to an exit code."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpointing.manifest import list_checkpoints
from trainer.checkpointing.remote import CheckpointUploader
from trainer.checkpointing.resume import find_begin
from trainer.config import Config, ConfigError
from trainer.config.extend import extend_spec
from trainer.config.hardware import HardwareConfig
from trainer.config.model import ModelSpec
from trainer.data.corpus import open_corpus
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.data.tokens import DataError
from trainer.distributed.mesh import World, join_world, local_device
from trainer.distributed.p2p import PeerError
from trainer.model.initial import Weights
from trainer.observe import flight, metrics
from trainer.observe.sinks import write_status
from trainer.observe.watchdog import ENDING, Watchdog
from trainer.parallel.parallelize import check_compiler, check_model
from trainer.parallel.zero.fsdp import check_engine
from trainer.planning.decide import Decision, MemoryLimit, check_fit, decide
from trainer.planning.plan import BatchPlan, node_size, training_steps
from trainer.planning.resolve import Layout, check_config, resolve_layout
from trainer.training.auto import saved_choice
from trainer.training.crashes import WholeErrorFile
from trainer.training.history import settle_status, way_on
from trainer.training.metrics_tracker import NonFiniteError
from trainer.training.out_of_memory import check_decision, explain_oom, format_oom
from trainer.training.replicas import ReplicaMismatch
from trainer.training.saving import RunStart
from trainer.training.session import (
    RunClock,
    can_share_states,
    claim_folder,
    compare_ranks,
    find_hardware,
    host_threads,
    least_memory,
    memory_of,
    numeric_mode,
    start_watchdog,
    stop_signals,
    warn_of_stale_store,
)
from trainer.training.trainer import Trainer, check_recording
from trainer.util.exit_codes import DONE, FAILED, INTERRUPTED, process_rank
from trainer.util.lines import CHECKPOINTS
from trainer.util.machine import missing_memory
from trainer.util.reading import FolderError


@dataclass
class RunResult:
    """The result of a run: its folder, and how it ended (the exit code of the command line)."""

    folder: Path
    code: int

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl, the oldest first."""
        return metrics.read_metrics(self.folder)


def run(config: Config) -> RunResult:
    """Trains as configured, and resumes where the run folder has a checkpoint. Raises `ConfigError` before any step if
    the configuration cannot work.

    Called in every process of the run. The order is: checks that each process makes alone, the process group, decisions
    that all ranks take together, the run folder, and training.
    """
    clock = RunClock(config.run.hours)
    world_size, folder = int(os.environ.get("WORLD_SIZE", 1)), Path(config.run.dir)
    # Python callers may have changed settings since they were composed and checked.
    if problems := check_config(config, world_size):
        raise ConfigError(problems)
    spec, weights, notes = starting_point(config)
    layout, device = resolve_layout(config, world_size, spec), local_device(config.run)
    memory, node, hardware = memory_of(device), node_size(world_size), find_hardware(config, device)
    # These checks need no process group, so a faulty setting ends all processes at once instead of leaving some in a
    # rendezvous.
    check_compiler(config, device)
    check_engine(config, device)
    check_recording(config, device)
    check_model(config, spec, device)
    check_fit(config, layout, world_size, node, memory)
    # Before the process group too: tokenising may take hours, and collectives of waiting ranks would time out.
    corpus = open_corpus(config, begin=find_begin(config.checkpoint, folder / "checkpoints"))
    generation, left_out = starting_generation(config, spec, corpus.tokenizer)
    notes += left_out
    # A caller's process group (notebook, tests) is used and left alone at the end.
    joined_before = dist.is_initialized()
    warn_of_stale_store()
    if config.guard.stall_factor:
        # torch reads the recorder's settings when it creates a process group, so this comes before the first.
        flight.enable_recorder(folder / "flight")
    # The timeout is twice the watchdog's allowance: on a hang the watchdog has to report first, with the rank that
    # causes it.
    world = join_world(layout.plan, device, max(1200.0, 2 * config.guard.stall_allowance))
    try:
        decision = decide_together(config, layout, world, node, hardware)
    except ConfigError:  # raised on all ranks, so none waits in a collective
        if not joined_before:
            dist.destroy_process_group()
        raise
    config, layout = decision.config, decision.layout
    with (
        numeric_mode(config),
        host_threads(layout.plan, device),
        claim_folder(folder, world),
        start_watchdog(config, world) as watchdog,
    ):
        # A resumed run takes the schedule that `schedule=auto` chose before, without measuring again.
        layout = saved_choice(folder, config, layout) or layout
        compare_ranks(config, layout, corpus, world)
        start = RunStart.find(config, layout, corpus, world)
        config = with_total_steps(config, layout.batch, start)
        check_data_end(config, layout.batch, start)
        generation = extend_stops(start.manifest.get("generation") or generation, corpus.stop_ids)
        start = replace(start, notes=[*notes, *start.notes, *decision.notes], generation=generation)
        watchdog.total = config.run.steps
        if start.step >= config.run.steps:
            code = report_done(config, start, world)
            upload_rest(config, start, world, watchdog)
        else:
            with (
                explain_oom(config, layout, world, memory, lambda: max(start.step, watchdog.done)) as states,
                stop_signals() as stop,
            ):
                trainer = Trainer(config, layout, weights, corpus, world, watchdog, start, clock, stop)
                # An out-of-memory report lists what the state holds at that time, hence a function: `adapt` may replace
                # the state.
                states.append(lambda: trainer.state)
                code = trainer.train()
    # Not after a failure: destroying the group would wait for ranks that may be stuck in a collective.
    if not joined_before:
        dist.destroy_process_group()
    return RunResult(folder, code)


def decide_together(
    config: Config, layout: Layout, world: World, node: int, hardware: HardwareConfig | None
) -> Decision:
    """Decides what the settings leave open (`auto`), alike on all ranks, by the memory of the rank with the least.
    Raises `ConfigError` on all ranks where nothing fits."""
    memory, hardware = least_memory(world), world.agree(lambda: hardware)  # devices of ranks may differ
    reachable = can_share_states(config, layout, world, node)
    decision = decide(config, layout, MemoryLimit.of(memory, node), node, hardware, reachable)
    check_decision(config, decision, memory, node, world.device)
    return decision


def report_done(config: Config, start: RunStart, world: World) -> int:
    """For a run that has made all its steps: trains nothing and prints how to continue. The folder's status stays what
    it was. Returns the exit code, of a failure if no step updated the weights."""
    updated = start.step - start.manifest["skipped"]
    if updated:
        world.agree(lambda: settle_status(Path(config.run.dir), start.step, config.run.steps))
    if world.rank == 0 and config.logging.console != "none":
        limit = f"run.steps={config.run.steps}" if config.run.tokens is None else f"run.tokens={config.run.tokens}"
        of_them = "" if updated == start.step else f" ({updated} of them updated the weights)"
        done = f"{start.path} has {start.step} steps{of_them}, and {limit} asks for no more"
        setting = limit.partition("=")[0]
        print(*start.notes, f"{done}: raise {setting} to train on, or set another run.name", sep="\n", flush=True)
    return DONE if updated else FAILED


def upload_rest(config: Config, start: RunStart, world: World, watchdog: Watchdog) -> None:
    """Uploads what earlier starts of a run that has made all its steps could not. All ranks call it together."""
    folder = Path(config.run.dir)
    if config.checkpoint.upload is None or not start.is_own(folder):
        return
    uploader = world.together(lambda: CheckpointUploader(folder / CHECKPOINTS, config.checkpoint))
    uploader.finish(lambda: watchdog.enter(ENDING, start.step))
    uploader.close()
    if world.rank == 0 and config.logging.console != "none":
        for text in uploader.messages:
            print(text, flush=True)
    if start.step == config.run.steps:
        world.agree(lambda: write_status(folder, "done", start.step, config.run.steps, uploader.failure))


def with_total_steps(config: Config, batch: BatchPlan, start: RunStart | None) -> Config:
    """The configuration with the number of steps that `run.tokens` means, counted from `start` on."""
    done = (start.step, start.tokens) if start else ()
    return replace(config, run=replace(config.run, steps=training_steps(config.run, batch, *done)))


def check_data_end(config: Config, batch: BatchPlan, start: RunStart) -> None:
    """Raises `ConfigError` where all sources reach their limits before the run ends."""
    end, size = start.mixture.end, batch.global_size
    needed = start.samples + (config.run.steps - start.step) * size
    if end is not None and needed > end:
        steps = start.step + max(0, end - start.samples) // size
        raise ConfigError(
            f"data.sources: max_tokens and max_epochs of all sources that have a weight end the data at token "
            f"{end * batch.sequence_length}, before step {steps + 1} of run.steps={config.run.steps}; set "
            f"run.steps={steps}, raise the limits, or add a source"
        )


def main(config: Config) -> int:
    """The run of the command line. Returns the exit code."""
    try:
        return run(config).code
    except KeyboardInterrupt:
        if process_rank() == 0:
            newest = next(iter(list_checkpoints(Path(config.run.dir) / "checkpoints").values()), None)
            end = f"{newest} is the last that was saved; {way_on(config)}" if newest else "nothing had been saved"
            print(f"left at once: {end}", file=sys.stderr, flush=True)
        return INTERRUPTED
    except FolderError as error:  # raised alike on all ranks
        if process_rank() == 0:
            print(f"the run has not started: {error}", file=sys.stderr, flush=True)
        return FAILED
    except (NonFiniteError, ReplicaMismatch, DataError, PeerError) as error:
        print(f"training stopped: {error}", file=sys.stderr, flush=True)
        return FAILED
    except Exception as error:
        if (missing := missing_memory(error)) is None:
            raise
        WholeErrorFile().record_exception(error)  # for torchrun's report, which names the first rank that failed
        print(format_oom(error, missing), file=sys.stderr, flush=True)
        return FAILED


def starting_generation(config: Config, spec: ModelSpec, tokenizer: Tokenizer) -> tuple[dict[str, Any], list[str]]:
    """The generation configuration of the transformers folder that the run starts from, and what is to be said of it.
    Ids are left out where the run's tokenizer has another token than the folder's."""
    if not config.model.from_hf:
        return {}, []
    from trainer.hf import open_generation

    generation, notes = open_generation(config.model.from_hf, spec.vocab_size)
    if config.data.tokenizer == "bpe":  # then it is the folder's
        return generation, notes
    try:
        before = load_tokenizer(config.model.from_hf)
    except ConfigError:  # there is none to compare with
        return generation, notes
    for name in [name for name in generation if name.endswith("_token_id")]:
        ids = generation[name] if isinstance(generation[name], list) else [generation[name]]
        if before.name_tokens(ids) != tokenizer.name_tokens(ids):
            del generation[name]
            notes.append(
                f"{config.model.from_hf}: {name}={ids} of its generation configuration is left out: data.tokenizer "
                "has other tokens there"
            )
    return generation, notes


def extend_stops(generation: dict[str, Any], stop_ids: list[int]) -> dict[str, Any]:
    """The generation configuration with `stop_ids` among the ids that generation stops at, behind its own."""
    return {**generation, "eos_token_id": [*dict.fromkeys([*generation.get("eos_token_id", ()), *stop_ids])]}


def starting_point(config: Config) -> tuple[ModelSpec, Weights | None, list[str]]:
    """The spec of the model to train and, if a transformers folder is named, its weights and notes on them. The weights
    are not read yet."""
    if not config.model.from_hf:
        spec = ModelSpec.from_dict({f.name: getattr(config.model, f.name) for f in dataclasses.fields(ModelSpec)})
        return spec, None, []
    from trainer.hf import join_adapters, spec_from_hf, starting_weights

    notes: list[str] = []
    spec = extend_spec(
        spec_from_hf(config.model.from_hf, notes, config.model.code, config.model.code_unproven), config.model.extend
    )
    if spec.learned_positions and config.batch.sequence_length > spec.max_length:
        raise ConfigError(
            f"batch.sequence_length={config.batch.sequence_length} exceeds the {spec.max_length} learned positions of "
            f"model.from_hf={config.model.from_hf}"
        )
    spec.adapter = join_adapters(spec, config.model.adapter)
    weights, more = starting_weights(config.model.from_hf, spec, config.run.seed)
    return spec, weights, [*notes, *more]
