"""How tokens are chosen, and how their text comes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from support.variations import small

from trainer.data.tokenizer import Tokenizer, byte_tokenizer, train_tokenizer
from trainer.generate.placed import PlacedModel
from trainer.generate.sampling import Sampling, generate_tokens
from trainer.generate.text import Stream, continuations, generate_text
from trainer.model.initial import initialize
from trainer.model.transformer import Transformer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> PlacedModel:
    spec = small("llama", max_length=64, vocab_size=257, init__std=0.3)
    model = Transformer(spec)
    initialize(model, spec, 0, CPU)
    return PlacedModel(spec, {0: model}, CPU, torch.float32)


def shares(sampling: Sampling, logits: list[float], count: int = 4000) -> torch.Tensor:
    """How often each token is drawn."""
    rows = torch.tensor(logits).expand(count, -1)
    draws = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return sampling.choose(rows, draws).bincount(minlength=len(logits)) / count


def test_temperature_and_the_number_of_tokens_shape_the_distribution() -> None:
    logits = [0.0, 3.0, 1.0, 2.0]
    wanted = torch.softmax(torch.tensor(logits) / 2, 0)
    assert (shares(Sampling(2.0), logits) - wanted).abs().max() < 0.03
    wanted = torch.tensor([0, torch.sigmoid(torch.tensor(0.5)), 0, 1 - torch.sigmoid(torch.tensor(0.5))])
    assert (shares(Sampling(2.0, top_k=2), logits) - wanted).abs().max() < 0.03
    assert shares(Sampling(0.0), logits).tolist() == shares(Sampling(9.0, top_k=1), logits).tolist() == [0, 1, 0, 0]


@budget(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=8),
    temperature=st.floats(0.1, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 9),
    draw=st.floats(0, 1 - 2**-53),
)
def test_tokens_are_among_the_fewest_that_add_up(logits, temperature, top_p, top_k, draw) -> None:
    chosen = Sampling(temperature, top_k, top_p).choose(torch.tensor([logits]), torch.tensor([draw]).double()).item()
    ordered = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = torch.softmax(torch.tensor(logits).double()[ordered] / temperature, 0)
    likelier = sum(weight for token, weight in zip(ordered, weights) if logits[token] > logits[chosen])
    assert chosen in ordered or any(logits[token] == logits[chosen] for token in ordered)
    assert likelier <= top_p + 1e-6


def test_a_prompt_draws_the_same_whatever_else_is_in_its_batch(model) -> None:
    sampling, prompts = Sampling(1.0, top_k=20, top_p=0.9, seed=5), [[1, 2, 3], [4] * 30, [9]]
    together = generate_tokens(model, prompts, 12, sampling)
    assert together[:1] == generate_tokens(model, prompts[:1], 12, sampling)
    assert together != generate_tokens(model, prompts, 12, Sampling(1.0, top_k=20, top_p=0.9, seed=6))
    assert together == generate_tokens(model, prompts, 12, sampling)


def test_prompts_end_by_themselves(model) -> None:
    prompts = [[1, 2, 3], [4] * 30]
    free = generate_tokens(model, prompts, 12, Sampling())
    end = free[0][5]
    expected = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in free]
    assert generate_tokens(model, prompts, 12, Sampling(), end) == expected and len(expected[0]) <= 5
    assert len(expected[1]) == 12  # the other goes on


TEXTS = st.text(st.sampled_from("ab \néß€😀"), max_size=24)
BPE = train_tokenizer(["aab ba€€ éß 😀😀 ab\nab", "ab ab ba ba éé"], 300)


@budget(max_examples=80, deadline=None)
@example("", " aa", ["a", " aa"], False)
@given(TEXTS, TEXTS, st.lists(st.text(st.sampled_from("ab \né😀"), min_size=1, max_size=3), max_size=2), st.booleans())
def test_the_pieces_of_a_text_are_the_text_up_to_the_first_stop(before, text, stops, merges) -> None:
    tokenizer: Tokenizer = BPE if merges else byte_tokenizer()
    stream, pieces = Stream(tokenizer.decode, tokenizer.encode(before), stops), []
    for token in tokenizer.encode(text):
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    pieces.append(stream.end())
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(pieces) == (text[: min(found)[1]] if found else text)
    assert stream.stopped == bool(found) and not any("\ufffd" in piece for piece in pieces)


def test_text_comes_while_more_is_computed_and_stops_at_a_word(model) -> None:
    tokenizer, prompts, sampling = byte_tokenizer(), ["def ", "", "x"], Sampling(1.0, seed=2)
    whole = continuations(model, tokenizer, prompts, 30, sampling)
    pieces = []
    with model.inference():
        for row, text in generate_text(model, tokenizer, prompts, 30, sampling):
            pieces.append((row, text))
    assert ["".join(text for number, text in pieces if number == row) for row in range(3)] == whole
    assert len(pieces) > 10 and all(whole)
    stop = whole[0][5:7]
    stopped = continuations(model, tokenizer, prompts, 30, sampling, [stop])
    assert stopped == [text.partition(stop)[0] for text in whole] != whole
