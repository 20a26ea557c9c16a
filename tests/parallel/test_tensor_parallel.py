"""Tensor and sequence parallelism: what a rank holds, keeps for backward, sends, and does meanwhile."""

from __future__ import annotations

import json

import pytest
from support.launch import CAN_COMPILE, launch

import trainer
from trainer.parallel.pipeline.plan import layer_costs

GROUPS = ("2", "4")
TOKENS, WIDTH = 32, 64


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """By rank and size of the tensor-parallel group, what tests/workers/tensor_parallel.py saw."""
    out = tmp_path_factory.mktemp("tensor") / "out.json"
    launch("tensor_parallel.py", 4, out, forks=True)
    return json.loads(out.read_text())


def each(ranks):
    return [(f"rank {rank} of groups of {tp}", int(tp), seen[tp]) for rank, seen in enumerate(ranks) for tp in GROUPS]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gated", "qk_norm head"])
def test_a_layer_keeps_its_share_of_everything(ranks, kind):
    whole = ranks[0]["1"]["layers"][kind]["saved"]
    for name, tp, seen in each(ranks):
        assert seen["layers"][kind]["saved"] * tp == whole, name


def test_norms_over_all_heads_keep_little_more(ranks):
    """Two sums of squares of each token, which every rank holds, and this rank's part of the two weights."""
    whole = ranks[0]["1"]["layers"]["qk_norm full"]["saved"]
    for name, tp, seen in each(ranks):
        more = seen["layers"]["qk_norm full"]["saved"] - whole / tp
        assert 0 <= more <= 4 * (2 * TOKENS + (WIDTH + WIDTH // 2) / tp), name


@pytest.mark.parametrize("kind", ["gpt2", "gated"])
def test_a_layer_keeps_what_the_cost_model_plans_with(ranks, kind):
    for seen in ranks:
        for tp, found in seen.items():
            assert found["layers"][kind]["saved"] == found["layers"][kind]["planned"], tp


def dtensor_sequence_parallel(width: int, heads: int, kv_heads: int, inner: int, tp: int) -> float:
    """Bytes that a bf16 layer keeps of each token, over its width, where the gathered inputs of both blocks are kept
    whole as DTensor's own styles do."""
    return 4 + 4 / tp + (4 + 4 * kv_heads / heads + 8 * inner / width + 4 * heads / width) / tp


@pytest.mark.parametrize("tp, ratio", [(1, 1.0), (2, 22.5 / 20.5), (4, 13.25 / 10.25), (8, 1.68)])
def test_gathering_again_keeps_less_than_dtensor_styles(tp, ratio):
    model = trainer.compose(["model=llama3_8b"]).model
    a, length = model.attention, 8192
    ours = layer_costs(model, length, 1, tp).activation[1] / length / model.width
    assert ours == pytest.approx(
        (12 + 4 * a.kv_heads / a.heads + 8 * model.feed_forward.width / model.width) / tp, rel=2e-3
    )
    theirs = dtensor_sequence_parallel(model.width, a.heads, a.kv_heads, model.feed_forward.width, tp)
    assert theirs / ours == pytest.approx(ratio, abs=0.005)


def test_logits_are_never_whole(ranks):
    assert ranks[0]["1"]["head"]["widest"] == ranks[0]["1"]["head"]["part"] == 1021
    for name, tp, seen in each(ranks):
        head = seen["head"]
        assert head["widest"] == head["part"] <= -(-1021 // tp), name
        assert head["saved"] == 4 * TOKENS * (head["part"] + WIDTH // tp), name
        # Normaliser and score of each token from each rank, and the hidden states.
        assert head["forward"] == [["gather", 2 * tp * TOKENS], ["gather", TOKENS * WIDTH]], name
    assert sum(seen["4"]["head"]["part"] for seen in ranks) == 1021


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qk_norm head", "qk_norm full"])
def test_a_layer_gathers_twice_forward_and_four_times_backward(ranks, kind):
    for name, tp, seen in each(ranks):
        gather, scatter = ["gather", TOKENS * WIDTH], ["scatter", TOKENS * WIDTH // tp]
        sums = [["sum", TOKENS]] * 2 if kind == "qk_norm full" else []
        assert seen["layers"][kind]["forward"] == [gather] * 2 + [scatter] * 2 + sums, name
        assert seen["layers"][kind]["backward"] == [gather] * 4 + [scatter] * 2 + sums, name


def test_backward_multiplies_while_it_communicates(ranks):
    """The input is gathered behind the product for the input's gradient, which is reduced behind that for the
    weight's."""
    for name, _, seen in each(ranks):
        overlap = seen["overlap"]
        assert overlap["column: B"] == ["gather", "product", "scatter", "wait", "product", "wait"], name
        assert overlap["column: B beside I and W"] == overlap["column: B"], name
        assert overlap["row: B"] == ["gather", "wait", "product", "product"], name
        # Gate and up share the input: one gather, one reduce-scatter.
        both = ["gather", "product", "product", "scatter", "wait", "product", "product", "wait"]
        assert overlap["both: B"] == overlap["row: B"] + both, name
        assert seen["head"]["backward"] == ["gather", "product", "wait", "scatter", "product", "wait"], name


def test_compiled_backward_keeps_that_order(ranks):
    """In operators of its own: what starts and what ends a gather would be put together."""
    for seen in ranks:
        assert seen["2"]["compiled"] == ["trainer.rows_gradients.default", "trainer.columns_gradients.default"]


def test_weight_gradients_that_wait_are_gathered_for_one_product_ahead(ranks):
    for name, _, seen in each(ranks):
        overlap = seen["overlap"]
        assert overlap["column: I"] == ["product", "scatter", "wait"] and overlap["row: I"] == [
            "gather",
            "wait",
            "product",
        ], name
        assert overlap["column: W"] == overlap["row: W"] == ["gather", "wait", "product"], name
        assert overlap["both: W"] == ["gather", "gather", "wait", "product", "wait", "product", "product"], name


def test_another_backend_multiplies_and_its_reductions_are_kept(ranks):
    """Backward reduces the two inputs' gradients; where recompute does not know a backend's operators, it reduces the
    outputs of both blocks again."""
    for name, _, seen in each(ranks):
        found = seen["other backend"]
        assert found["worst"] < 1e-12, name
        assert found["reductions"] == {
            "TensorGroup keeping TensorGroup": 2,
            "TensorGroup keeping Pieces": 4,
            "Pieces keeping TensorGroup": 4,
            "Pieces keeping Pieces": 2,
        }, name


@pytest.mark.skipif(not CAN_COMPILE, reason="needs a compiler")
def test_a_compiled_layer_that_copies_keeps_what_is_planned(ranks):
    """No gathered tokens; and of products, those that are named with all that share their gather."""
    for seen in ranks:
        saved, planned = seen["2"]["compiled keeps"]
        # Input, attention and its log-sum-exp, its sum, q, k and v.
        assert saved == planned == 2 * TOKENS * (WIDTH // 2 * 5) + 4 * TOKENS * 4


def test_a_compiled_block_that_is_recomputed_keeps_its_input_alone(ranks):
    """torch 2.11 keeps every product and what is gathered for it, unless a policy says otherwise."""
    assert {seen["2"]["recomputed keeps"] for seen in ranks} == {1.0}


def test_copies_take_the_memory_that_is_planned(ranks):
    for name, _, seen in each(ranks):
        held, planned = seen["other backend"]["boxes"]
        assert held == planned == 4 * 8 * TOKENS * WIDTH, name


def test_weight_gradients_are_the_same_later(ranks):
    for seen in ranks:
        for tp, found in seen.items():
            assert found["deferred"]["late"] == found["deferred"]["expected"] and len(found["deferred"]["late"]) == 7, (
                tp
            )
            assert found["deferred"]["worst"] < 1e-12, tp


def test_parameters_are_cut_along_their_axes(ranks):
    """61 tokens, 8 heads of 8, 2 key-value heads and 38 hidden units: the last ranks hold less."""
    for rank, seen in enumerate(ranks):
        for tp in (2, 4):
            last = rank % tp == tp - 1
            vocabulary = {2: 30 if last else 31, 4: 13 if last else 16}[tp]
            hidden = {2: 19, 4: 8 if last else 10}[tp]
            keys = 8 if tp == 2 else 16  # four ranks cannot share two heads: each holds both, and uses one
            cut, whole, replicated = True, False, tp == 2
            part = 64 // tp
            attention = {
                "q.weight": [cut, [part, 64]],
                "q.bias": [cut, [part]],
                "k.weight": [replicated, [keys, 64]],
                "k.bias": [replicated, [keys]],
                "v.weight": [replicated, [keys, 64]],
                "v.bias": [replicated, [keys]],
                "o.weight": [cut, [64, part]],
                "q_norm.weight": [cut, [part]],
                "k_norm.weight": [replicated, [keys]],
            }
            feed_forward = {
                "gate.weight": [cut, [hidden, 64]],
                "up.weight": [cut, [hidden, 64]],
                "down.weight": [cut, [64, hidden]],
            }
            norm = [whole, [64]]
            assert seen[str(tp)]["layout"] == {
                "embedding.weight": [cut, [vocabulary, 64]],
                **{f"layers.0.attention.{name}": value for name, value in attention.items()},
                **{f"layers.0.feed_forward.{name}": value for name, value in feed_forward.items()},
                "layers.0.attention_norm.weight": norm,
                "layers.0.feed_forward_norm.weight": norm,
                "norm.weight": norm,
                "head.weight": [cut, [vocabulary, 64]],
            }, (rank, tp)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_initial_weights_are_the_same_bits(ranks, stage):
    for seen in ranks:
        assert {tp: found["weights"][stage] for tp, found in seen.items()} == {"1": [], "2": [], "4": []}


def test_a_model_over_ranks_generates_what_one_process_does(ranks):
    """No rank has the whole model: tensor-parallel ranks have their parts in the type that they compute in, and the
    others gather layer by layer. Numbers of rows, heads and columns that no number of ranks divides; four ranks have
    both key-value heads each."""
    seen = {(tp, rank): one["generated"] for rank, of in enumerate(ranks) for tp, one in of.items()}
    assert len(seen) == 4 * 3
    for place, found in seen.items():
        assert found["same"] and found["worst"] < 1e-5, (place, found)
        assert 0.2 < found["held"] < 0.4, (place, found)
