"""Documents begin with BOS where the tokenizer begins texts with it, wherever shards and chunks of files are cut."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import MARKED, PLAIN, config, conversations, texts, write_conversations, write_jsonl
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.config import ConfigError, SourceConfig
from trainer.data import shards, text
from trainer.data.corpus import Corpus, CorpusSide, open_corpus
from trainer.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

END, BOS, MARK, SEPARATOR = 256, 257, 258, 259
NAMES = {END: "<|endoftext|>", BOS: "<bos>", MARK: "[gMASK]", SEPARATOR: "[SEP]"}


def template(*pieces: str | int) -> processors.TemplateProcessing:
    """Adds the tokens `pieces` around the text, which is `$A` among them."""
    single = [NAMES.get(piece, piece) for piece in pieces]
    return processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=[(name, token) for token, name in NAMES.items()]
    )


def blanks() -> processors.ByteLevel:
    return processors.ByteLevel(trim_offsets=True)


PROCESSORS: dict[str, tuple[Callable[[], processors.PostProcessor | None], list[int], list[int]]] = {
    "none": (lambda: None, [], []),
    "byte level": (blanks, [], []),
    "bos": (lambda: template(BOS, "$A"), [BOS], []),
    "bos and end": (lambda: template(BOS, "$A", END), [BOS], [END]),
    "end": (lambda: template("$A", END), [], [END]),
    "two tokens": (lambda: template(MARK, BOS, "$A"), [MARK, BOS], []),
    "separator": (lambda: template(BOS, "$A", SEPARATOR), [BOS], [SEPARATOR]),
    "sequence": (lambda: processors.Sequence([blanks(), template(BOS, "$A")]), [BOS], []),
    "roberta": (lambda: processors.RobertaProcessing(("[SEP]", SEPARATOR), ("<bos>", BOS)), [BOS], [SEPARATOR]),
    "bert": (lambda: processors.BertProcessing(("[SEP]", SEPARATOR), ("<bos>", BOS)), [BOS], [SEPARATOR]),
    "end mark first": (lambda: template(END, "$A"), [END], []),
}
"""What makes the post-processor of a tokenizer, and the ids that it puts before and behind a text."""


def backend(kind: str) -> Backend:
    made = byte_tokenizer().backend
    made.encode_special_tokens = False
    made.add_special_tokens([AddedToken(name, special=True) for token, name in NAMES.items() if token != END])
    if processor := PROCESSORS[kind][0]():
        made.post_processor = processor
    return made


def folder_of(place: Path, kind: str, bos: str | None = "<bos>", **more: object) -> Path:
    """A tokenizer as transformers saves it."""
    PreTrainedTokenizerFast(
        tokenizer_object=backend(kind), eos_token=NAMES[END], **({"bos_token": bos} if bos else {}), **more
    ).save_pretrained(place)
    return place


@pytest.mark.parametrize("bare", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("bos", ["auto", "true", "false"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_text_begins_as_transformers_begins_it(tmp_path: Path, kind: str, bos: str, bare: bool) -> None:
    """Under data.bos=auto. What a run saves begins texts as the run has begun documents, and ends them as before."""
    before, behind = PROCESSORS[kind][1:]
    place = tmp_path / "tokenizer.json" if bare else folder_of(tmp_path / "its", kind)
    if bare:
        backend(kind).save(str(place))
    one = config(tmp_path, length=4, tokenizer=str(place), a=SourceConfig("jsonl", str(tmp_path / "a.jsonl")))
    write_jsonl(tmp_path / "a.jsonl", ["one", "two three"] * 8)
    one.data.bos = bos
    expected = {"auto": before, "false": [], "true": before or [BOS]}[bos]
    if bare and bos == "true" and not before:
        with pytest.raises(ConfigError, match="data.bos=true, but data.tokenizer=.* has no BOS"):
            open_corpus(one)
        return
    corpus = open_corpus(one)
    in_documents = [] if END in expected else expected
    tokens = corpus.train.get(0).tokens[: len(in_documents) + 1].tolist()
    assert corpus.tokenizer.begin == expected and tokens == [*in_documents, tokens[-1]] and tokens[-1] < END
    if bos == "auto" and not bare:
        assert AutoTokenizer.from_pretrained(place)("one").input_ids == [*expected, *b"one", *behind]
    corpus.tokenizer.save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved("one").input_ids == [*expected, *b"one", *behind]
    assert saved("one", "two").input_ids[: len(expected) + 3] == [*expected, *b"one"]
    assert load_tokenizer(tmp_path / "saved").begin == expected


@pytest.mark.parametrize("bos", ["auto", "true", "false"])
@pytest.mark.parametrize("kind", ["none", "bos"])
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_classes_that_make_their_own_post_processor_keep_the_decision(tmp_path, name: str, kind: str, bos: str) -> None:
    """GPTNeoXTokenizer of transformers 5 replaces the post-processor of tokenizer.json by its own; a run keeps that of
    the file."""
    place = folder_of(tmp_path / "its", kind)
    described = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**described, "tokenizer_class": name}))
    its = AutoTokenizer.from_pretrained(place)
    plain = its("one", add_special_tokens=False).input_ids
    one = config(tmp_path, length=4, tokenizer=str(place), a=SourceConfig("jsonl", str(tmp_path / "a.jsonl")))
    write_jsonl(tmp_path / "a.jsonl", ["one", "two three"] * 8)
    one.data.bos = bos
    corpus = open_corpus(one)
    begin = {"auto": [BOS] if kind == "bos" else [], "true": [BOS], "false": []}[bos]
    corpus.tokenizer.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("one").input_ids == [*begin, *plain]
    assert corpus.train.get(0).tokens[: len(begin) + 1].tolist() in ([*begin, plain[0]], [*begin, b"t"[0]])


def opened(folder: Path, contents: list[bytes], chunk: int, shard: int, fraction: float, bos: str) -> Corpus:
    for number, content in enumerate(contents):
        (folder / f"{number:03d}.txt").write_bytes(content)
    backend("bos").save(str(folder / "tokenizer.json"))
    one = config(folder, 1, str(folder / "tokenizer.json"), corpus=SourceConfig("text", str(folder / "*.txt")))
    one.data.eval_fraction, one.data.bos = fraction, bos
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK_BYTES", chunk)
        patch.setattr(shards, "SHARD_BYTES", shard)
        return open_corpus(one)


def tokens_of(side: CorpusSide) -> list[int]:
    found = [side.get(index).tokens.tolist() for index in range(len(side))]
    return [tokens[0] for tokens in found] + [token for tokens in found[-1:] for token in tokens[1:]]


def with_bos(tokens: list[int]) -> list[int]:
    """`tokens` with BOS at the start and behind every end mark that something follows."""
    pairs = pairwise([END, *tokens])
    return [token for left, right in pairs for token in ([BOS, right] if left == END else [right])]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=30), min_size=1, max_size=4),
    st.integers(4, 64),
    st.integers(1, 400),
    st.sampled_from([0.0, 0.3, 0.7]),
)
def test_bos_stands_at_the_start_of_every_document_and_nowhere_else(files, chunk, shard, fraction) -> None:
    """Also of a long file that is cut into chunks, of which shards begin inside and some are held out."""
    contents = ["\n".join("abcdefgh"[i % 8] * size for i, size in enumerate(lines)).encode() for lines in files]
    if sum(map(len, contents)) < 3:
        return
    found = []
    for bos in ("false", "true"):
        with tempfile.TemporaryDirectory() as folder:
            corpus = opened(Path(folder), contents, chunk, shard, fraction, bos)
            found.append([tokens_of(side) for side in (corpus.train, corpus.eval)])
    assert found[1] == [with_bos(tokens) for tokens in found[0]]


def test_documents_of_a_stream_begin_with_bos(tmp_path: Path) -> None:
    """Those that are trained on and those that are held out."""
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict({"text": texts(80)}).to_parquet(str(tmp_path / "hub/train.parquet"))
    one = config(
        tmp_path,
        16,
        str(folder_of(tmp_path / "its", "bos")),
        stream=SourceConfig("hub", str(tmp_path / "hub"), streaming=True),
    )
    one.eval.every, one.eval.sequences = 5, 12
    found = {}
    for one.data.bos in ("false", "true"):
        corpus = open_corpus(one)
        sides = (corpus.train.sources[0], 60), (corpus.eval, len(corpus.eval))
        found[one.data.bos] = [
            [int(token) for index in range(count) for token in side.get(index).tokens[:-1]] for side, count in sides
        ]
    for plain, marked in zip(found["false"], found["true"]):
        count = min(len(marked), len(plain)) - 1
        assert with_bos(plain)[:count] == marked[:count] and marked.count(BOS) > 4


def test_the_setting_is_part_of_the_fingerprint_where_it_matters(tmp_path: Path) -> None:
    """With its own bpe or bytes, documents are what they were before there was the setting."""
    write_jsonl(tmp_path / "a.jsonl", ["one", "two three"] * 8)
    source = SourceConfig("jsonl", str(tmp_path / "a.jsonl"))

    def fingerprint(tokenizer: str, bos: str, begin: list[int] | None = None) -> str:
        one = config(tmp_path, length=4, tokenizer=tokenizer, a=replace(source))
        one.data.bos = bos
        return open_corpus(one, begin=begin).fingerprint

    place = str(folder_of(tmp_path / "its", "bos"))
    assert fingerprint(place, "auto") == fingerprint(place, "true") == fingerprint(place, "auto", [BOS])
    assert fingerprint(place, "false") == fingerprint(place, "auto", []) != fingerprint(place, "auto")
    assert fingerprint("bytes", "auto") == fingerprint("bytes", "false")
    for tokenizer, words in (
        ("bytes", "has no BOS"),
        (str(folder_of(tmp_path / "e", "none", NAMES[END])), "one token"),
    ):
        with pytest.raises(ConfigError, match=words):
            fingerprint(tokenizer, "true")


@pytest.mark.parametrize("writes", [True, False], ids=["template with BOS", "template without"])
def test_conversations_are_as_their_template_writes_them(tmp_path: Path, writes: bool) -> None:
    """No second BOS, and none that the template does not write, which the table of a start then says."""
    turns = ["<|im_start|>", "<|im_end|>"]
    place = folder_of(tmp_path / "its", "bos", extra_special_tokens=turns)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template = "{{ bos_token }}" * writes + MARKED
    tokenizer.save_pretrained(place)
    rows = conversations(12)
    write_conversations(tmp_path / "chat.jsonl", rows)
    one = config(tmp_path, 200, str(place), chat=SourceConfig("chat", str(tmp_path / "chat.jsonl")))
    one.data.eval_fraction = 0
    corpus = open_corpus(one)
    whole = tokenizer.apply_chat_template(rows, return_dict=False)
    seen = [sample.tokens for sample in map(corpus.train.get, range(len(corpus.train)))]
    assert sum(int((tokens == BOS).sum()) for tokens in seen) == len(rows) * writes
    first = seen[0].tolist()
    assert any(first[: len(ids)] == ids for ids in whole)
    assert ("without <bos>" in corpus.marks) != writes and "end with <|im_end|>" in corpus.marks
    assert corpus.stop_ids == [END, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert corpus.tokenizer.encode_prompt(corpus.tokenizer.render_prompt("Hi"), chat=True) == rendered


TURN_ENDS = {
    "im_end": (PLAIN, "<|im_end|>"),
    "the end mark": (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
        "<|endoftext|>",
    ),
    "blanks before": (
        "{% for m in messages %}{{ m.content }} \n<|im_end|>[SEP]{% endfor %}<|endoftext|>",
        "<|im_end|>",
    ),
    "text alone": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}", None),
    "only after questions": (
        "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if m.role == 'user' }}{% endfor %}",
        None,
    ),
    "fails": ("{{ raise_exception('no') }}", None),
    "none": (None, None),
}


@pytest.mark.parametrize("kind", TURN_ENDS)
def test_the_end_of_a_turn_is_found_by_rendering(tmp_path: Path, kind: str) -> None:
    folder_of(tmp_path, "bos", extra_special_tokens=["<|im_end|>"])
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template, name = TURN_ENDS[kind]
    assert tokenizer.turn_end_id == (name and tokenizer.backend.token_to_id(name))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["<bos>", "<|endoftext|>", "[SEP]", "a b", " ", "é", "\n", "<b"]), max_size=6),
    st.sampled_from(sorted(PROCESSORS)),
)
def test_a_prompt_is_what_transformers_makes_of_it_with_one_bos(pieces: list[str], kind: str) -> None:
    """Where the post-processor puts nothing behind texts, which no prompt may end with."""
    made, prompt = backend(kind), "".join(pieces)
    before = PROCESSORS[kind][1]
    tokenizer = Tokenizer(made, END)
    plain = PreTrainedTokenizerFast(tokenizer_object=backend(kind))(prompt, add_special_tokens=False).input_ids
    expected = plain if plain[: len(before)] == before else [*before, *plain]
    assert tokenizer.encode_prompt(prompt) == (expected or [END])


def test_added_prefix_space_does_not_hide_bos(tmp_path: Path) -> None:
    """BOS is found by what a text is encoded to, whatever the text becomes."""
    made = backend("sequence")
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert Tokenizer(made, END).begin == [BOS]
    assert json.loads(made.to_str())["post_processor"]["type"] == "Sequence"
