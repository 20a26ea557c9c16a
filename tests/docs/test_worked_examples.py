"""The commands of the worked examples in docs/recipes.md, in order and as they stand, with a tiny model and corpus."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from support.corpora import chat_tokenizer, texts
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

from trainer.commands import main
from trainer.data.tokenizer import byte_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

TINY = "model=tiny model.width=16 model.depth=1 model.vocab_size=257 batch.sequence_length=32 batch.global_tokens=256"
SMALL = {
    "A 3B model from Parquet to an export": f"{TINY} batch.micro_size=4 run.steps=3 eval.sequences=4",
    "A model tuned on conversations": "batch.sequence_length=512 batch.global_size=4 run.steps=30 lr.peak=3e-3 "
    "parallel=ddp activation=none eval.sequences=2",
}
"""Example -> what makes it small."""

COMMON = "data.cache=cache run.device=cpu precision=fp32 compile=false lr.warmup=1 logging=quiet data.workers=1"

TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% for call in message.tool_calls or [] -%}
{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% endgeneration %}{% else -%}
{{ message.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def read_commands(example: str) -> list[list[str]]:
    """The commands of an example that need no network."""
    section = re.split(r"^## ", PAGE.read_text().split(f"## {example}\n")[1], flags=re.M)[0]
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", section, re.S)).splitlines()
    words = [shlex.split(line)[1:] for line in lines if line.startswith("trainer ")]
    return [one for one in words if one[0] not in ("eval", "estimate", "report")]


def run_example(example: str, capsys: pytest.CaptureFixture) -> dict[str, str]:
    """What each command printed, by its word."""
    printed = {}
    for word, *arguments in read_commands(example):
        arguments = [one for one in arguments if one not in ("--gpus", "8")]
        if any(one.startswith("+config=") for one in arguments):
            arguments += [*SMALL[example].split(), *COMMON.split()]
        capsys.readouterr()
        assert main([word, *arguments]) == 0, (word, capsys.readouterr())
        printed[word] = capsys.readouterr().out
    return printed


def test_from_parquet_to_an_export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fineweb-edu" / "sample").mkdir(parents=True)
    rows = [{"text": text, "url": "x"} for text in texts(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "fineweb-edu/sample/a.parquet")
    byte_tokenizer().save("tokenizer")
    printed = run_example("A 3B model from Parquet to an export", capsys)
    assert "columns not read: url (200 rows)" in printed["prepare"] and "200, of which" in printed["prepare"]
    assert "100.0% learned" in printed["show"] and "Photosynthesis is" in printed["sample"]
    model = AutoModelForCausalLM.from_pretrained("exports/llama32_3b")
    tokenizer = AutoTokenizer.from_pretrained("exports/llama32_3b")
    assert model(torch.tensor([tokenizer("Photosynthesis").input_ids])).logits.isfinite().all()


def test_a_model_tuned_on_conversations_with_tools(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat_tokenizer(tmp_path / "qwen3", TEMPLATE)
    with open("chats.jsonl", "w") as file:
        for number in range(40):
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": number, "b": 1}}}
            messages = [
                {"role": "user", "content": "What can you do?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": str(number + 1)},
                {"role": "assistant", "content": "I add."},
            ]
            tools = {"tools": TOOLS} if number % 2 else {}
            file.write(json.dumps({"id": number, "messages": messages if tools else messages[::3], **tools}) + "\n")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=288, head_dim=32, intermediate_size=64, max_position_embeddings=512, **sizes)
    )
    made.generation_config = GenerationConfig(eos_token_id=[256], do_sample=True, temperature=0.6)
    made.save_pretrained("qwen3")
    printed = run_example("A model tuned on conversations", capsys)
    assert "columns not read: id (40 rows)" in printed["prepare"]
    assert "+ add" in printed["show"] and "- <|im_start|>user" in printed["show"]
    tokenizer, model = (one.from_pretrained("exports/tuned") for one in (AutoTokenizer, AutoModelForCausalLM))
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = model.generation_config
    assert settings.eos_token_id == [256, stop] and settings.do_sample and settings.temperature == 0.6
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What can you do?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=100)[0, prompt["input_ids"].shape[1] :].tolist()
    assert answer[-1] in settings.eos_token_id and len(answer) < 100, "the model stops where it was taught to"
