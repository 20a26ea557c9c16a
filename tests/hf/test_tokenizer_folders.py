"""Folders of tokenizers: text has the ids of tokenizer.json, here and in transformers after an export; what else their
files say is used or told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.corpora import config, write_texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

import trainer
from trainer.commands import main as trainer_main
from trainer.config import ConfigError, SourceConfig
from trainer.data.corpus import open_corpus
from trainer.data.tokenizer import load_tokenizer
from trainer.hf.families import FAMILIES
from trainer.hf.folder import copy_tokenizer
from trainer.hf.tokenizer import encode_all, generate_texts
from trainer.observe import metrics

END, TURN, TOOL = "<|endoftext|>", "<|im_end|>", "<tool>"
WORDS = ["the quick brown fox jumps over the lazy dog", "def f(x):\n    return x + 1\n", "2023 650841823 12 it's"] * 9
TEXTS = [
    *WORDS[:3],
    "  two  blanks,\ttabs\n\n and lines \r\n",
    "12345678 3.14 1,000",
    "e\u0301 \ufb01 \uff21 \u00e9 \u00a0",
    "\u4e2d\u6587 \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f467",
    "IT'LL can't I'VE",
    f"a {TURN} b{TOOL} c  {TOOL}d</s>",
]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PARTS: dict[str, tuple[Any, Any, Any]] = {  # normalizer, pre-tokenizer, decoder
    "bytes": (None, BYTES, decoders.ByteLevel()),
    "bytes after a space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
    "single digits": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES]), decoders.ByteLevel()),
    "digits after a space": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)]),
        decoders.ByteLevel(),
    ),
    "three digits": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), "isolated"), BYTES]),
        decoders.ByteLevel(),
    ),
    "compatible characters": (normalizers.NFKC(), BYTES, decoders.ByteLevel()),
    "blanks as characters": (None, pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
}
NORMALIZERS = (
    *(normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.Lowercase()),
    *(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), normalizers.Strip()),
)
CLASSES = (
    *("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "Qwen2Tokenizer", "GPT2TokenizerFast"),
    *("GemmaTokenizer", "GPTNeoXTokenizer", "BertTokenizer", "T5Tokenizer", None),
)
TYPES = (None, "llama", "qwen2", "gemma2", "gpt2")


@cache
def state(parts: str) -> str:
    """A tokenizer.json of at most 401 tokens."""
    normalizer, splitter, decoder = PARTS[parts]
    backend = Tokenizer(models.BPE())
    if normalizer:
        backend.normalizer = normalizer
    backend.pre_tokenizer, backend.decoder = splitter, decoder
    backend.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[END, TURN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken(TOOL, lstrip=True, normalized=False)])
    return backend.to_str()


def write_folder(folder: Path, backend: Tokenizer, model_type: str | None = None, **described: Any) -> Path:
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **described}))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def ids_of(backend: Tokenizer, plain: bool) -> list[list[int]]:
    backend.encode_special_tokens = plain
    return [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]


def combinations() -> Iterator[tuple[str, str | None, str | None]]:
    """Every class with every model type, and each of these pairs with one of the pre-tokenizers."""
    kinds = list(PARTS)
    for row, name in enumerate(CLASSES):
        for column, model_type in enumerate(TYPES):
            yield kinds[(row + column) % len(kinds)], name, model_type


@pytest.mark.parametrize("named", CLASSES, ids=str)
def test_text_has_the_ids_of_tokenizer_json(named, tmp_path):
    changed = 0
    for parts, name, model_type in combinations():
        if name != named:
            continue
        backend = Tokenizer.from_str(state(parts))
        described = {"tokenizer_class": name} if name else {}
        folder = write_folder(tmp_path / f"{model_type}", backend, model_type, **described)
        tokenizer = load_tokenizer(folder)
        expected = ids_of(backend, True)
        assert [tokenizer.encode(text) for text in TEXTS] == expected, (parts, model_type)
        assert list(map(tokenizer.decode, expected)) == [backend.decode(ids) for ids in expected]
        assert [ids for ids, _ in tokenizer.encode_special(TEXTS)] == ids_of(backend, False)
        assert (tokenizer.end_id, tokenizer.special_tokens["eos_token"]) == (0, END)
        try:
            theirs = [AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False) for text in TEXTS]
        except Exception:
            theirs = None
        if theirs != ids_of(backend, False):
            changed += 1
            assert any("tokenizer.json is used as it is" in note for note in tokenizer.notes)
    assert changed or named not in ("Qwen2Tokenizer", "GPT2TokenizerFast"), "this class is not rebuilt any more"


def test_a_class_that_is_not_used_still_names_its_special_tokens(tmp_path):
    """The end mark is a default of the class, and no file names it."""
    folder = write_folder(tmp_path / "folder", Tokenizer.from_str(state("three digits")), eos_token=END)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.end_id == 0 and "makes other tokens, as GPT2Tokenizer;" in tokenizer.notes[0]


def template_of(backend: Tokenizer) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{TURN} $A", pair=None, special_tokens=[(TURN, backend.token_to_id(TURN))]
    )


def changed(part: str, value: Any) -> Tokenizer:
    """The tokenizer of bytes with another part, over the same vocabulary."""
    backend = Tokenizer.from_str(state("bytes"))
    setattr(backend, part, value)
    return backend


def test_the_generated_texts_tell_tokenizers_apart():
    """Of one vocabulary, which differ in one part, or in the flags or kind of one token."""
    backend = Tokenizer.from_str(state("bytes"))
    others = [changed("normalizer", normalizer) for normalizer in NORMALIZERS]
    others += [changed("pre_tokenizer", part) for _, part, _ in PARTS.values() if part is not BYTES]
    others += [changed("post_processor", template_of(backend)), changed("decoder", decoders.Metaspace())]
    for flag in ("lstrip", "rstrip", "special", "single_word"):
        raw = json.loads(state("bytes"))
        raw["added_tokens"][-1][flag] ^= True
        others.append(Tokenizer.from_str(json.dumps(raw)))
    texts = generate_texts([END, TURN, TOOL])
    seen = [json.dumps(encode_all(one, texts)) for one in (backend, *others)]
    assert len({*seen}) == len(seen) == 18
    assert encode_all(Tokenizer.from_str(state("bytes")), texts) == encode_all(backend, texts)


SETTINGS: dict[str, dict[str, Any]] = {
    "few": {},
    "chat": {"chat_template": "{{ messages }}", "pad_token": END, "extra_special_tokens": [TURN]},
    "names": {"extra_special_tokens": {"turn_token": TURN}, "clean_up_tokenization_spaces": True},
    "spaces": {"add_prefix_space": True, "model_max_length": 7},
    "rebuilt": {"tokenizer_class": "Qwen2Tokenizer"},
}


KINDS = [*SETTINGS, "file"]
EXPORTED = [
    (family, kind)
    for place, family in enumerate(FAMILIES)
    for number, kind in enumerate(KINDS)
    if family == "qwen2" or number in (0, 1 + place % (len(KINDS) - 1))
]
"""All settings with the family that transformers rebuilds, and two of them with every other family."""


@pytest.mark.parametrize("family, settings", EXPORTED)
def test_exports_open_with_the_ids_of_the_run(family, settings, tmp_path):
    """transformers 4.57, of which no test runs, opens the class that is named and reads add_prefix_space; with a list
    as extra_special_tokens it fails."""
    turn = [*FAMILIES].index(family) + len(settings)
    for number, parts in enumerate(PARTS):
        if family != "qwen2" and number != turn % len(PARTS):
            continue
        backend = Tokenizer.from_str(state(parts))
        if number % 2:
            backend.post_processor = template_of(backend)
        source = write_folder(tmp_path / f"source{number}", backend, **SETTINGS.get(settings, {}))
        tokenizer = load_tokenizer(source / "tokenizer.json" if settings == "file" else source)
        tokenizer.save(tmp_path / f"run{number}")
        out = tmp_path / f"out{number}"
        out.mkdir()
        copy_tokenizer(tmp_path / f"run{number}", out, family)
        (out / "config.json").write_text(json.dumps({"model_type": family}))
        opened = AutoTokenizer.from_pretrained(out)
        first = [backend.token_to_id(TURN)] * (number % 2)
        expected = [ids for ids, _ in tokenizer.encode_special(TEXTS)]
        assert [opened(text).input_ids for text in TEXTS] == [[*first, *ids] for ids in expected], parts
        assert list(map(opened.decode, expected)) == [
            backend.decode(ids, skip_special_tokens=False) for ids in expected
        ]
        assert (opened.eos_token_id, len(opened)) == (tokenizer.end_id, tokenizer.vocab_size)
        assert opened.chat_template == tokenizer.chat_template
        again = load_tokenizer(out)
        assert (again.digest, again.notes) == (tokenizer.digest, [])
        described = json.loads((out / "tokenizer_config.json").read_text())
        assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert described["add_prefix_space"] == ("after a space" in parts)
        assert described.get("extra_special_tokens") == SETTINGS["names"]["extra_special_tokens"] or settings != "names"
        assert isinstance(described.get("extra_special_tokens", {}), dict)
        assert not {"is_local", "local_files_only"} & {*described}


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_add_no_default_tokens(family, tmp_path):
    """Some classes add tokens of theirs to a vocabulary without them, with ids beyond the model's."""
    backend = Tokenizer.from_str(state("bytes").replace(END, "<eos>"))
    tokenizer = load_tokenizer(write_folder(tmp_path / "source", backend, eos_token="<eos>"))
    tokenizer.save(tmp_path / "run")
    (tmp_path / "out").mkdir()
    copy_tokenizer(tmp_path / "run", tmp_path / "out", family)
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": family}))
    opened = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (len(opened), opened.special_tokens_map) == (tokenizer.vocab_size, {"eos_token": "<eos>"})
    assert opened.encode(END, add_special_tokens=False) == tokenizer.encode(END)


def test_notes_reach_the_start_and_refusals(tmp_path):
    folder = write_folder(tmp_path / "folder", Tokenizer.from_str(state("bytes")), pad_token="<pad>")
    setup = config(tmp_path, corpus=SourceConfig("text", str(write_texts(tmp_path / "files", WORDS * 9))))
    setup.data.tokenizer, setup.model.vocab_size = str(folder), 512
    assert any("lacks: <pad>" in note for note in open_corpus(setup).notes)
    setup.model.vocab_size = Tokenizer.from_str(state("bytes")).get_vocab_size()
    with pytest.raises(ConfigError, match="tokens, more than the model's vocab_size=.* lacks: <pad>"):
        open_corpus(setup)


def added(content: str, **options: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **flags, **options}


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {  # file, what it says, what is told
    "mark": ("special_tokens_map.json", {"eos_token": TURN}, "name different tokens as eos_token; that of special_"),
    "mark, listed": (
        "both",
        {"eos_token": TURN, "added_tokens_decoder": {"0": added(END, special=True)}},
        "name different tokens as eos_token; that of tokenizer_config.json is used",
    ),
    "mark, nothing listed": (
        "both",
        {"eos_token": TURN, "added_tokens_decoder": {}},
        "name different tokens as eos_token; that of tokenizer_config.json is used",
    ),
    "id": (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"7": added(TOOL, lstrip=True)}},
        "gives <tool> another id",
    ),
    "unknown mark": ("tokenizer_config.json", {"pad_token": "<pad>"}, "add tokens that tokenizer.json lacks: <pad>"),
    "unknown token": ("added_tokens.json", {"<new>": 400}, "add tokens that tokenizer.json lacks: <new>"),
    "space": ("tokenizer_config.json", {"add_prefix_space": True}, "has add_prefix_space=true, tokenizer.json the opp"),
    "truncation": (
        "tokenizer.json",
        {"truncation": 3},
        "not applied, because documents are tokenised whole: truncation to 3 tokens, padding",
    ),
    "lower case": (
        "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
        "tokenizer.json is used as it is",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_is_told(case, tmp_path):
    file, says, told = CONTRADICTIONS[case]
    backend = Tokenizer.from_str(state("bytes"))
    if "truncation" in says:
        backend.enable_truncation(3)
        backend.enable_padding(length=9, pad_token=END)
    config = {} if file in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json") else dict(says)
    if file == "both":
        config |= {"eos_token": END}
    folder = write_folder(tmp_path / "folder", backend, **{"tokenizer_class": "PreTrainedTokenizerFast", **config})
    if file == "both":
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": TURN}))
    elif not config and file != "tokenizer.json":
        (folder / file).write_text(json.dumps(says))
    tokenizer = load_tokenizer(folder)
    (note,) = tokenizer.notes
    assert note.startswith(f"data.tokenizer={folder}: ") and told in note
    backend.no_truncation()
    backend.no_padding()
    assert [tokenizer.encode(text) for text in TEXTS] == ids_of(backend, True)
    assert tokenizer.backend.id_to_token(tokenizer.end_id) == (TURN if case == "mark" else END)
    (tmp_path / "out").mkdir()
    copy_tokenizer(folder, tmp_path / "out", "llama")
    again = load_tokenizer(tmp_path / "out")
    assert (again.digest, again.end_id, again.notes) == (tokenizer.digest, tokenizer.end_id, [])


def test_a_folder_without_contradictions_has_no_notes(tmp_path):
    for number, parts in enumerate(PARTS):
        says = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": "after a space" in parts}
        assert not load_tokenizer(write_folder(tmp_path / str(number), Tokenizer.from_str(state(parts)), **says)).notes


def test_flags_of_added_tokens_are_those_of_the_file_that_transformers_takes(tmp_path):
    """tokenizer_config.json changes the flags of a token; the export keeps the change."""
    backend = Tokenizer.from_str(state("bytes"))
    listed = {END: added(END, special=True), TURN: added(TURN, special=True), TOOL: added(TOOL, rstrip=True)}
    listed = {str(backend.token_to_id(name)): token for name, token in listed.items()}
    says = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": listed}
    folder = write_folder(tmp_path / "folder", backend, **says)
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    expected = [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
    assert expected != ids_of(backend, False) and not tokenizer.notes
    tokenizer.save(tmp_path / "saved")
    for opened in (tokenizer, load_tokenizer(tmp_path / "saved")):
        assert [ids for ids, _ in opened.encode_special(TEXTS)] == expected


def test_a_run_continues_from_its_export_where_it_ended(tmp_path):
    """Family qwen2 with a trained tokenizer, which transformers 5 rebuilds with qwen2's pre-tokenizer."""
    write_texts(
        tmp_path / "texts", [f"{word} {number}  {number * 7919}\n" for number in range(300) for word in WORDS[:3]]
    )
    common = [
        "data=text",
        f"data.sources.text.path={tmp_path / 'texts'}",
        f"data.cache={tmp_path / 'cache'}",
        "data.workers=1",
        "run.device=cpu",
        "eval.at_start=true",
        "eval.every=1000",
        "batch.sequence_length=64",
        "batch.global_size=8",
        "batch.micro_size=8",
        "logging.console=none",
    ]
    model = ["model.family=qwen2", "model.depth=1", "model.width=32", "model.vocab_size=320", "model.attention.heads=2"]
    model += ["model.attention.bias=true", "data.vocab_size=320", "lr.peak=0.02", "run.steps=12"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert trainer.run(trainer.compose([*common, *model, f"run.dir={first}"])).code == 0
    trainer_main(["export", str(first), str(tmp_path / "out"), "dtype=fp32"])
    again = [f"model.from_hf={tmp_path / 'out'}", "run.steps=1", "lr.warmup=0", f"run.dir={second}"]
    assert trainer.run(trainer.compose([*common, *again])).code == 0
    ended, begun = (
        [row["eval_loss"] for row in metrics.read_metrics(run) if row.get("eval_loss")] for run in (first, second)
    )
    assert ended[-1] < ended[0] - 1
    assert begun[0] == pytest.approx(ended[-1], abs=1e-4)
