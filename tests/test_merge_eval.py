"""Averages of models, and benchmarks by lm-eval."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_export_sample import gpt2, make_run, mistral

from trainer.checkpointing.loading import open_saved
from trainer.commands import evaluate, export, merge, sample
from trainer.hf import HFWeights, spec_from_hf
from trainer.model.transformer import Transformer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> tuple[Path, dict[int, Transformer]]:
    """Two checkpoints of one run, the first with an average of the weights, also as a transformers folder."""
    folder = tmp_path_factory.mktemp("models")
    models = make_run(folder / "run", mistral(), (1, 2), averaged=True)
    assert export.main([f"checkpoint={folder / 'run'}", f"out={folder / 'hf'}", "dtype=fp32"]) == 0
    return folder, models


def weights(folder: Path) -> dict[str, torch.Tensor]:
    spec = spec_from_hf(folder)
    read = HFWeights(folder, spec)
    return {name: read(name, info) for name, info in read.infos.items()}


def test_a_merged_model_is_the_average_and_can_be_used(root, tmp_path, capsys) -> None:
    """Of a checkpoint and a transformers folder; transformers, sampling and initial weights take the result."""
    folder, models = root
    first, out = folder / "run/checkpoints/step-00000001", tmp_path / "merged"
    assert merge.main([str(first), str(folder / "hf"), str(out), "weights=[3,1]"]) == 0
    one, two = (dict(models[step].named_parameters()) for step in (1, 2))
    for name, value in weights(out).items():
        torch.testing.assert_close(value, 0.75 * one[name] + 0.25 * two[name], msg=name)
    capsys.readouterr()
    command = [f"checkpoint={out}", "prompt=a = ", "tokens=4", "device=cpu"]
    assert sample.main(command) == 0 and capsys.readouterr().out.startswith("a = ")
    again = tmp_path / "again"
    assert export.main([f"checkpoint={out}", f"out={again}", "dtype=fp32"]) == 0
    assert all(torch.equal(value, weights(out)[name]) for name, value in weights(again).items())
    assert {path.name for path in again.iterdir()} == {path.name for path in out.iterdir()}


def test_models_of_transformers_own_code_are_merged_however_they_are_stored(tmp_path) -> None:
    from support.code_models import small_values
    from transformers import AutoConfig, AutoModelForCausalLM

    models = []
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        torch.manual_seed(seed)
        values = {**small_values("olmo"), "eos_token_id": 5 + seed}
        models.append(AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).to(dtype))
        models[-1].save_pretrained(tmp_path / str(seed))
    assert merge.main([f"{tmp_path}/0", f"{tmp_path}/1", f"{tmp_path}/out"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for (name, value), one, other in zip(merged.items(), *(model.state_dict().values() for model in models)):
        torch.testing.assert_close(value, (one + other.float()) / 2, msg=name)


def test_models_are_read_one_tensor_at_a_time(root, tmp_path, monkeypatch) -> None:
    folder, _ = root
    read: list[str] = []

    def noting(checkpoint: str):
        saved = open_saved(checkpoint)
        return replace(saved, tensor=lambda name: (read.append(name), saved.tensor(name))[1])

    monkeypatch.setattr("trainer.checkpointing.loading.open_saved", noting)
    assert merge.main([str(folder / "run"), str(folder / "hf"), str(tmp_path / "out")]) == 0
    assert read[::2] == read[1::2] and len(read) == 2 * len(set(read))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{run}", "{other}", "{out}"], ["is another model than", "family is gpt2 against mistral"]),
        (["{run}", "{out}"], ["two models or more"]),
        (["{run}", "{hf}", "{out}", "weights=[1]"], ["weights=[1.0] has 1 numbers for 2 models"]),
        (["{run}", "{hf}", "{out}", "weights=[1,-1]"], ["add up to 0"]),
        (["{run}", "{hf}", "{out}", "weights=[1,b]"], ["weights=[1,b] must be a list of numbers"]),
        (["{run}", "{hf}", "{run}"], ["exists and is not empty"]),
        ([], ["models=... is needed", "out=... is needed"]),
    ],
)
def test_what_cannot_be_merged_is_refused(root, tmp_path, capsys, arguments, words) -> None:
    folder, _ = root
    make_run(tmp_path / "other", gpt2())
    places = {"run": folder / "run", "hf": folder / "hf", "other": tmp_path / "other", "out": tmp_path / "out"}
    assert merge.main([argument.format(**places) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


def test_the_average_of_the_weights_is_exported_and_sampled(root, tmp_path, capsys) -> None:
    folder, models = root
    out = tmp_path / "out"
    assert export.main([f"checkpoint={folder / 'run'}", f"out={out}", "dtype=fp32", "weights=ema"]) == 0
    for name, parameter in models[2].named_parameters():
        assert torch.equal(weights(out)[name], parameter / 2), name
    assert sample.main([f"checkpoint={folder / 'run'}", "weights=ema", "tokens=1", "device=cpu"]) == 0
    make_run(tmp_path / "plain", mistral())
    capsys.readouterr()
    for place, words in ((tmp_path / "plain", "optimizer.ema.decay=0"), (out, "transformers folder")):
        assert sample.main([f"checkpoint={place}", "weights=ema"]) == 2
        assert words in capsys.readouterr().err


@pytest.fixture
def lm_eval(monkeypatch):
    """What stands for lm-eval: a task that measures one weight of the model that it is given."""
    asked = []

    def simple_evaluate(model, model_args, tasks, **more):
        asked.append({"model": model, **model_args, **more})
        value = float(weights(Path(model_args["pretrained"]))["norm.weight"].mean())
        results = {task: {"acc,none": value, "acc_stderr,none": 0.5, "alias": task} for task in tasks}
        return {"results": results, "n-shot": dict.fromkeys(tasks, 2)}

    manager = SimpleNamespace(all_tasks=["mean", "other"])
    names = ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks")
    modules = {name: ModuleType(name) for name in names}
    modules["lm_eval"].simple_evaluate = simple_evaluate
    modules["lm_eval"].models = modules["lm_eval.models"]
    modules["lm_eval.tasks"].TaskManager = lambda include_path: manager
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_evaluations_are_kept_by_checkpoint_and_export_once(tmp_path, lm_eval, capsys) -> None:
    run = tmp_path / "run"
    make_run(run, mistral(), averaged=True)
    common = [str(run), "dtype=fp32", "device=cpu"]
    assert evaluate.main([*common, "tasks=[mean]", "limit=7", "shots=2"]) == 0
    shown = capsys.readouterr().out
    assert "mean" in shown and "1.0000" in shown and "0.5000" in shown and str(run / "results.json") in shown
    assert lm_eval[0]["add_bos_token"] is False and lm_eval[0]["prefix_token_id"] == 256
    assert lm_eval[0]["apply_chat_template"] is False
    assert evaluate.main([*common, "tasks=[mean]", "chat=true"]) == 2 and len(lm_eval) == 1
    assert "chat=true: the tokenizer has no chat template" in capsys.readouterr().err
    assert lm_eval[0]["limit"] == 7 and lm_eval[0]["num_fewshot"] == 2 and lm_eval[0]["dtype"] == "float32"
    (folder,) = (run / "exports").iterdir()
    stamp = folder.stat().st_mtime_ns
    assert evaluate.main([*common, "tasks=[mean,other]"]) == 0
    assert [path.stat().st_mtime_ns for path in (run / "exports").iterdir()] == [stamp]
    assert evaluate.main([*common, "tasks=[mean]", "weights=ema"]) == 0
    known = json.loads((run / "results.json").read_text())
    assert known["step-00000001"].keys() == {"mean", "other"} and known["step-00000001"]["mean"]["limit"] == 0
    assert known["step-00000001-ema"]["mean"] == {
        "acc,none": 0.5,
        "acc_stderr,none": 0.5,
        "shots": 2,
        "limit": 0,
        "dtype": "fp32",
    }
    for wrong, words in (("tasks=[meen]", "lm-eval knows no meen"), ("batch=0", "batch=0 must be at least 1")):
        assert evaluate.main([*common, "tasks=[mean]", wrong]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_one_line_says_how_to_install_it(capsys) -> None:
    assert evaluate.main(["runs/none", "tasks=[hellaswag]"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'composable-trainer[eval]'" in error and len(error.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")
def test_lm_eval_answers_a_task_of_a_file(root, tmp_path) -> None:
    folder, _ = root
    rows = [{"question": f"{a} and", "choices": ["one", "two"], "answer": a % 2} for a in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"task": "local_words", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}, "doc_to_text": "{{question}}"}
    task |= {"doc_to_target": "answer", "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "words.yaml").write_text(json.dumps(task))
    command = [str(folder / "run"), "tasks=[local_words]", f"include={tmp_path}", "device=cpu", "dtype=fp32"]
    assert evaluate.main(command) == 0
    known = json.loads((folder / "run/results.json").read_text())
    assert 0 <= known["step-00000002"]["local_words"]["acc,none"] <= 1
