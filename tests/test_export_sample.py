"""What comes after training: a checkpoint becomes a transformers folder, and text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import warm_python

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.loading import open_saved
from trainer.commands import export, sample
from trainer.commands import main as trainer_main
from trainer.config import CheckpointConfig
from trainer.config.model import ModelSpec
from trainer.data.tokenizer import byte_tokenizer
from trainer.generate.sharded_model import place_saved
from trainer.model.cache import BLOCK
from trainer.model.initial import initialize_model
from trainer.model.rotary import Rotary
from trainer.model.transformer import Transformer
from trainer.parallel.parallelize import keep_buffers

transformers = pytest.importorskip("transformers")

PROMPT = "def first(values):\n    return values[0]\n\n\ndef last(values):\n    return "


def mistral() -> ModelSpec:
    spec = ModelSpec(name="m", family="mistral", vocab_size=257, width=32, depth=2, max_length=256)
    spec.attention.kv_heads, spec.attention.window, spec.feed_forward.width = 4, 16, 48
    return spec


def gpt2() -> ModelSpec:
    spec = ModelSpec(
        name="g", family="gpt2", vocab_size=257, width=32, depth=2, max_length=120, tied=True, learned_positions=True
    )
    a, f = spec.attention, spec.feed_forward
    a.bias = a.output_bias = f.bias = True
    a.positions, f.kind, f.width, f.activation, spec.norm.kind = "none", "plain", 64, "gelu_tanh", "layer"
    return spec


def make_run(
    folder: Path, spec: ModelSpec, steps: tuple[int, ...] = (1,), averaged: bool = False
) -> dict[int, Transformer]:
    """A run's folder as training leaves it, and the models in its checkpoints. averaged: with averages of the weights,
    which are half of them."""
    byte_tokenizer().save(folder / "tokenizer")
    checkpointer, models = Checkpointer(folder / "checkpoints", CheckpointConfig(keep_last=0)), {}
    spec.init.std = 0.3  # so that the next token is far from a tie
    for step in steps:
        models[step] = Transformer(spec)
        initialize_model(models[step], spec, step, torch.device("cpu"))
        tensors = {f"model.{name}": parameter.detach() for name, parameter in models[step].named_parameters()}
        if averaged:
            tensors |= {f"ema.{name}": parameter.detach() / 2 for name, parameter in models[step].named_parameters()}
        checkpointer.save(step, {**tensors, "optimizer.extra": torch.ones(3)}, {"spec": spec.to_dict()}, wait=True)
        assert checkpointer.saved_step == step, checkpointer.poll()
    checkpointer.close()
    return models


@pytest.mark.parametrize("spec", [mistral(), gpt2()], ids=["mistral", "gpt2"])
def test_exported_run_opens_and_generates_the_same(tmp_path: Path, spec: ModelSpec, capsys) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    models = make_run(run, spec, (1, 2))
    assert export.main([str(run), str(out), "dtype=fp32"]) == 0
    assert f"{out}: weights in fp32\n" in capsys.readouterr().out
    opened = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert opened.generation_config.eos_token_id == tokenizer.eos_token_id == 256

    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert tokens.shape[1] > BLOCK > 16
    with torch.no_grad():
        torch.testing.assert_close(models[2](tokens), opened(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    expected = opened.generate(tokens, max_new_tokens=30, do_sample=False)[0].tolist()
    capsys.readouterr()
    assert sample.main([str(run), f"prompt={PROMPT}", "tokens=30", "temperature=0", "device=cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n" and not shown.err


def test_positions_are_rotated_by_the_same_angles_in_every_type(tmp_path: Path) -> None:
    """Frequencies that were rounded to bf16 would turn late positions by another angle."""
    spec = mistral()
    make_run(tmp_path, spec)
    exact = Rotary(spec.attention.rope, spec.layer(0).attention.head_dim, spec.max_length)
    exact.reset_buffers()
    cpu, late = torch.device("cpu"), torch.tensor([spec.max_length - 1])
    model = place_saved(open_saved(str(tmp_path)), cpu, "bf16").stages[0]
    cast = Transformer(spec).to(torch.bfloat16)
    keep_buffers(cast, cpu)
    for (rotary,) in (model.rotaries, cast.rotaries):
        for one, other in zip(rotary(late, spec.max_length), exact(late, spec.max_length)):
            assert one.dtype == torch.float32 and torch.equal(one, other)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_checkpoint_folder_names_its_own_step(tmp_path: Path) -> None:
    models = make_run(tmp_path, mistral(), (1, 2))
    for where, step in ((tmp_path / "checkpoints/step-00000001", 1), (tmp_path / "checkpoints", 2), (tmp_path, 2)):
        saved = open_saved(str(where))
        assert saved.tokenizer == tmp_path / "tokenizer" and saved.spec == models[step].spec
        for name, parameter in models[step].named_parameters():
            assert torch.equal(saved.tensor(name), parameter), name


def test_damage_is_passed_over_or_refused(tmp_path: Path, capsys) -> None:
    make_run(tmp_path, mistral(), (1, 2))
    newest = tmp_path / "checkpoints/step-00000002"
    file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert open_saved(str(tmp_path)).path.name == "step-00000001"
    assert file.name in capsys.readouterr().err
    assert export.main([f"checkpoint={newest}", f"out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert f"checkpoint={newest}" in error and file.name in error and not (tmp_path / "out").exists()


def test_prompts_of_a_file_are_continued_together(tmp_path: Path, capsys) -> None:
    """Each as it would be by itself with the most likely tokens, up to a text to stop at."""
    make_run(tmp_path / "run", mistral())
    (tmp_path / "prompts.txt").write_text("def first(values):\\n    return\nclass Queue\n")
    command = [f"checkpoint={tmp_path / 'run'}", "tokens=12", "temperature=0", "device=cpu"]
    texts = []
    for prompt in ("def first(values):\n    return", "class Queue"):
        assert sample.main([*command, f"prompt={prompt}"]) == 0
        texts.append(capsys.readouterr().out)
        assert texts[-1].startswith(prompt)
    together = [*command, f"prompts={tmp_path / 'prompts.txt'}"]
    assert sample.main(together) == 0
    assert capsys.readouterr().out == f"--- 1\n{texts[0]}--- 2\n{texts[1]}"
    stop = texts[1][len("class Queue") + 4 : -1][:2]
    assert sample.main([*command, "prompt=class Queue", f"stop=[\"{stop}\", 'never, ever']"]) == 0
    stopped = texts[1].partition(stop)[0] + "\n"
    assert capsys.readouterr().out == stopped
    assert over_processes(4, [*together, "tp=2", f'stop=["{stop}"]']) == f"--- 1\n{texts[0]}--- 2\n{stopped}"


def over_processes(count: int, command: list[str]) -> str:
    """What the command prints on several processes."""
    done = subprocess.run(
        [warm_python(), "-m", "trainer", "sample", "--processes", str(count), *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm_python(), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_needs_no_torch() -> None:
    code = "import sys; from trainer.commands import sample; sample.main(['--help']); sys.exit('torch' in sys.modules)"
    command, folder = [sys.executable, "-c", code], Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0 and "top-p" in done.stdout, done.stderr


def test_command_line(tmp_path: Path, capsys, monkeypatch) -> None:
    assert sample.main(["checkpont=x", "tokens=many", "device=gpu"]) == 2
    error = capsys.readouterr().err
    assert all(
        word in error
        for word in (
            "did you mean 'checkpoint'?",
            "tokens=many must be a whole number",
            "device=gpu",
            "cpu",
            "checkpoint=... is needed",
        )
    )
    wrong = ["temperature=-1", "tokens=0", "top_p=1.5", "prompt=a", "prompts=b", 'stop=[""]', "seed=-1", "tp=0"]
    assert sample.main(["x", *wrong]) == 2
    error, ranges = capsys.readouterr().err, ("temperature=-1", "tokens=0", "top_p=1.5 must lie in (0, 1]", "seed=-1")
    assert all(
        text in error for text in (*ranges, "tp=0", "prompts=b ex", "stop=['']: every text begins with an empty")
    )
    assert sample.main(["x", "y"]) == 2
    assert "'y' is one word too many; checkpoint can stand without a name" in capsys.readouterr().err
    assert sample.main(["nowhere"]) == 2
    assert "checkpoint=nowhere is no folder; give a run's folder" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    for prompts, words in (("nowhere", "nowhere cannot be read"), (tmp_path / "empty", "is empty; write a prompt")):
        assert sample.main(["checkpoint=x", f"prompts={prompts}"]) == 2
        assert words in capsys.readouterr().err
    assert sample.main([f"checkpoint={tmp_path}"]) == 2
    assert "holds no whole checkpoint" in capsys.readouterr().err
    assert export.main(["--help"]) == 0
    assert "AutoModelForCausalLM" in capsys.readouterr().out

    make_run(tmp_path, mistral())
    command = [f"checkpoint={tmp_path}", "prompt=a = ", "tokens=5", "seed=3"]
    assert sample.main(command) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("a = ") and len(alone) > len("a = \n")
    assert sample.main([*command, "tokens=260"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(alone[:-1]) and "sees 256 tokens (model.max_length), and a prompt of 4" in said.err
    monkeypatch.setenv("WORLD_SIZE", "6")
    for degrees, words in (
        (["tp=3"], "tp=3 does not divide"),
        (["tp=4"], "tp=4 needs a multiple of 4 processes, but 6 run; start 4 or 8 with"),
    ):
        assert sample.main([*command, *degrees]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert trainer_main(["sample", "--processes", "3", *command, "tp=2", "seed=x"]) == 2  # before any process starts
    assert capsys.readouterr().err == "configuration error: seed=x must be a whole number\n"
    assert trainer_main(["sample", "--processes", "3", *command, "tp=2"]) == 2
    assert "error: tp=2 needs a multiple of 2 processes, but 3 run" in capsys.readouterr().err
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    assert sample.main([f"checkpoint={tmp_path}"]) == 2
    assert "tokenizer" in capsys.readouterr().err
