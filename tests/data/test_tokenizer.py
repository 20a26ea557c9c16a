"""Tokenizers: reversible, opened and saved as others do, and never fooled by text that spells an end mark."""

import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import config, texts, write_texts
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.config import ConfigError, SourceConfig
from trainer.data.corpus import open_corpus
from trainer.data.tokenizer import END, byte_tokenizer, load_tokenizer, train_tokenizer

TEXT = "def f(x):\n    return 'äöü €', 12345 <|endoftext|>\n\t"
BYTES = byte_tokenizer()
BPE = train_tokenizer(texts(200), 300)


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_bytes_are_bytes(text):
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_bpe_is_reversible(text):
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.end_id not in BPE.encode(text)


def test_sizes_and_end_marks():
    assert (BYTES.vocab_size, BYTES.end_id) == (257, 256)
    assert BPE.vocab_size == 300 and len(BPE.encode("document 7")) < len("document 7")
    assert BPE.encode_batch([TEXT, "a"]) == [BPE.encode(TEXT), BPE.encode("a")]


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_saved_folder_opens_in_transformers_and_here(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    theirs, plain = AutoTokenizer.from_pretrained(tmp_path), TEXT.replace(END, "")
    assert theirs.encode(plain, add_special_tokens=False) == tokenizer.encode(plain)
    assert theirs.eos_token_id == tokenizer.end_id and len(theirs) == tokenizer.vocab_size
    for again in (
        load_tokenizer(tmp_path),
        load_tokenizer(tmp_path / "tokenizer.json"),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert again.encode(TEXT) == tokenizer.encode(TEXT) and again.end_id == tokenizer.end_id
        assert again.digest == tokenizer.digest


def test_a_transformers_folder_keeps_its_settings(tmp_path):
    PreTrainedTokenizerFast(
        tokenizer_object=BPE.backend, eos_token=END, pad_token="<pad>", chat_template="{{ messages }}"
    ).save_pretrained(tmp_path / "a")
    load_tokenizer(tmp_path / "a").save(tmp_path / "b")
    saved = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert saved.chat_template == "{{ messages }}" and saved.pad_token == "<pad>"
    assert load_tokenizer(tmp_path / "a").vocab_size == 301


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(ConfigError, match="data.tokenizer=bep does not exist; legal: bpe, bytes"):
        load_tokenizer("bep")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="is not a tokenizer.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="it holds nothing, and no vocabulary such as tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')  # a model's folder
    with pytest.raises(ConfigError, match="it holds config.json, and no vocabulary such as tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
    endless = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    endless.save(str(tmp_path / "endless.json"))
    with pytest.raises(ConfigError, match="has none of the end marks"):
        load_tokenizer(tmp_path / "endless.json")
    PreTrainedTokenizerFast(tokenizer_object=endless).save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match="has no end mark; set eos_token"):
        load_tokenizer(tmp_path / "endless")


MARKS = ["</s>", "<eos>", "<|im_end|>", "<sep2>"]
"""Names of which the last is not known as an end mark."""


@given(
    st.lists(st.sampled_from(["ordinary", "special", "none"]), min_size=4, max_size=4),
    st.sampled_from([None, *MARKS]),
    st.sampled_from([None, *MARKS]),
)
@settings(max_examples=150, deadline=None)
def test_the_end_mark_of_a_bare_file_is_special_where_one_is(kinds, first, last):
    """Also where a post-processor puts a special token before or behind each text."""
    named = dict(zip(MARKS, kinds))
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    for name, kind in named.items():
        if kind != "none":
            backend.add_tokens([AddedToken(name, special=kind == "special")])
    first, last = (name if named.get(name) == "special" else None for name in (first, last))
    marks = sorted({(name, backend.token_to_id(name)) for name in (first, last) if name})
    text = " ".join([*([first] if first else []), "$A", *([last] if last else [])])
    backend.post_processor = processors.TemplateProcessing(single=text, pair=None, special_tokens=marks)
    special, ordinary = ([name for name in MARKS[:3] if named[name] == kind] for kind in ("special", "ordinary"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        backend.save(str(path))
        if not (last or special or ordinary):
            with pytest.raises(ConfigError, match="has none of the end marks"):
                load_tokenizer(path)
            return
        tokenizer = load_tokenizer(path)
    expected = last or [*special, *ordinary][0]
    assert tokenizer.backend.id_to_token(tokenizer.end_id) == expected
    others = [name for name in [*special, *ordinary] if name != expected]
    assert bool(tokenizer.notes) == bool(others or expected in ordinary)
    for note in tokenizer.notes:
        assert f"is the {named[expected]} token {expected}" in note and all(name in note for name in others)


def test_an_unknown_word_is_no_end_mark(tmp_path):
    """A post-processor that adds nothing behind a text whose last token is special."""
    backend = Backend(models.WordLevel({"[UNK]": 0, "<eos>": 1}, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").end_id == 1


def test_a_tokenizer_larger_than_the_model(tmp_path):
    setup = config(tmp_path, corpus=SourceConfig("text", str(write_texts(tmp_path / "files", texts(50)))))
    setup.model.vocab_size = 256
    with pytest.raises(
        ConfigError,
        match="data.tokenizer=bytes has 257 tokens, more than the model's vocab_size=256; set model.vocab_size=257",
    ):
        open_corpus(setup)
    setup.data.tokenizer, setup.data.vocab_size, setup.model.vocab_size = "bpe", 1000, 512
    with pytest.raises(ConfigError, match="data.vocab_size=1000 must lie between 257 .* vocab_size=512"):
        open_corpus(setup)
    setup.data.vocab_size = 200
    with pytest.raises(ConfigError, match="data.vocab_size=200 must lie between 257"):
        open_corpus(setup)
