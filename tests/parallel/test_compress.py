"""Gradients as bytes: the codecs and their error feedback by themselves, the Triton kernels, and plans and runs that
use them."""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import sources_of_runs
from support.kernels import compare_kernels
from support.launch import launch
from workers.compress import BROKEN, PLANS, RANKS, RESUMED, STEPS

import trainer
import trainer.training.run
from trainer.config import Config, ConfigError
from trainer.parallel.compress.codec import (
    BlockCodec,
    BlockLayout,
    ErrorFeedback,
    decode_payload,
    encode_blocks,
    pack_blocks,
    unpack_blocks,
)
from trainer.parallel.compress.plan import reduction_routes
from trainer.planning.plan import Plan
from trainer.planning.resolve import check_config

CPU = torch.device("cpu")
LARGEST = {"int8": 127, "int4": 7}
QUICK = settings(deadline=None, max_examples=60)
KINDS = ("int8", "int4")

SEEDS = st.integers(0, 1 << 30)
PIECES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 700)), min_size=1, max_size=6)
"""Gaps and lengths, in turns."""


def placed(pieces: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """(offset, length) of each piece, and where the last one ends."""
    ends = list(itertools.accumulate(gap + length for gap, length in pieces))
    return [(end - length, length) for end, (_, length) in zip(ends, pieces)], ends[-1]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(seed: int, *shape: int) -> torch.Tensor:
    """Numbers whose magnitudes differ by rows, by far, with outliers and zeros among them."""
    choose = generator(seed)
    values = torch.randn(shape, generator=choose) * 10.0 ** (torch.rand(*shape[:-1], 1, generator=choose) * 24 - 12)
    values *= torch.where(torch.rand(shape, generator=choose) < 0.02, 300.0, 1.0)
    return torch.where(torch.rand(shape, generator=choose) < 0.1, 0.0, values)


def parsed(codec: BlockCodec, payload: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """What the bytes of a payload mean by the format's description, computed without the project: scales [rows, count]
    in fp32 and values [rows, count, block] in fp64."""
    rows, begin = payload.shape[0], math.ceil(count / 4) * 16
    scales = payload[:, :begin].numpy().copy().view(np.float32)[:, :count].astype(np.float64)
    codes = payload[:, begin:].numpy().copy()
    if codec.kind == "int4":
        packed = codes.reshape(rows, count, codec.block // 2)
        numbers = np.concatenate([packed & 15, packed >> 4], -1).astype(np.float64) - 8
    else:
        numbers = codes.view(np.int8).astype(np.float64)
    return scales, numbers.reshape(rows, count, codec.block) * scales[..., None]


@QUICK
@given(st.sampled_from(KINDS), st.sampled_from([32, 64, 256, 1024]), st.integers(1, 3), st.integers(1, 9), SEEDS)
def test_a_code_is_off_by_half_a_step_at_most(kind, block, rows, count, seed):
    codec = BlockCodec(kind, block)
    values = gradients(seed, rows, count, block)
    payload, left = encode_blocks(codec, values)
    assert payload.dtype == torch.uint8 and payload.shape == (rows, codec.row_bytes(count))
    scales, meant = parsed(codec, payload, count)
    exact = values.double().numpy()
    assert (np.abs(meant - exact) <= 0.5 * scales[..., None] * (1 + 1e-5) + 1e-30).all()
    # A bound that follows a scale says nothing where the scale is too large.
    assert scales == pytest.approx(np.abs(exact).max(-1) / LARGEST[kind], rel=1e-6, abs=1e-30)
    decoded = decode_payload(codec, payload.unsqueeze(0), count)
    assert decoded.double().numpy() == pytest.approx(meant, rel=1e-6, abs=1e-37)
    assert torch.equal(left, values - decoded)


@QUICK
@given(st.sampled_from(KINDS), st.sampled_from([32, 128]), st.integers(1, 40))
def test_the_size_of_a_row(kind, block, count):
    bits = {"int8": 8, "int4": 4}[kind]
    assert BlockCodec(kind, block).row_bytes(count) == (count + 3) // 4 * 16 + count * block * bits // 8


@QUICK
@given(
    st.sampled_from(KINDS),
    st.sampled_from([32, 64, 256]),
    PIECES,
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    SEEDS,
)
def test_ragged_pieces_of_any_type_come_back_to_their_places(kind, block, pieces, rows, dtype, seed):
    """Pieces of any length with gaps between them; nothing else is written, and no piece shares a scale with
    another."""
    codec = BlockCodec(kind, block)
    segments, end = placed(pieces)
    flat = torch.randn(end + 5, generator=generator(seed)).to(dtype)
    for number, (offset, length) in enumerate(segments):
        flat[offset : offset + length] *= 10.0 ** -(number % 4)
    blocks = BlockLayout(segments, block, rows, CPU)
    payload = pack_blocks(codec, flat, blocks)
    assert payload.shape == (rows, codec.row_bytes(blocks.count))
    result = torch.full_like(flat, 77.0)
    unpack_blocks(codec, payload.unsqueeze(0), blocks, result)
    inside = torch.zeros(len(flat), dtype=torch.bool)
    share = 0.5 / LARGEST[kind]
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    for offset, length in segments:
        inside[offset : offset + length] = True
        before, after = flat[offset : offset + length].double(), result[offset : offset + length].double()
        most = before.abs().max() * (share + rounding)
        assert (before - after).abs().max() <= most + 1e-30
    assert (result[~inside] == 77).all()


@QUICK
@given(PIECES, st.sampled_from([32, 64]), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_gather_scatter_and_the_kernels_table_agree(pieces, block, grains, rows):
    segments, end = placed(pieces)
    flat = torch.arange(1.0, end + 1)
    blocks = BlockLayout(segments, block, rows, CPU, block * grains)
    gathered = blocks.gather(flat)
    assert gathered.shape == (rows, blocks.count, block) and blocks.length == blocks.count * block
    starts, lengths = blocks.table
    expected = torch.zeros(rows * blocks.count, block)
    for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        expected[number, :length] = flat[start : start + length]
    assert torch.equal(gathered, expected.view_as(gathered))
    assert lengths.sum() == sum(length for _, length in segments)
    back = torch.zeros_like(flat)
    blocks.scatter(gathered, back)
    kept = torch.zeros_like(flat)
    for offset, length in segments:
        kept[offset : offset + length] = flat[offset : offset + length]
    assert torch.equal(back, kept)
    # No more rows than needed are filled up with nothing, and pieces begin at whole grains whatever the block is.
    assert (rows - 1) * blocks.length < sum(
        -(-length // (block * grains)) * block * grains for _, length in segments
    ) + rows * block * grains
    coarse = BlockLayout(segments, block * grains, rows, CPU)
    assert torch.equal(coarse.gather(flat).view(-1), gathered.view(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_what_is_too_small_become_zeros(kind):
    codec, values = BlockCodec(kind, 32), torch.zeros(1, 4, 32)
    values[0, 1], values[0, 2, ::3], values[0, 3, 5] = 1e-42, -1e-38, 1.0
    payload, left = encode_blocks(codec, values)
    decoded = decode_payload(codec, payload.unsqueeze(0), 4)
    assert torch.isfinite(decoded).all() and (decoded[0, 0] == 0).all() and decoded[0, :3].abs().max() <= 2e-38
    assert decoded[0, 3, 5] == pytest.approx(1.0, rel=0.1)
    assert torch.isfinite(left).all()
    _, scaled = encode_blocks(codec, torch.full((1, 1, 32), 1e-30))  # the smallest that is not
    assert torch.isfinite(scaled).all() and scaled.abs().max() < 1e-31


@QUICK
@given(
    st.sampled_from(KINDS),
    st.sampled_from(["nan", "inf", "-inf"]),
    st.integers(0, 3 * 64 - 1),
    st.booleans(),
    st.integers(0, 1000),
)
def test_what_is_not_finite_stays_so_in_its_block_and_nowhere_else(kind, value, place, zeros, seed):
    codec = BlockCodec(kind, 64)
    flat = torch.zeros(3 * 64) if zeros else torch.randn(3 * 64, generator=generator(seed))
    flat[place] = float(value)
    blocks = BlockLayout([(0, 3 * 64)], 64, 1, CPU)
    others = torch.randn(3 * 64, generator=generator(seed + 1))
    received = torch.stack([pack_blocks(codec, part, blocks) for part in (others, flat, others)])
    result = torch.zeros(3 * 64)
    unpack_blocks(codec, received, blocks, result)
    broken = ~torch.isfinite(result.view(3, 64)).all(-1)
    assert broken.tolist() == [number == place // 64 for number in range(3)]
    assert not torch.isfinite(result[place])


@QUICK
@given(st.sampled_from(KINDS), SEEDS, st.sampled_from([1e38, 3.4e38]))
def test_the_largest_numbers_stay_finite(kind, seed, size):
    values = torch.rand(1, 2, 64, generator=generator(seed)) * 2 - 1
    values[0, 0, 3] = 1.0
    values *= size
    payload, _ = encode_blocks(BlockCodec(kind, 64), values)
    decoded = decode_payload(BlockCodec(kind, 64), payload.unsqueeze(0), 2)
    assert torch.isfinite(decoded).all() and (decoded - values).abs().max() <= size / {"int8": 253, "int4": 13.9}[kind]


@QUICK
@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), SEEDS)
def test_what_arrives_is_the_fp32_sum_of_the_senders_in_order(kind, senders, rows, count, seed):
    codec = BlockCodec(kind, 32)
    payloads = torch.stack(
        [encode_blocks(codec, gradients(seed + sender, rows, count, 32))[0] for sender in range(senders)]
    )
    total = torch.zeros(rows, count, 32)
    for payload in payloads:
        total += decode_payload(codec, payload.unsqueeze(0), count)
    assert torch.equal(decode_payload(codec, payloads, count), total)


@pytest.mark.parametrize("kind", KINDS)
def test_feedback_telescopes(kind):
    """All that was sent is all gradients less what is kept, over steps that were skipped and loss scales that
    changed."""
    codec, blocks = BlockCodec(kind, 64), BlockLayout([(3, 500), (510, 77)], 64, 2, CPU)
    errors = ErrorFeedback(blocks)
    sent, wanted, spent = torch.zeros(600, dtype=torch.float64), torch.zeros(600, dtype=torch.float64), 0
    for step in range(40):
        scale = torch.tensor([1024.0, 512.0, 2.0**16][step % 3])
        gradient = torch.randn(600, generator=generator(step)) * scale
        skipped = step % 7 == 3
        if skipped:
            gradient[9] = [float("inf"), float("nan")][step % 2]
        before = errors.kept.clone()
        payload, result = pack_blocks(codec, gradient, blocks, errors, scale), torch.zeros(600)
        assert torch.equal(errors.kept, before)  # not before it is known whether the step counts
        unpack_blocks(codec, payload.unsqueeze(0), blocks, result)
        errors.end_step(torch.tensor(float(skipped)))
        if skipped:
            assert not torch.isfinite(result).all()
            assert torch.equal(errors.kept, before)
            continue
        sent, wanted, spent = sent + result.double() / scale, wanted + gradient.double() / scale, spent + 1
    kept = torch.zeros(600)
    blocks.scatter(errors.kept, kept)
    inside = torch.zeros(600, dtype=torch.bool)
    inside[3:503], inside[510:587] = True, True
    torch.testing.assert_close(sent[inside], (wanted - kept)[inside], rtol=1e-5, atol=2e-4)
    step_size = {"int8": 4 / 127, "int4": 5 / 7}[kind]
    assert 0 < kept.abs().max() < 2 * step_size  # and does not grow
    assert kept[~inside].abs().max() == 0


def test_feedback_makes_the_mean_gradient_arrive():
    """A gradient that stays the same and is far below half a step: without feedback nothing of it ever arrives."""
    codec, blocks = BlockCodec("int4", 64), BlockLayout([(0, 64)], 64, 1, CPU)
    gradient = torch.full((64,), 0.01)
    gradient[0] = 1.0
    arrived = {}
    for feedback in (False, True):
        errors, total, result = ErrorFeedback(blocks) if feedback else None, torch.zeros(64), torch.zeros(64)
        for _ in range(100):
            payload = pack_blocks(codec, gradient, blocks, errors, torch.ones(()))
            unpack_blocks(codec, payload.unsqueeze(0), blocks, result)
            total += result
            if errors:
                errors.end_step(torch.zeros(()))
        arrived[feedback] = total[1:].mean().item()
    assert arrived == {False: 0, True: pytest.approx(1.0, abs=0.1)}


LAYOUTS = [
    Plan(pp, replicate, shard, tp, stage, False)
    for pp, replicate, shard, tp in itertools.product((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 8), (1, 2))
    for stage in (1,)
]


@pytest.mark.parametrize("node", [1, 2, 3, 4, 8, 64])
def test_routes_cover_every_group_by_hops_that_join_as_many_ranks(node):
    """Against groups taken from the mesh as an array. Refused is exactly what puts unequal numbers on nodes."""
    refused = 0
    for plan in LAYOUTS:
        mesh = np.arange(plan.world).reshape(plan.pp, plan.replicate, plan.shard, plan.tp)
        expected = [np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis]).tolist() for axis in (2, 1)]
        shapes = [
            {tuple(sorted(np.unique(np.array(group) // node, return_counts=True)[1].tolist())) for group in groups}
            for groups in expected
        ]
        uneven = any(len(shape) > 1 or len(set(next(iter(shape)))) > 1 for shape in shapes)
        if uneven:
            refused += 1
            with pytest.raises(ValueError, match=f"nodes of {node} processes"):
                reduction_routes(plan, node)
            continue
        for route, groups, within in zip(reduction_routes(plan, node), expected, ("inner", "outer")):
            size = len(groups[0])
            assert (route is None) == (size == 1)
            if route is None:
                continue
            assert math.prod(ranks for _, ranks in route.hops) == size and all(ranks > 1 for _, ranks in route.hops)
            assert sorted(sorted(sum(map(list, group), [])) for group in route.groups) == sorted(
                sorted(group) for group in groups
            )
            for group in route.groups:
                assert (
                    all(len({rank // node for rank in part}) == 1 for part in group)
                    and len({len(part) for part in group}) == 1
                )
                assert len({part[0] // node for part in group}) == len(group)
                nodes, local = len(group), len(group[0])
                assert list(route.hops) == (
                    [(within, local)] if nodes == 1 else [("inner", local)] * (local > 1) + [("outer", nodes)]
                )
    assert refused or node in (1, 64)


def test_kernels_in_tritons_interpreter_have_the_bits_of_the_torch_code():
    compare_kernels("quantize.py", "cpu", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu_have_the_bits_of_the_torch_code():
    compare_kernels("quantize.py", "cuda")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What tests/workers/compress.py saw on four processes."""
    root = tmp_path_factory.mktemp("compress")
    sources_of_runs(root)
    try:
        launch("compress.py", RANKS, root, forks=True)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return error
    return json.loads((root / "results.json").read_text())


@pytest.fixture
def measured(results):
    if isinstance(results, Exception):  # for every test that asks, without another launch
        raise results
    return results


def quantised(name: str, case: dict[str, Any]) -> bool:
    """Whether the gradient of this parameter may be quantised: not of norms and biases, unless a rule says so."""
    chosen = "norm" not in name and not name.endswith("bias")
    for pattern, rule in case.get("rules", {}).items():
        chosen = rule["quantise"] if fnmatchcase(name, pattern) else chosen
    return chosen


@pytest.mark.parametrize("name", PLANS)
def test_plans_match_one_process_within_their_codecs_tolerance(measured, name):
    """Losses, norms, weights and every gradient over three steps; and replicas hold the same bits."""
    seen = measured["plans"][name]
    assert not seen["reasons"], "\n".join(seen["reasons"][:8])


@pytest.mark.parametrize("name", PLANS)
def test_error_feedback_takes_what_is_predicted(measured, name):
    """On every rank, to the byte."""
    hops = PLANS[name]["gradients"]
    held = [rank["feedback"] for rank in measured["plans"][name]["ranks"]]
    assert all(here == planned for here, planned in held), held
    assert any(here for here, _ in held) == ("error_feedback" in str(hops) and name != "small"), held


LEAST_AND_MOST = {"int8": (2e-3, 2.5e-2), "int4": (4e-2, 0.3)}
"""Of the relative error that a codec makes in a gradient: below the least it was not quantised, above the most it was
more often than once."""


@pytest.mark.parametrize("name", PLANS)
def test_what_is_excluded_is_exact_and_all_else_is_quantised(measured, name):
    seen, case = measured["plans"][name], PLANS[name]
    least, most = LEAST_AND_MOST[seen["kind"]]
    exact = {"fp32": 2e-6, "bf16": 5e-2, "fp16": 5e-3}[case["precision"]]
    layers_alone = {"small": [], "small_layers": ["embedding.weight", "head.weight"]}.get(name)
    for parameter, off in seen["off"].items():
        if quantised(parameter, case) and (layers_alone is None or parameter in layers_alone):
            assert (least / 50 if "norm" in parameter else least) < off < most, (
                parameter,
                off,
            )  # norms are blocks of a few numbers
        else:
            assert off < exact, (parameter, off)


def row_bytes(hop: dict[str, Any], elements: int, plain: int) -> int:
    """Of a row of whole blocks; `plain` bytes an element where the hop is not quantised."""
    kind = hop.get("codec", "none")
    if kind == "none":
        return plain * elements
    blocks = elements // block_of(hop)
    return elements * {"int8": 8, "int4": 4}[kind] // 8 + (blocks + 3) // 4 * 16


def block_of(hop: dict[str, Any]) -> int:
    return {"none": 0, "int8": 256, "int4": 128}[hop.get("codec", "none")]


def hops_of(size: int, local: int, within: str) -> list[tuple[str, int]]:
    """Kinds of link, and how many ranks they join, of a group that has `local` ranks on each node."""
    return (
        [(within, size)]
        if local == size
        else [("outer", size)]
        if local == 1
        else [("inner", local), ("outer", size // local)]
    )


def units_of(parameters: dict[str, Any], pipeline: bool) -> list[dict[str, Any]]:
    """The parameters of each message: a layer's, and all others of a stage."""
    units: dict[Any, dict[str, Any]] = {}
    for name, shape in parameters.items():
        first = "embedding" in name and "copy" not in name or "position" in name
        units.setdefault(
            name.split(".")[1] if name.startswith("layers") else ("first" if first and pipeline else "rest"), {}
        )[name] = shape
    return [*units.values()]


def expected_bytes(case: dict[str, Any], parameters: dict[str, Any]) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind of link. Without tensor parallelism, whose cuts are another matter."""
    hops: dict[str, dict[str, Any]] = {"inner": {}, "outer": {}}
    for name, value in case["gradients"].items():
        if "__" in name:
            hops[name.partition("__")[0]][name.partition("__")[2]] = value
    shard = 1 if case["stage"] == 0 else case.get("shard", case["dp"])
    replicate, node = case["dp"] // shard, case["node"]
    scattered, reduced = (
        hops_of(shard, min(shard, node), "inner"),
        hops_of(replicate, min(replicate, max(1, node // shard)), "outer"),
    )
    plain, sent = {"fp32": 4, "bf16": 2}[case.get("reduce", "fp32")], {"inner": 0, "outer": 0}

    def coded(links: list[tuple[str, int]], elements: int) -> bool:
        return any(block_of(hops[kind]) for kind, _ in links) and 4 * elements >= case["gradients"]["min_size"]

    for unit in units_of(parameters, case["pp"] > 1):
        # Rows of FSDP's shards: the first dimension is filled up to a multiple of their number.
        pieces = {name: -(-shape[0] // shard) * math.prod(shape[1:]) for name, shape in unit.items()}
        chunk, some = sum(pieces.values()), any(quantised(name, case) for name in pieces)
        left_out = sum(size for name, size in pieces.items() if not quantised(name, case))
        if shard > 1 and not (some and coded(scattered, chunk * shard)):
            once = case["stage"] < 2 or any(block_of(hops[kind]) for kind, _ in scattered)
            sent[scattered[-1][0]] += plain * chunk * (shard - 1) * (1 if once else case["micro_batches"])
        elif shard > 1:
            grain = max(block_of(hops[kind]) for kind, _ in scattered)
            row, rows = sum(-(-size // grain) * grain for name, size in pieces.items() if quantised(name, case)), shard
            for index, (kind, size) in enumerate(scattered):
                sent[kind] += (size - 1) * (rows // size) * row_bytes(hops[kind], row, plain if index == 0 else 4)
                rows //= size
            sent[scattered[-1][0]] += plain * left_out * (shard - 1)
        if replicate > 1 and not (some and coded(reduced, chunk)):
            sent[reduced[-1][0]] += 2 * plain * chunk * (replicate - 1) // replicate
        elif replicate > 1:
            grain = max(block_of(hops[kind]) for kind, _ in reduced)
            whole = sum(-(-size // grain) * grain for name, size in pieces.items() if quantised(name, case))
            row, rows = -(-whole // (replicate * grain)) * grain, replicate
            for index, (kind, size) in enumerate(reduced):
                sent[kind] += (size - 1) * (rows // size) * row_bytes(hops[kind], row, plain if index == 0 else 4)
                rows //= size
            form: dict[str, Any] = {}
            for kind, size in reversed(reduced):  # what one link has encoded stays so on those after it
                form = form if block_of(form) else hops[kind]
                sent[kind] += (size - 1) * rows * row_bytes(form, row, 4)
                rows *= size
            sent[reduced[-1][0]] += 2 * plain * left_out * (replicate - 1) // replicate
    return sent


@pytest.mark.parametrize("name", [name for name, case in PLANS.items() if case["tp"] == 1])
def test_bytes_on_the_wire_equal_the_formula(measured, name):
    for rank, seen in enumerate(measured["plans"][name]["ranks"]):
        expected, steps = expected_bytes(PLANS[name], seen["parameters"]), STEPS + measured["plans"][name]["overflows"]
        assert seen["sent"] == [expected] * steps and sum(expected.values()) > 0, (rank, seen["sent"], expected)


def test_accumulation_costs_neither_bytes_nor_accuracy(measured):
    one, three = measured["plans"]["zero2_1"], measured["plans"]["zero2_3"]
    assert [rank["sent"] for rank in one["ranks"]] == [rank["sent"] for rank in three["ranks"]]
    for parameter, off in one["off"].items():
        assert three["off"][parameter] < 1.05 * off + 1e-6, parameter
    for name in ("hsdp2_3", "hsdp3_3"):  # the all-reduce over replicas
        case = PLANS[name] | {"micro_batches": 1}
        for rank in measured["plans"][name]["ranks"]:
            assert rank["sent"][0]["outer"] == expected_bytes(case, rank["parameters"])["outer"]


def test_quantised_hops_send_a_share_of_the_bytes():
    """int8 a quarter, int4 an eighth, but for scales, norms, biases and blocks that are filled up."""
    parameters = {f"layers.{layer}.feed_forward.up.weight": (512, 512) for layer in range(2)}
    base = {"stage": 2, "dp": 4, "node": 4, "pp": 1, "micro_batches": 1}
    sent = {
        codec: expected_bytes(base | {"gradients": {"min_size": 0, "inner__codec": codec}}, parameters)["inner"]
        for codec in ("none", "int8", "int4")
    }
    assert (
        sent["none"] == 3 * 4 * 2 * 512 * 128
        and 3.9 < sent["none"] / sent["int8"] < 4
        and 7.4 < sent["none"] / sent["int4"] < 8
    )


@pytest.mark.parametrize("name", BROKEN)
def test_numbers_that_are_not_finite_on_one_rank_skip_the_step_on_all_and_leave_the_errors(measured, name):
    seen = measured["broken"][name]
    assert len(seen) == 4 * RANKS
    for rank in seen[:-RANKS]:
        assert rank.pop("kept") > 0
        assert rank == {
            "good": 0.0,
            "bad": 1.0,
            "backoff": 0.5 if "fp16" in name else 1.0,
            "weights": True,
            "errors": True,
        }
    assert seen[-RANKS:] == [{"next": 0.0}] * RANKS


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_with_error_feedback_resumes_bit_by_bit(measured, name):
    whole, stopped, resumed = (measured["runs"][name][part] for part in ("whole", "stopped", "resumed"))
    assert [part["code"] for part in (whole, stopped, resumed)] == [0, 75, 0] and len(stopped["lines"]) == 3
    assert measured["runs"][name]["same"]  # weights, moments and errors after the last step
    for column in ("step", "loss", "grad_norm", "loss_scale", "comm/bytes_inner", "comm/bytes_outer"):
        assert [line[column] for line in resumed["lines"]] == [line[column] for line in whole["lines"]], column
    assert not any("dropped" in text for text in resumed["told"])


def test_another_plan_resumes_without_the_errors_and_says_so(measured):
    seen, whole = measured["runs"]["other_plan"], measured["runs"]["hsdp_classic"]["whole"]
    assert (
        seen["code"] == 0
        and sum("quantisation had left out" in text and "dropped" in text for text in seen["told"]) == 1
    )
    assert [line["loss"] for line in seen["lines"]] == pytest.approx(
        [line["loss"] for line in whole["lines"]], rel=2e-3
    )


def test_errors_are_said_to_be_dropped_where_the_checkpoint_has_them_and_the_run_does_not_take_them(measured):
    dropped = {
        name: [text for text in measured["runs"][name]["told"] if "dropped" in text]
        for name in ("other_plan", "no_codec", "codec_again")
    }
    assert [len(texts) for texts in dropped.values()] == [1, 1, 0], dropped
    assert all(measured["runs"][name]["code"] == 0 for name in dropped)


def test_metrics_have_the_bytes(measured):
    """The most of any rank; null without grad_comm."""
    plain = measured["runs"]["plain"]
    assert all(line[f"comm/bytes_{kind}"] is None for line in plain["lines"] for kind in ("inner", "outer"))
    for name in ("hsdp_classic", "nodes_fp16"):
        changes = RESUMED[name]
        gradients = {
            path.removeprefix("parallel.grad_comm.").replace(".", "__"): value
            for path, value in changes.items()
            if "grad_comm" in path
        }
        case = {
            "dp": 4,
            "pp": 1,
            "micro_batches": 1,
            "stage": changes["parallel.zero.stage"],
            "shard": changes.get("parallel.shard", 4),
            "node": changes["node"],
            "gradients": {"min_size": 0, **gradients},
        }
        expected = expected_bytes(case, plain["parameters"])
        for line in measured["runs"][name]["whole"]["lines"]:
            assert {kind: line[f"comm/bytes_{kind}"] for kind in expected} == expected


COMMON = [
    "model=tiny",
    "data=text",
    "data.sources.text.path=corpus",
    "batch.sequence_length=32",
    "batch.global_size=24",
    "batch.micro_size=1",
    "run.device=cpu",
]
REFUSED = {  # processes on nodes of so many; settings of parallel.grad_comm; words of the refusal; the way out
    "no such codec": (4, 4, {"outer.codec": "int2"}, ["grad_comm.outer.codec=int2", "int8"], {"outer.codec": "int8"}),
    "feedback of nothing": (
        4,
        4,
        {"outer.error_feedback": "classic"},
        ["grad_comm.outer.error_feedback=classic", "codec=none", "codec=int8 or int4"],
        {"outer.codec": "int8"},
    ),
    "no such feedback": (
        4,
        4,
        {"outer.codec": "int8", "outer.error_feedback": "loco"},
        ["grad_comm.outer.error_feedback=loco", "classic"],
        {"outer.error_feedback": "classic"},
    ),
    "no inner hop": (
        4,
        4,
        {"inner.codec": "int8"},
        ["grad_comm.inner.codec=int8", "dp4, ZeRO-0", "grad_comm.outer.codec=int8 instead"],
        {"inner.codec": "none", "outer.codec": "int8"},
    ),
    "no outer hop": (
        4,
        4,
        {"outer.codec": "int4", "zero.stage": 3},
        ["grad_comm.outer.codec=int4", "dp4, ZeRO-3", "grad_comm.inner.codec=int4 instead"],
        {"outer.codec": "none", "inner.codec": "int4"},
    ),
    "no inner hop with one rank a node": (
        4,
        1,
        {"inner.codec": "int8", "zero.stage": 3},
        ["grad_comm.inner.codec=int8", "grad_comm.outer.codec=int8 instead"],
        {"inner.codec": "none", "outer.codec": "int8"},
    ),
    "no hop": (
        1,
        1,
        {"outer.codec": "int8"},
        ["grad_comm.outer.codec=int8", "dp1", "codec=none", "more processes"],
        {"outer.codec": "none"},
    ),
    "uneven nodes": (
        6,
        4,
        {"outer.codec": "int8"},
        ["parallel.grad_comm", "nodes of 4 processes", "codec=none"],
        {"outer.codec": "none"},
    ),
    "shards that lie unevenly on nodes": (
        12,
        4,
        {"inner.codec": "int8", "zero.stage": 3, "shard": 6},
        ["parallel.shard=6", "nodes of 4 processes", "as many on every node"],
        {"shard": 4},
    ),
    "a negative size": (4, 4, {"min_size": -1}, ["grad_comm.min_size=-1", "at least 0"], {"min_size": 0}),
    "nothing to quantise": (
        4,
        4,
        {
            "outer.codec": "int8",
            **{f"precision.types.{role}.quantise": False for role in ("matrix", "embedding", "head")},
        },
        ["grad_comm.outer.codec=int8", "precision.types.matrix.quantise=true"],
        {"precision.types.matrix.quantise": True},
    ),
    "a rule with another type": (
        4,
        4,
        {"precision.types.matrix.quantise": "often"},
        ["precision.types.matrix.quantise", "often"],
        {"precision.types.matrix.quantise": False},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_settings_are_refused_with_a_way_out(monkeypatch, name):
    world, node, wrong, words, way_out = REFUSED[name]
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    homes = {"zero": "parallel.", "shard": "parallel.", "precision": ""}
    full = {path: homes.get(path.partition(".")[0], "parallel.grad_comm.") + path for path in {**wrong, **way_out}}
    with pytest.raises(ConfigError) as said:
        trainer.compose(COMMON + [f"{full[path]}={value}" for path, value in wrong.items()])
    assert len(said.value.problems) == 1 and all(word in str(said.value) for word in words), said.value.problems
    config = copy.deepcopy(neighbour())
    for path, value in {**wrong, **way_out}.items():
        parent, _, field = full[path].rpartition(".")
        setattr(attrgetter(parent)(config), field, value)
    assert check_config(config, world) == []


@cache
def neighbour() -> Config:
    """A legal configuration, to be changed."""
    return trainer.compose(COMMON, world_size=1)


def test_a_run_refuses_settings_that_nobody_checked(monkeypatch, tmp_path):
    config = trainer.compose([*COMMON, f"run.dir={tmp_path / 'run'}"])
    config.parallel.grad_comm.outer.codec = "int8"
    monkeypatch.setattr(trainer.training.run, "join_world", lambda *_: pytest.fail("joined a process group"))
    with pytest.raises(ConfigError, match="parallel.grad_comm.outer.codec=int8"):
        trainer.run(config)


@pytest.mark.parametrize("size", ["0", "some"])
def test_a_size_of_nodes_that_is_none_is_refused(monkeypatch, size):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE={size} in the environment"):
        trainer.compose(COMMON)
