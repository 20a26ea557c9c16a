"""A good file of each kind that the project reads, and what reads it."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import yaml
from support import traces
from support.accounts import Case
from support.accounts import accounts as accounts_of
from support.corpora import PLAIN
from support.runs import DIAGNOSIS, start, write_metrics, write_search

import trainer
from trainer.cluster import job
from trainer.commands.evaluate import known_results
from trainer.config import ConfigError, SourceConfig, typed
from trainer.config.compose import UserFiles
from trainer.config.fields import CONFIGS
from trainer.config.model import ModelSpec
from trainer.data.shards import TokeniseJob, read_manifest, write_manifest
from trainer.data.tables import JsonLines, ParquetRows
from trainer.data.text import ChatTemplate, TextFiles, read_template
from trainer.data.tokenizer import byte_tokenizer, load_tokenizer
from trainer.data.tokens import TokenWriter, file_digest, open_token_file
from trainer.diagnosis import time_breakdown
from trainer.diagnosis.oom_report import MemoryOverride, OOMReport
from trainer.diagnosis.oom_report import read_oom_report as read_shortage
from trainer.diagnosis.traces import read_trace as read_trace
from trainer.diagnosis.verdict import to_json
from trainer.hf import HFWeights, open_generation, spec_from_hf
from trainer.hf.config import config_from_spec
from trainer.observe import metrics
from trainer.observe.diagnose_run import diagnose_run
from trainer.observe.sinks import saved_run_id
from trainer.observe.watchdog import Heartbeat, RankReport, describe_ranks, parse_heartbeat, read_report
from trainer.pages.page import content_of, data_of, open_folders
from trainer.planning.hardware import load_hardware
from trainer.planning.parameters import declare_parameters
from trainer.planning.resolve import resolve_layout
from trainer.planning.schedules import ir
from trainer.planning.schedules.lower import validate_schedule
from trainer.planning.schedules.simulate import read_timeline
from trainer.planning.schedules.templates import build_schedule
from trainer.sweep import results
from trainer.sweep.plan import Trial
from trainer.training.auto import choice_conditions, saved_choice
from trainer.tuning.study import BEGUN, TuningStudy
from trainer.util.lines import SHORTAGE

ROWS = [f"row {number} of a table with ä and €" for number in range(300)]
SPEC = ModelSpec(vocab_size=512, width=16, depth=2, max_length=32)
SPEC.attention.heads, SPEC.feed_forward.width = 2, 24

File = tuple[Path, Callable[[], object]]
"""A good file, and what reads it."""


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def token_file(folder: Path) -> dict[str, object]:
    folder.mkdir(parents=True, exist_ok=True)
    writer = TokenWriter(str(folder / "shard-00000.train.bin"), "<u2")
    writer.append(list(range(100)))
    return writer.finish()


def token_manifest(folder: Path) -> File:
    write_manifest(folder, "<u2", {"train": [token_file(folder)], "eval": []})
    return folder / "manifest.json", lambda: [run.map() for runs in read_manifest(folder)[0].values() for run in runs]


def shard_description(folder: Path) -> File:
    documents = TextFiles("data.sources.corpus", [str(written(folder / "a.txt", "text\n"))], strict=True)
    job = TokeniseJob(documents, byte_tokenizer(), "<u2", 0, folder)
    return written(job.description(0), json.dumps({"documents": [0, 1], "train": token_file(folder)})), (
        lambda: job.described(0)
    )


def npy(folder: Path) -> File:
    np.save(folder / "tokens.npy", np.arange(200, dtype=np.uint16) % 256)
    path = folder / "tokens.npy"
    return path, lambda: file_digest(open_token_file("data.sources.corpus", SourceConfig("tokens"), str(path), 257))


def jsonl(folder: Path, name: str = "a.jsonl", pack: Callable[[bytes], bytes] = bytes) -> File:
    content = "".join(
        json.dumps({"id": number, "text": row, "more": {"a": [1]}}) + "\n" for number, row in enumerate(ROWS)
    )
    path, source = written(folder / name, pack(content.encode())), SourceConfig("jsonl")

    def read() -> None:
        documents = JsonLines("data.sources.corpus", [str(path)], source, folder / "expanded")
        assert all(document.text.encode() for document in documents.read(0, len(documents)))

    return path, read


def packed(kind: str) -> Callable[[Path], File]:
    return lambda folder: jsonl(folder, f"a.jsonl.{kind}", PACK[kind])


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACK = {
    "gz": lambda content: gzip.compress(content, mtime=0),
    "bz2": importlib.import_module("bz2").compress,
    "xz": importlib.import_module("lzma").compress,
    "zst": zstd,
}


def parquet(folder: Path) -> File:
    path = folder / "a.parquet"
    table = pyarrow.table({"id": list(range(300)), "text": ROWS, "nested": [{"a": [1, 2]}] * 300})
    pyarrow.parquet.write_table(table, path, row_group_size=100, compression="zstd")

    def read() -> None:
        documents = ParquetRows("data.sources.corpus", [str(path)], SourceConfig("parquet"))
        assert all(document.text.encode() for document in documents.read(0, len(documents)))

    return path, read


def conversations(folder: Path) -> File:
    messages = [{"role": "user", "content": "a ä"}, {"role": "assistant", "content": "b €", "name": None}]
    path = written(folder / "chat.jsonl", (json.dumps({"id": 1, "messages": messages}) + "\n") * 30)
    template, source = ChatTemplate(PLAIN, {}, "a template"), SourceConfig("chat")

    def read() -> None:
        documents = JsonLines("data.sources.chat", [str(path)], source, folder / "expanded", template=template)
        assert all(document.spans for document in documents.read(0, len(documents)))

    return path, read


def chat_template(folder: Path) -> File:
    path = written(folder / "chat.jinja", PLAIN)
    return path, lambda: ChatTemplate(read_template(str(path)), {"eos_token": "</s>"}, f"data.chat_template={path}")


def tokenizer_json(folder: Path) -> File:
    byte_tokenizer().save(folder)
    return folder / "tokenizer.json", lambda: load_tokenizer(folder / "tokenizer.json").encode("text")


def tokenizer_config(folder: Path) -> File:
    byte_tokenizer().save(folder)
    return folder / "tokenizer_config.json", lambda: load_tokenizer(folder).encode("text")


def hf_config(folder: Path) -> File:
    return written(folder / "config.json", json.dumps(config_from_spec(SPEC))), lambda: spec_from_hf(folder)


def generation_config(folder: Path) -> File:
    options = {"eos_token_id": [256, 3], "do_sample": True, "temperature": 0.6, "stop_strings": ["a"]}
    text = json.dumps(options | {"watermarking_config": {"greenlist_ratio": 0.25}})
    return written(folder / "generation_config.json", text), lambda: open_generation(folder, 257)


def hf_folder(folder: Path, sharded: bool) -> tuple[Path, Callable[[], object]]:
    from trainer.hf.folder import export_model

    tensors = {name: torch.zeros(info.shape) for name, info in declare_parameters(SPEC).items()}
    export_model(SPEC, tensors, folder / "model", torch.float32, shard_size=40_000 if sharded else "5GB")

    def read() -> None:
        weights = HFWeights(folder / "model", SPEC)
        assert all(weights(name, info).shape == info.shape for name, info in declare_parameters(SPEC).items())

    return folder / "model", read


def peft_folder(folder: Path) -> tuple[Path, Callable[[], object]]:
    from trainer.hf.adapters import PeftWeights, find_base
    from trainer.hf.folder import export_adapter

    base, _ = hf_folder(folder, sharded=False)
    spec = replace(SPEC, adapter=replace(SPEC.adapter, rank=2))
    infos = declare_parameters(spec)
    export_adapter(spec, lambda name: torch.ones(infos[name].shape), folder / "adapter", base)

    def read() -> None:
        find_base(folder / "adapter")
        PeftWeights(folder / "adapter", SPEC)

    return folder / "adapter", read


def adapter_config(folder: Path) -> File:
    adapter, read = peft_folder(folder)
    return adapter / "adapter_config.json", read


def adapter_weights(folder: Path) -> File:
    adapter, read = peft_folder(folder)
    return adapter / "adapter_model.safetensors", read


def hf_index(folder: Path) -> File:
    model, read = hf_folder(folder, sharded=True)
    return model / "model.safetensors.index.json", read


def hf_weights(folder: Path) -> File:
    model, read = hf_folder(folder, sharded=False)
    return model / "model.safetensors", read


def schedule(folder: Path) -> File:
    path = written(folder / "mine.csv", ir.format_schedule(build_schedule("zb_v", 2, 4)))

    def read() -> None:
        if problems := validate_schedule(ir.load_schedule(path, "mine")):
            raise ConfigError([f"mine: {problem}" for problem in problems[:5]])

    return path, read


def timeline(folder: Path) -> File:
    span = {"action": "0F0", "start": 0, "end": 1.5}
    text = json.dumps({"makespan": 2, "bubble": 0, "ranks": [[span, {**span, "action": "1B0"}], [span]]})
    return written(folder / "measured.json", text), lambda: read_timeline(folder / "measured.json")


def choice(folder: Path, name: str) -> File:
    overrides = ["+config=debug", "parallel.pp=2", "parallel.pipeline.schedule=auto", "batch.accumulation=4"]
    config = trainer.compose([*overrides, "batch.global_size=null", "batch.micro_size=2"], world_size=2)
    layout = resolve_layout(config, 2, config.model)
    place = folder / "schedule"
    written(place / "chosen.csv", ir.format_schedule(build_schedule("zb_v", 2, 4)))
    settings = {"parallel": {"pipeline": {"split": [1, 1, 1, 1]}}, "batch": {"micro_size": 2, "accumulation": 4}}
    written(place / "choice.yaml", json.dumps(settings))
    written(place / "conditions.yaml", yaml.safe_dump(choice_conditions(config, layout.spec, layout.plan)))
    assert saved_choice(folder, config, layout) is not None

    def read() -> None:
        if found := saved_choice(folder, config, layout):
            assert found.batch.global_size == layout.batch.global_size and not validate_schedule(
                found.pipeline.schedule
            )

    return place / name, read


def metrics_lines(folder: Path) -> File:
    record = metrics.format_line({"step": 1, "loss": 2.5, "skipped": 0}, metrics.STEP)
    text = "".join(json.dumps({**record, "step": step}) + "\n" for step in (1, 2))
    return written(folder / "metrics.jsonl", text), lambda: metrics.read_metrics(folder)


def shortage(folder: Path) -> File:
    ways = (MemoryOverride("activation.mode=full", None, "", 1.5, 1.3),)
    one = OOMReport(1, 7, "no room", "CPU", 1e9, {"process": 2e9}, {"activations": 3e9}, "0F0", True, ways)
    one.write(folder)

    def read() -> None:
        if (found := read_shortage(folder)) is not None:
            assert all(isinstance(text, str) for text in [*found.facts, *found.ways])

    return folder / SHORTAGE, read


def accounts(folder: Path) -> File:
    kernel = time_breakdown.KernelTotal("gemm", "products", 2, 0.5, 1e9, None)
    terms = {"products": 1.0, "communication/data/waiting": 0.5}
    one = time_breakdown.TimeBreakdown(
        0, 3, {"pp": 0}, "cpu", 1.5, terms, {"data": 0.1}, {"data": (1, 2)}, kernels=(kernel,)
    )
    return written(folder / time_breakdown.ACCOUNTS, f"{one.dumps()}\n" * 2), lambda: time_breakdown.read_breakdowns(
        folder
    )


def trace(folder: Path) -> File:
    made = traces.Written(groups={"1": ("data", (0, 1))}).step(0, 50).kernel("gemm", 1, 2, 3).nccl("1", 3, 4, 9)
    path = made.write(folder / "step-00000003-rank-00000.json")
    return path, lambda: read_trace(path)


def trial(folder: Path) -> Trial:
    return Trial("single", folder, [], [], 2, {"run": {"steps": 3}, "lr": {"peak": 0.1}})


def sweep_results(folder: Path) -> File:
    made = results.SweepResults(folder)
    made.put(trial(folder / "single"), "refused", "no reason")
    return made.path, lambda: results.print_results(results.SweepResults(folder).lines.values(), "loss")


def sweep_start(folder: Path) -> File:
    results.note_start(trial(folder))

    def read() -> None:
        if started := results.read_start(trial(folder)):
            assert (started.get("job") or "0").isdecimal()
            results.changed_since_start(trial(folder), started)

    return folder / results.TRIAL, read


def search_start(folder: Path) -> File:
    settings = {"settings": {"run": {"steps": 3}, "lr": {"peak": 0.1}}, "tried": "compile=true"}
    TuningStudy(folder, [], settings)
    return folder / BEGUN, lambda: TuningStudy(folder, [], settings)


def sweep_status(folder: Path) -> File:
    return written(folder / "status.json", json.dumps({"status": "failed", "step": 1, "reason": "no"})), (
        lambda: results.trial_outcome(folder, 1)
    )


def sweep_error(folder: Path) -> File:
    told = {"message": {"message": "RuntimeError: no", "extraInfo": {"timestamp": "17"}}}
    written(folder / "torchrun" / "latest" / "error.json", "{}")
    return written(folder / "torchrun" / "0" / "run" / "error.json", json.dumps(told)), (
        lambda: results.trial_outcome(folder, 1)
    )


def rank_report(folder: Path) -> File:
    beat = Heartbeat(1, "node", 5, "training", 3, 1.0, 2.0, 3.0)
    group = {"desc": "dp", "ranks": [0, 1], "entered": 4, "number": 4, "what": "all_reduce", "at": "step.py:1"}
    path = written(folder / "rank-1.json", json.dumps(asdict(RankReport(beat, "step.py:1", {"nccl 0": group}))))

    def read() -> None:
        parse_heartbeat(path.read_bytes() if path.is_file() and path.stat().st_size else b"")
        describe_ranks({1: read_report(path)}, {1: beat}, 2)

    return path, read


def slurm_record(folder: Path) -> File:
    return written(folder / "slurm" / "17.json", json.dumps({"idle": 1, "saved": True})), (
        lambda: job.end_job(folder, "17", 1, False, "RUNNING", 3)
    )


def slurm_status(folder: Path) -> File:
    return written(folder / "status.json", json.dumps({"status": "failed", "reason": "MemoryError: 1 TiB"})), (
        lambda: job.end_job(folder, "17", 1, False, "RUNNING", 3)
    )


def wandb_id(folder: Path) -> File:
    return written(folder / "wandb-id", "0123abcd"), lambda: saved_run_id(folder / "wandb-id")


def evaluations(folder: Path) -> File:
    known = {"step-00000001": {"hellaswag": {"acc,none": 0.25, "acc_stderr,none": 0.1, "shots": 0}}}
    return written(folder / "results.json", json.dumps(known)), lambda: known_results(folder)


def page_of(folder: Path) -> str:
    """The page of a run that has nothing else: it names what is damaged, and shows the rest."""
    write_metrics(folder, 1)
    shown = open_folders([folder])
    data = data_of(shown)
    return content_of(shown, data) + json.dumps(data, allow_nan=False)


def searched(name: str) -> Callable[[Path], File]:
    """A file of a search, of which there is a page."""

    def made(folder: Path) -> File:
        write_search(folder)
        return folder / name, lambda: page_of(folder)

    made.__name__ = f"page_{name.split('.')[0]}"
    return made


def page_starts(folder: Path) -> File:
    line = start(40) | {"table": {"model": [["name", "tiny"]]}, "settings": {"lr": {"peak": 0.1}}}
    return written(folder / "starts.jsonl", json.dumps(line) + "\n"), lambda: page_of(folder)


def page_status(folder: Path) -> File:
    told = {"status": "failed", "step": 1, "steps": 2, "reason": "no"}
    return written(folder / "status.json", json.dumps(told)), lambda: page_of(folder)


def page_diagnosis(folder: Path) -> File:
    return written(folder / "diagnosis.json", json.dumps(DIAGNOSIS)), lambda: page_of(folder)


def page_notices(folder: Path) -> File:
    return written(folder / "console.log", "2026-11-22 10:00:21  saved\n" * 3), lambda: page_of(folder)


def hardware(folder: Path) -> File:
    path = written(folder / "machine.yaml", (CONFIGS / "hardware" / "l40s.yaml").read_bytes())
    return path, lambda: load_hardware(str(path))


def overrides(folder: Path) -> File:
    text = "run.steps=3 'lr.peak=1e-3'\n# a comment\n\n+config=debug\n"
    return written(folder / "sweep.txt", text), lambda: job.expand_task([f"@{folder / 'sweep.txt'}"], None)


def recipe(folder: Path) -> File:
    text = json.dumps({"run": {"name": "mine", "steps": 5}, "data": {"sources": {"a": {"kind": "text", "weight": 1}}}})
    source = UserFiles("user", f"user://{folder}")
    return written(folder / "mine.yaml", text), lambda: source.load_config("mine")


def diagnosed(name: str) -> Callable[[Path], File]:
    """A file of the folder of a run that is diagnosed."""

    def made(folder: Path) -> File:
        metrics_lines(folder)
        values = trainer.compose(["+config=debug"], world_size=2) if name == "config.yaml" else None
        first = next(iter(accounts_of(Case({"products": 1.0, "data": 0.5}, ranks=2), random.Random(0), steps=1)))
        contents = {
            "config.yaml": typed.to_yaml(values) if values else "",
            "starts.jsonl": json.dumps({"processes": 2, "hosts": {"node": 2}, "devices": {"CPU": 2}}) + "\n",
            "accounts.jsonl": first.dumps() + "\n",
        }
        return written(folder / name, contents[name]), lambda: to_json(diagnose_run(folder))

    made.__name__ = f"diagnosed_{name.split('.')[0]}"
    return made


KINDS: dict[str, Callable[[Path], File]] = {
    function.__name__: function
    for function in (
        token_manifest,
        shard_description,
        npy,
        jsonl,
        parquet,
        conversations,
        chat_template,
        tokenizer_json,
        tokenizer_config,
        hf_config,
        adapter_config,
        adapter_weights,
        generation_config,
        hf_index,
        hf_weights,
        schedule,
        timeline,
        metrics_lines,
        shortage,
        accounts,
        trace,
        *map(searched, ("search.json", "trials.jsonl")),
        *map(diagnosed, ("config.yaml", "starts.jsonl", "accounts.jsonl")),
        sweep_results,
        sweep_start,
        search_start,
        sweep_status,
        sweep_error,
        rank_report,
        slurm_record,
        slurm_status,
        wandb_id,
        evaluations,
        page_starts,
        page_status,
        page_diagnosis,
        page_notices,
        recipe,
        hardware,
        overrides,
    )
}
KINDS |= {f"jsonl.{kind}": packed(kind) for kind in PACK}
KINDS |= {
    name: (lambda folder, name=name: choice(folder, name)) for name in ("choice.yaml", "conditions.yaml", "chosen.csv")
}

FOUND = {"npy", "jsonl", "parquet", "conversations", *(f"jsonl.{kind}" for kind in PACK)}
"""Kinds whose files `find_files` has found, which takes regular files only."""
