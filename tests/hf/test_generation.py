"""The generation configuration of a transformers folder is carried through runs, exports and merges, and obeyed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import PLAIN, chat_tokenizer, write_conversations
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import trainer
from trainer.commands import evaluate, export, merge, sample
from trainer.config import ConfigError
from trainer.hf import open_generation

VOCABULARY = 259
END, TURN, START = 256, 257, 258
"""Ids of the tokenizer: the end mark of bytes, and the tokens around messages."""

NAMES = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
VALUES: dict[str, st.SearchStrategy] = {
    "eos_token_id": st.lists(st.integers(-2, 300), min_size=1, max_size=4) | st.integers(-2, 300) | st.text(max_size=2),
    "bos_token_id": st.integers(-2, 300),
    "pad_token_id": st.integers(-2, 300) | st.booleans(),
    "do_sample": st.booleans(),
    "temperature": st.floats(0.1, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(1, 60),
    "repetition_penalty": st.floats(1, 2),
    "max_new_tokens": st.integers(-1, 50),
    "stop_strings": st.lists(st.sampled_from(["/etc/passwd", "\n"]), min_size=1, max_size=2),
    "early_stopping": st.sampled_from([True, "never", "sometimes"]),
    "cache_implementation": st.sampled_from(["static", "../elsewhere"]),
    "compile_config": st.just({"backend": "module:function"}),
    "watermarking_config": st.sampled_from([{"greenlist_ratio": 0.5}, {"file": "x"}]),
    "auto_map": st.just({"GenerationConfig": "code.Own"}),
    "custom_generate": st.just("code"),
    "use_cache": st.booleans(),
    "unheard_of": st.integers(),
    "transformers_version": st.just("4.1"),
    "_from_model_config": st.just(True),
}
IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES), st.booleans())
def test_every_option_is_carried_as_it_is_or_named(given_options: dict[str, Any], whole: bool) -> None:
    """whole: the folder has the file; otherwise config.json says which tokens end a text, as transformers has it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / ("generation_config.json" if whole else "config.json")).write_text(json.dumps(given_options))
        kept, notes = open_generation(folder, VOCABULARY)
    for name, value in given_options.items():
        if name in ("transformers_version", "_from_model_config"):
            assert name not in kept
            continue
        named = any(f" {name} is not carried on: " in note for note in notes)
        carried = [kept.get(name)] if name != "eos_token_id" else kept.get(name, [])
        asked = value if name == "eos_token_id" and isinstance(value, list) else [value]
        assert named or carried == asked or not whole and name not in IDS, (name, kept, notes)
        assert name not in IDS or all(0 <= token < VOCABULARY for token in carried if token is not None)
    assert not {"compile_config", "auto_map", "custom_generate", "unheard_of", "use_cache"} & kept.keys()
    GenerationConfig(**kept)


def model_folder(folder: Path, **generation: Any) -> Path:
    """A small Llama with a tokenizer of bytes, whose chat template ends turns with `<|im_end|>`."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)  # so that the next token is far from a tie
    model.save_pretrained(folder)
    tokenizer = chat_tokenizer(folder, PLAIN)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def greedy(folder: Path, prompt: list[int], count: int = 24) -> tuple[list[int], str]:
    """What transformers generates, with the ids that its folder says to stop at, and the text before the stop."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    new = found[0, len(prompt) :].tolist()
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    return new, tokenizer.decode(new[:-1] if new[-1] in stops else new)


def sampled(where: Path, capsys: pytest.CaptureFixture, *options: str) -> str:
    capsys.readouterr()
    command = [f"checkpoint={where}", "tokens=24", "temperature=0", "device=cpu", "dtype=fp32", *options]
    assert sample.main(command) == 0
    return capsys.readouterr().out


def test_a_folder_stops_where_transformers_stops_and_keeps_it_in_exports_and_merges(tmp_path, capsys) -> None:
    """At a token that is neither the tokenizer's end mark nor special: the sixth that the model writes."""
    folder = model_folder(tmp_path / "base", eos_token_id=[END, START])
    prompt = AutoTokenizer.from_pretrained(folder)("ab").input_ids
    free, _ = greedy(folder, prompt)
    stop = next(token for place, token in enumerate(free) if token not in free[:place] and place > 4)
    defaults = {"eos_token_id": [START, stop], "temperature": 0.6, "top_p": 0.9, "do_sample": True, "pad_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps({**defaults, "unheard_of": 1}))
    expected = greedy(folder, prompt)
    assert expected[0] == free[: free.index(stop) + 1] and len(expected[0]) < len(free)

    assert sampled(folder, capsys, "prompt=ab") == "ab" + expected[1] + "\n"
    assert export.main([str(folder), str(tmp_path / "out"), "dtype=fp32"]) == 0
    assert merge.main([str(folder), str(tmp_path / "out"), str(tmp_path / "merged")]) == 0
    assert "unheard_of is not carried on" in capsys.readouterr().err
    for out in (tmp_path / "out", tmp_path / "merged"):
        assert greedy(out, prompt) == expected
        found = GenerationConfig.from_pretrained(out)
        assert {name: getattr(found, name) for name in defaults} == defaults


def compose(folder: Path, *more: str) -> Any:
    common = [
        "+config=debug",
        f"model.from_hf={folder / 'base'}",
        "data.tokenizer=bpe",
        f"data.cache={folder / 'cache'}",
        "data.workers=1",
        "data.eval_fraction=0",
        "batch.sequence_length=64",
        "checkpoint.at_end=true",
        "lr=constant",
        "lr.warmup=0",
        "run.device=cpu",
        "logging.console=none",
    ]
    return trainer.compose([*common, *more])


def test_after_chats_an_export_and_sample_stop_at_the_end_of_a_turn(tmp_path, capsys) -> None:
    """The folder's own stop ids and defaults stay, also where the run is resumed without the folder's file."""
    folder = model_folder(tmp_path / "base", eos_token_id=START, repetition_penalty=1.0, unheard_of=1)
    row = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}]
    write_conversations(tmp_path / "chat.jsonl", [row] * 24)
    chats = ["data=chat", f"data.sources.chat.path={tmp_path / 'chat.jsonl'}", f"run.dir={tmp_path / 'run'}"]
    assert trainer.run(compose(tmp_path, *chats, "run.steps=20", "lr.peak=0.01")).code == 0
    assert "unheard_of is not carried on" in (tmp_path / "run/console.log").read_text()
    (folder / "generation_config.json").unlink()
    assert trainer.run(compose(tmp_path, *chats, "run.steps=30", "lr.peak=0.01")).code == 0

    assert export.main([str(tmp_path / "run"), str(tmp_path / "out"), "dtype=fp32"]) == 0
    found = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert found["eos_token_id"] == [START, END, TURN] and found["repetition_penalty"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    rendered = tokenizer.apply_chat_template(row[:1], add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.apply_chat_template(row[:1], add_generation_prompt=True, return_dict=False)
    assert greedy(tmp_path / "out", prompt) == ([*b"ok", TURN], "ok")
    typed = "prompt=" + rendered.replace("\n", "\\n")
    for where in (tmp_path / "run", tmp_path / "out"):
        assert sampled(where, capsys, "prompt=Hi", "chat=true") == rendered + "ok\n"
        (tmp_path / "prompts").write_text(typed.removeprefix("prompt="))
        assert rendered + "ok\n" in sampled(where, capsys, f"prompts={tmp_path / 'prompts'}")


def test_stop_ids_of_another_tokenizer_are_left_out(tmp_path) -> None:
    """data.tokenizer names one in which the ids of the folder's configuration are other tokens."""
    model_folder(tmp_path / "base", eos_token_id=TURN, pad_token_id=END)
    one = ["data.tokenizer=bytes", "data.sources.stdlib.limit=3", f"run.dir={tmp_path / 'run'}", "run.steps=1"]
    assert trainer.run(compose(tmp_path, *one)).code == 0
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out"), "dtype=fp32"]) == 0
    found = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert found["eos_token_id"] == END == found["pad_token_id"]
    assert (
        f"eos_token_id=[{TURN}] of its generation configuration is left out"
        in (tmp_path / "run/console.log").read_text()
    )


def test_what_cannot_be_prompted_is_refused(tmp_path, capsys) -> None:
    folder = model_folder(tmp_path / "base", eos_token_id=END)
    chat_tokenizer(folder, None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for options, words in (
        (["prompt=a", "chat=true"], "chat=true: the tokenizer has no chat template"),
        (["chat=true"], "there is none; give prompt=TEXT"),
        (["prompt=a", "chat=maybe"], "chat=maybe must be true or false"),
    ):
        capsys.readouterr()
        assert sample.main([f"checkpoint={folder}", *options]) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1, error
    (folder / "generation_config.json").write_text("[1")
    with pytest.raises(ConfigError, match="generation_config.json"):
        open_generation(folder, VOCABULARY)


def test_lm_eval_begins_texts_as_the_tokenizer_does(tmp_path) -> None:
    """Without these arguments it adds no BOS; with a chat template, that alone writes it."""
    folder = model_folder(tmp_path / "base")
    assert evaluate.text_arguments(folder, False) == {"add_bos_token": False, "prefix_token_id": END}
    tokenizer = trainer.data.tokenizer.load_tokenizer(folder)
    tokenizer.begin_with([START])
    tokenizer.save(folder)
    assert evaluate.text_arguments(folder, False) == {"add_bos_token": True, "prefix_token_id": START}
    assert evaluate.text_arguments(folder, False, []) == {"add_bos_token": False, "prefix_token_id": END}
    assert evaluate.text_arguments(folder, True) == {"add_bos_token": False, "prefix_token_id": START}
    chat_tokenizer(tmp_path / "plain", None)
    with pytest.raises(ConfigError, match="no chat template"):
        evaluate.text_arguments(tmp_path / "plain", True)
    assert evaluate.text_arguments(tmp_path, False) == {}
