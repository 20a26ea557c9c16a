"""What is learned of a conversation: every token of an answer, whatever tokenizer cuts it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import MARKED, PLAIN
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from trainer.data.shards import TextPiece, encode_pieces
from trainer.data.text import FIRST, LEARNED, ChatTemplate
from trainer.data.tokenizer import Tokenizer, _byte_characters

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEXTS = ["user assistant hello  world\n\n answer  is   four\n", "\t def f(x):\n    return  x\n", "äöü €uro 12 "] * 20
BYTES = {character: byte for byte, character in enumerate(_byte_characters())}


def byte_level(trim: bool, processor: str) -> Backend:
    """A byte-level BPE as of GPT-2, Llama 3 (a sequence of processors) or RoBERTa, which trims offsets or does not."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=SPECIAL, initial_alphabet=sorted(BYTES), show_progress=False
        ),
    )
    level = processors.ByteLevel(trim_offsets=trim)
    template = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)])
    roberta = processors.RobertaProcessing(
        ("<|im_end|>", 1), ("<|im_start|>", 0), trim_offsets=trim, add_prefix_space=False
    )
    backend.post_processor = {"plain": level, "sequence": processors.Sequence([level, template]), "roberta": roberta}[
        processor
    ]
    return backend


def metaspace(prepend: str) -> Backend:
    """A BPE whose blanks are ▁, as of Llama 2."""
    backend = Backend(models.BPE(byte_fallback=False, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    alphabet = [*map(chr, range(33, 127)), *"▁\n\täöü€ "]
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def word_pieces() -> Backend:
    """A WordPiece model, which leaves out blanks."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = [*map(chr, range(33, 127)), *"äöü€"]
    backend.train_from_iterator(
        TEXTS,
        trainers.WordPieceTrainer(
            vocab_size=330, special_tokens=["[UNK]", *SPECIAL], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return backend


MADE = {
    **{
        f"byte-level {processor}{' trimmed' * trim}": (
            lambda trim=trim, processor=processor: byte_level(trim, processor)
        )
        for trim in (False, True)
        for processor in ("plain", "sequence", "roberta")
    },
    **{
        f"metaspace {prepend}": (lambda prepend=prepend: metaspace(prepend)) for prepend in ("never", "first", "always")
    },
    "wordpiece": word_pieces,
}


@cache
def made(name: str) -> Tokenizer:
    backend = MADE[name]()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, backend.token_to_id("<|im_end|>"))


def learned(tokenizer: Tokenizer, text: str, spans: Any) -> tuple[list[int], np.ndarray]:
    """The ids of a conversation, and which of them are learned."""
    ((ids, marks),) = encode_pieces(tokenizer, [TextPiece(text, False, True, tuple(spans))], chat=True)
    assert marks[0] & FIRST and not (marks[1:] & FIRST).any()
    return ids, (marks & LEARNED) > 0


def widths(tokenizer: Tokenizer, name: str, ids: list[int]) -> list[int]:
    """How many bytes of the text each token stands for, by its own characters."""
    found = []
    for token in map(tokenizer.backend.id_to_token, ids):
        plain = token in SPECIAL or not name.startswith("byte-level")
        found.append(len(token.replace("▁", " ").encode()) if plain else len(token))
    return found


BLANKS = st.text(" \n\t", max_size=4)
ANSWERS = st.builds("{}{}{}".format, BLANKS, st.text(" \nabcef1(:äö€", max_size=12), BLANKS).filter(bool)
LOSSLESS = [name for name in MADE if name.startswith("byte-level")] + ["metaspace never"]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(LOSSLESS), st.sampled_from([MARKED, PLAIN]), st.lists(ANSWERS, min_size=1, max_size=3))
def test_every_token_of_an_answer_is_learned_and_no_other(name: str, template: str, answers: list[str]) -> None:
    """Tokens stand for the text without gaps: where each one lies follows from their own characters."""
    tokenizer, rows = made(name), []
    for answer in answers:
        rows += [{"role": "user", "content": " ask \n"}, {"role": "assistant", "content": answer}]
    document = ChatTemplate(template, {}, "template").document(rows)
    for answer, (first, last) in zip(answers, document.spans, strict=True):
        assert document.text[first:last].rstrip("\n") == f"{answer}<|im_end|>"
    ids, found = learned(tokenizer, document.text, document.spans)
    sizes = widths(tokenizer, name, ids)
    assert sum(sizes) == len(document.text.encode())
    ends = np.cumsum(sizes)
    spans = [
        (len(document.text[:first].encode()), len(document.text[:last].encode())) for first, last in document.spans
    ]
    expected = [
        any(end - size < last and end > first for first, last in spans) for end, size in zip(ends.tolist(), sizes)
    ]
    assert found.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(set(MADE) - set(LOSSLESS))), ANSWERS)
def test_as_many_tokens_are_learned_as_the_answer_has(name: str, answer: str) -> None:
    """Between special tokens an answer is cut as it would be by itself."""
    tokenizer = made(name)
    text, first = f"<|im_start|>ask<|im_end|>{answer}<|im_end|>", len("<|im_start|>ask<|im_end|>")
    ids, found = learned(tokenizer, text, [(first, first + len(answer))])
    before, _ = learned(tokenizer, text[:first], [])
    assert ids[: len(before)] == before and ids[-1] == tokenizer.end_id
    assert found.tolist() == [False] * len(before) + [True] * (len(ids) - len(before) - 1) + [False]


def test_blanks_at_the_end_of_an_answer_are_learned() -> None:
    tokenizer, text = made("byte-level sequence trimmed"), "<|im_start|>hi  <|im_end|>"
    ids, found = learned(tokenizer, text, [(12, 16)])
    assert found.tolist() == [False] + [True] * (len(ids) - 2) + [False]


@pytest.mark.parametrize("name", list(MADE))
def test_the_ids_are_those_of_the_tokenizer_itself(name: str) -> None:
    tokenizer, text = made(name), "<|im_start|>user\n what  is\n\n<|im_end|> \n"
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = False
    assert learned(tokenizer, text, [])[0] == backend.encode(text, add_special_tokens=False).ids
