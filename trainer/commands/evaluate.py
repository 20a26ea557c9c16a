"""Benchmarks of a trained model by lm-eval: `trainer eval runs/NAME tasks=[hellaswag,arc_easy] [limit=100]`.

lm-eval opens transformers folders: a checkpoint is exported once, into exports/ beside its run's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.grammar import DTYPES, Command, ModelOptions
from trainer.config import ConfigError
from trainer.config.fields import option
from trainer.util import tables
from trainer.util.exit_codes import requires_extra
from trainer.util.reading import read_json, write_atomic

if TYPE_CHECKING:
    from trainer.checkpointing.loading import SavedModel

RESULTS = "results.json"
"""The file of all numbers."""


@dataclass
class EvalOptions(ModelOptions):
    tasks: list[str] = option(None, "tasks and groups of lm-eval, such as [hellaswag,arc_easy]")
    dtype: str = option("bf16", "type that the model computes in", DTYPES)
    shots: int = option(-1, "examples before each question; -1: as the task has it")
    chat: bool = option(
        False, "each question is a user's message, and its examples are a conversation, which the chat template writes"
    )
    limit: int = option(0, "questions of each task; 0 means all", range="[0, inf)")
    batch: int = option(8, "questions at a time", range="[1, inf)")
    include: str = option("", "folder with task files of your own, which can name Python code that lm-eval runs")
    device: str = option("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))

    def list_problems(self) -> Iterator[str]:
        if not self.tasks:
            yield "tasks=[] names no task; give some, such as tasks=[hellaswag]"


def run(options: EvalOptions) -> None:
    with requires_extra("eval", "trainer eval"):
        import lm_eval.models.huggingface  # which needs more than lm_eval itself
        from lm_eval.tasks import TaskManager
    import torch

    from trainer.checkpointing.loading import open_saved
    from trainer.precision import products

    manager = TaskManager(include_path=options.include or None)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU; use device=cpu or device=auto")
    if problems := [
        f"tasks: lm-eval knows no {task}; `lm-eval ls tasks` lists what there is, and include=FOLDER adds your own"
        for task in options.tasks
        if task not in manager.all_tasks
    ]:
        raise ConfigError(problems)
    saved = open_saved(options.checkpoint, options.weights)
    folder = saved.run or saved.path
    known = known_results(folder)
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    exported = export_checkpoint(saved, options)
    model = {
        "pretrained": str(exported),
        "dtype": str(products.DTYPES[options.dtype]).removeprefix("torch."),
        **text_arguments(exported, options.chat, saved.begin),
    }
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=model,
        tasks=options.tasks,
        apply_chat_template=options.chat,
        fewshot_as_multiturn=options.chat,
        num_fewshot=None if options.shots < 0 else options.shots,
        limit=options.limit or None,
        batch_size=options.batch,
        device=device,
        task_manager=manager,
        log_samples=False,
    )
    name = saved.path.name + ("-ema" if options.weights == "ema" else "")
    how = {"limit": options.limit, "dtype": options.dtype} | ({"chat": True} if options.chat else {})
    measured = {
        # A standard error that does not apply is a text.
        task: {key: value for key, value in values.items() if isinstance(value, (int, float))}
        | {"shots": found["n-shot"].get(task, options.shots)}
        | how
        for task, values in found["results"].items()
    }
    known[name] = known.get(name, {}) | measured
    write_atomic(folder / RESULTS, json.dumps(known, indent=1) + "\n")
    tables.print_rows(
        f"{name} of {folder}",
        [
            {"task": task, "metric": metric, "value": f"{value:.4f}", "stderr": error}
            for task, values in measured.items()
            for metric, (value, error) in read_scores(values).items()
        ],
    )
    print(folder / RESULTS)


def text_arguments(model: Path, chat: bool, begin: list[int] | None = None) -> dict[str, Any]:
    """How lm-eval is to begin texts, which by default it does without BOS: with `begin`, or None: as the tokenizer in
    the folder `model` does, or with chat as its template does alone. Nothing without a tokenizer. Raises `ConfigError`
    for chat without a template."""
    from trainer.data.tokenizer import load_tokenizer

    if not (model / "tokenizer_config.json").is_file():
        return {}
    tokenizer = load_tokenizer(model)
    if chat:
        tokenizer.render_prompt("a")
    begin = tokenizer.begin if begin is None else begin
    first = (begin or [tokenizer.end_id])[0]  # before a text of which every token is scored
    return {"add_bos_token": bool(begin) and not chat, "prefix_token_id": first}


def known_results(folder: Path) -> dict[str, Any]:
    """What earlier evaluations have left in `folder`: checkpoint -> task -> numbers."""
    if not (folder / RESULTS).exists():
        return {}
    return read_json(folder / RESULTS, {str: {str: dict}}, "move it away")


def export_checkpoint(saved: SavedModel, options: EvalOptions) -> Path:
    """The model as a transformers folder: itself, or its export, which is made where it is not there yet."""
    from trainer.checkpointing.loading import merge_adapters
    from trainer.checkpointing.manifest import read_digest
    from trainer.hf import export_model
    from trainer.precision.products import DTYPES

    if saved.run is None and saved.spec.adapter.rank:
        raise ConfigError(
            f"checkpoint={saved.path} holds an adapter alone; write the whole model first: trainer export {saved.path} "
            "OUT"
        )
    if saved.run is None:
        return saved.path
    # A step that is trained again is saved at another time.
    names = [saved.path.name, read_digest(saved.path)[:12], options.dtype, *(["ema"] * (options.weights == "ema"))]
    folder = saved.run / "exports" / "-".join(names)
    if not folder.exists():
        model = merge_adapters(saved)
        export_model(
            model.spec,
            model.tensor,
            folder,
            DTYPES[options.dtype],
            saved.tokenizer,
            generation=saved.generation,
            begin=saved.begin,
        )
    return folder


def read_scores(values: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """By metric, its value and its standard error; lm-eval's keys are `METRIC,FILTER` and `METRIC_stderr,FILTER`."""
    shown = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{kind}")
            label = metric if kind == "none" else f"{metric} ({kind})"
            shown[label] = value, "-" if error is None else f"{error:.4f}"
    return shown


main = Command(
    "eval",
    "Runs benchmarks of lm-eval on a trained model.",
    "trainer eval runs/demo tasks=[hellaswag,arc_easy] limit=100",
    EvalOptions,
    run,
    words=("checkpoint",),
)
