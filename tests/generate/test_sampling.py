"""How tokens are chosen, and how their text comes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from support.generation import generate_tokens
from support.variations import small
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data.tokenizer import Tokenizer, byte_tokenizer, train_tokenizer
from trainer.generate.sampling import SamplingOptions
from trainer.generate.sharded_model import ShardedModel
from trainer.generate.text import TextPiece, TextStream, continue_prompts, generate_text, in_order, read_prompts
from trainer.model.initial import initialize_model
from trainer.model.transformer import Transformer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> ShardedModel:
    spec = small("llama", max_length=64, vocab_size=257, init__std=0.3)
    model = Transformer(spec)
    initialize_model(model, spec, 0, CPU)
    return ShardedModel(spec, {0: model}, CPU, torch.float32)


def shares(sampling: SamplingOptions, logits: list[float], count: int = 1000) -> list[float]:
    """How often each token is chosen, by draws that lie evenly."""
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = sampling.choose(torch.tensor(logits).expand(count, -1), draws)
    return (found.bincount(minlength=len(logits)) / count).tolist()


def expected(sampling: SamplingOptions, logits: list[float]) -> list[float]:
    """The probability of each token, by the definition of every option; of equal ones the first are kept."""
    size, top = len(logits), max(logits)
    order = sorted(range(size), key=lambda token: -logits[token])
    if sampling.temperature == 0:
        return [float(token == order[0]) for token in range(size)]
    weights = [math.exp((logit - top) / sampling.temperature) for logit in logits]
    weights = [weights[token] * (token in order[: sampling.top_k or size]) for token in range(size)]
    probabilities = [weight / sum(weights) for weight in weights]
    before = 0.0
    for token in order * (sampling.top_p < 1):
        assume(abs(before - sampling.top_p) > 1e-5)  # where rounding decides
        kept, before = before < sampling.top_p, before + probabilities[token]
        weights[token] *= kept
    return [weight / sum(weights) for weight in weights]


@budget(max_examples=150, deadline=None)
@example([0.0, 3.0, 1.0, 2.0], 2.0, 0, 1.0)
@example([-math.inf, 1.0, -math.inf, 1.0], 1.0, 0, 1.0)
@example([900.0, 1.0, 900.0], 1e-40, 0, 1.0)
@given(
    logits=st.lists(st.sampled_from([-math.inf, -90.0, -2.0, -0.5, 0.0, 0.3, 1.0, 2.5]), min_size=1, max_size=8),
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 4.0]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0]) | st.floats(0.01, 1),
)
def test_tokens_are_chosen_as_often_as_they_should_be(logits, temperature, top_k, top_p) -> None:
    """Also among equal ones, where any may be left out, and at both ends of what can be drawn."""
    assume(max(logits) > -math.inf)
    sampling = SamplingOptions(temperature, top_k, top_p)
    found, wanted = shares(sampling, logits), expected(sampling, logits)
    assert sorted(found) == pytest.approx(sorted(wanted), abs=2e-3)
    left = [logit for logit, share in zip(logits, wanted) if share == 0]
    assert all(logit <= min(one for one, share in zip(logits, found) if share) for logit in left)
    ends = torch.tensor([0, 2**-60, 1 - 2**-53], dtype=torch.float64)
    for token in sampling.choose(torch.tensor(logits).expand(3, -1), ends).tolist():
        assert wanted[token] > 0 or logits[token] in [one for one, share in zip(logits, wanted) if share]


class Noted(TorchDispatchMode):
    """Names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    "sampling, sorts",
    [
        (SamplingOptions(), []),
        (SamplingOptions(1.0), []),
        (SamplingOptions(1.0, 5), ["topk"]),
        (SamplingOptions(1.0, 99), []),
        (SamplingOptions(1.0, 5, 0.9), ["topk"]),
        (SamplingOptions(1.0, 0, 0.9), ["topk"]),
    ],
)
def test_a_vocabulary_is_sorted_only_where_tokens_are_left_out(sampling, sorts) -> None:
    """And no value goes to the host, which would wait for the device and could not be part of a CUDA graph."""
    with Noted() as noted:
        sampling.choose(torch.randn(2, 40), torch.tensor([0.1, 0.7], dtype=torch.float64))
    assert [name for name in noted.names if name in ("topk", "sort")] == sorts
    assert not {"_local_scalar_dense", "nonzero", "item", "masked_select", "is_nonzero"} & set(noted.names)


def test_logits_that_are_no_numbers_choose_some_token() -> None:
    for sampling in (SamplingOptions(1.0), SamplingOptions(1.0, 3), SamplingOptions(1.0, 0, 0.9)):
        assert 0 <= sampling.choose(torch.full((1, 5), math.nan), torch.tensor([0.5]).double()).item() < 5


def test_draws_are_made_as_they_are_needed(monkeypatch) -> None:
    """However many tokens may be asked for; blocks of them change none."""
    some = [draw.tolist() for draw in SamplingOptions(seed=4).draws(2, 10, CPU)]
    monkeypatch.setattr("trainer.generate.sampling.DRAWN", 3)
    assert [draw.tolist() for draw in SamplingOptions(seed=4).draws(2, 10, CPU)] == some
    assert next(SamplingOptions(seed=4).draws(2, 10**15, CPU)).tolist() == some[0]


def test_a_prompt_draws_the_same_whatever_else_is_in_its_batch(model) -> None:
    sampling, prompts = SamplingOptions(1.0, top_k=20, top_p=0.9, seed=5), [[1, 2, 3], [4] * 30, [9]]
    together = generate_tokens(model, prompts, 12, sampling)
    assert together[:1] == generate_tokens(model, prompts[:1], 12, sampling)
    assert together != generate_tokens(model, prompts, 12, SamplingOptions(1.0, top_k=20, top_p=0.9, seed=6))
    assert together == generate_tokens(model, prompts, 12, sampling)


def test_prompts_end_by_themselves(model) -> None:
    prompts = [[1, 2, 3], [4] * 30]
    free = generate_tokens(model, prompts, 12, SamplingOptions())
    end = free[0][5]
    expected = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in free]
    assert generate_tokens(model, prompts, 12, SamplingOptions(), [end]) == expected and len(expected[0]) <= 5
    assert len(expected[1]) == 12  # the other goes on


TEXTS = st.text(st.sampled_from("ab \néß€😀"), max_size=24)
BPE = train_tokenizer(["aab ba€€ éß 😀😀 ab\nab", "ab ab ba ba éé"], 300)


@budget(max_examples=80, deadline=None)
@example("", " aa", ["a", " aa"], False)
@given(TEXTS, TEXTS, st.lists(st.text(st.sampled_from("ab \né😀"), min_size=1, max_size=3), max_size=2), st.booleans())
def test_the_pieces_of_a_text_are_the_text_up_to_the_first_stop(before, text, stops, merges) -> None:
    tokenizer: Tokenizer = BPE if merges else byte_tokenizer()
    stream, pieces = TextStream(tokenizer.decode, tokenizer.encode(before), stops), []
    for token in tokenizer.encode(text):
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    pieces.append(stream.end())
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(pieces) == (text[: min(found)[1]] if found else text)
    assert stream.stopped == bool(found) and not any("\ufffd" in piece for piece in pieces)


def test_text_comes_while_more_is_computed_and_stops_at_a_word(model) -> None:
    tokenizer, sampling = byte_tokenizer(), SamplingOptions(1.0, seed=2)
    prompts = [tokenizer.encode_prompt(text) for text in ("def ", "", "x")]
    whole = continue_prompts(model, tokenizer, prompts, 30, sampling)
    with model.inference():
        pieces = list(generate_text(model, tokenizer, prompts, 30, sampling))
        shown = list(in_order(generate_text(model, tokenizer, prompts, 30, sampling)))
    for some in (pieces, shown):
        assert ["".join(text for number, text, _ in some if number == row) for row in range(3)] == whole
        assert sorted(row for row, _, last in some if last) == [0, 1, 2]
    assert len(pieces) > 10 and all(whole)
    stop = whole[0][5:7]
    stopped = continue_prompts(model, tokenizer, prompts, 30, sampling, [stop])
    assert stopped == [text.partition(stop)[0] for text in whole] != whole


def test_prompts_are_shown_one_behind_the_other_as_soon_as_that_goes() -> None:
    """The first as it comes; what others have by then follows at once, and they go on as they come."""
    taken = []
    coming = [
        TextPiece(1, "b", False),
        TextPiece(0, "a", False),
        TextPiece(2, "c", True),
        TextPiece(0, "", True),
        TextPiece(1, "d", False),
    ]

    def computed():
        for number, piece in enumerate([*coming, TextPiece(1, "e", True)]):
            taken.append(number)
            yield piece

    found = [(piece.row, piece.text, taken[-1]) for piece in in_order(computed())]
    assert found == [(0, "a", 1), (0, "", 3), (1, "b", 3), (1, "d", 4), (1, "e", 5), (2, "c", 5)]


def test_prompts_are_the_lines_of_a_file_without_byte_order_marks(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfdef \r\n\r\n\xef\xbb\xbfa\\nb")
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["def ", "", "a\nb"]
