"""What a run decides by its memory: activation=auto from the command to the folder, and from GPUs that have less."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from support.estimates import h200, shipped
from support.estimates import settings as configured
from support.launch import ROOT, warm_python
from support.names import LACKING, TERM
from torch.utils._python_dispatch import TorchDispatchMode

import trainer
from trainer.cluster.node import free_ports
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.diagnosis import oom_report
from trainer.observe import metrics
from trainer.observe.diagnose_run import diagnose_run
from trainer.parallel.zero.fsdp_internals import parameter_group
from trainer.planning.decide import MachineMemory, MemoryLimit, decide
from trainer.planning.estimate.recompute import measure_choice, with_section
from trainer.planning.resolve import resolve_layout
from trainer.training import out_of_memory
from trainer.training.out_of_memory import check_decision, explain_oom, format_oom
from trainer.training.session import least_memory
from trainer.util.tables import format_bytes

GIB = 2**30


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def composed(folder: Path, cache: Path, **overrides: object) -> Config:
    values = {
        "model": "tiny",
        "model.width": 64,
        "model.depth": 4,
        "data.tokenizer": "bytes",
        "data.cache": cache,
        "data.sources.stdlib.limit": 20,
        "batch.sequence_length": 64,
        "batch.global_size": 8,
        "run.dir": folder,
        "run.steps": 2,
        "run.device": "cpu",
        "lr.warmup": 1,
        "logging.console": "plain",
        **overrides,
    }
    return trainer.compose([f"{name}={value}" for name, value in values.items()])


def peak(config: Config, mode: str) -> float:
    """Predicted of a uniform mode, in GiB."""
    config = with_section(config, "activation", mode=mode, tile=0, offload=False)
    spec = ModelSpec.from_dict(config.model.to_dict())
    return measure_choice(config, resolve_layout(config, 1, spec), h200(), False).peak / GIB


def test_a_run_chooses_says_so_and_chooses_again(tmp_path, cache, capsys):
    """And whatever it chooses, it trains to the same bits."""
    plain = composed(tmp_path / "plain", cache)
    least, most = peak(plain, "full"), peak(plain, "none")
    half = {"activation": "auto", "activation.memory": (least + most) / 2}
    assert trainer.run(composed(tmp_path / "auto", cache, **half)).code == 0
    said = capsys.readouterr().out
    assert "activation=auto chose selective, which keeps all@" in said and "that it may take" in said
    written = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["activation"]
    assert written["mode"] == "selective" and any("@" in entry for entry in written["save"])
    assert trainer.compose([f"activation.save=[{','.join(written['save'])}]", "activation.mode=selective"])
    assert trainer.run(plain).code == 0
    losses = [
        [line["loss"] for line in metrics.read_metrics(tmp_path / name) if "loss" in line] for name in ("auto", "plain")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    more = {"activation": "auto", "activation.memory": 2 * most, "run.steps": 3}
    assert trainer.run(composed(tmp_path / "auto", cache, **more)).code == 0
    assert "activation=auto chose none" in capsys.readouterr().out


def test_what_cannot_fit_is_refused_before_anything_is_made(tmp_path, cache):
    small = {"activation": "auto", "activation.memory": 1e-4}
    with pytest.raises(ConfigError, match=r"nothing fits: .* \(full\), and activation.memory=0.0001; set .*run.force"):
        trainer.run(composed(tmp_path / "run", cache, **small))
    with pytest.raises(ConfigError, match="activation.hardware=nowhere: there is no such file"):
        trainer.run(composed(tmp_path / "run", cache, **{"activation": "auto", "activation.hardware": "nowhere"}))
    assert not (tmp_path / "run").exists()


def test_the_rank_with_least_free_memory_decides_for_all():
    spec = shipped("llama3_8b")
    plan = {"batch__sequence_length": 8192, "batch__micro_size": 2, "parallel__zero__stage": 3, "compile": True}
    config = configured(spec, **plan, activation__mode="auto")
    layout = resolve_layout(config, 2, spec, 2)

    def saved(*free: tuple[int, int]) -> list[str]:
        world = SimpleNamespace(device=torch.device("cpu"), gather=lambda own: list(free))
        room = MemoryLimit.of(least_memory(world), 2)
        return decide(config, layout, room, 2, h200()).config.activation.save

    kept = [saved(*((free * GIB, 1000 * GIB) for free in ranks)) for ranks in ((139, 139), (139, 110), (110, 110))]
    assert kept[0] == ["attention", "attention.*", "feed_forward.gate", "feed_forward.up"]
    assert kept[1] != kept[0] and kept[1] == kept[2]


def test_processes_of_a_machine_share_its_memory(tmp_path, cache):
    """What fits into the whole memory of a machine does not fit into the share that each of its processes has."""
    config = composed(tmp_path, cache, activation="auto")
    layout = resolve_layout(config, 1, ModelSpec.from_dict(config.model.to_dict()))
    need = peak(config, "full") * GIB
    for node, fits in ((1, True), (4, False)):
        memory = MachineMemory(None, int(2 * need))
        decision = decide(config, layout, MemoryLimit.of(memory, node), node, h200())
        given = config, decision, memory, node, torch.device("cpu")
        if fits:
            check_decision(*given)
        else:
            with pytest.raises(ConfigError, match="nothing fits: .* and there are"):
                check_decision(*given)


def started(folder: Path, cache: Path, world: int, *more: str) -> list[tuple[int, str]]:
    """Exit code and messages of each process of a run that lacks memory at the third micro-batch of its last rank."""
    given = ["model=tiny", "model.width=64", "model.depth=4", "data.tokenizer=bytes", f"data.cache={cache}"]
    given += ["data.sources.stdlib.limit=20", "batch.sequence_length=64", "batch.global_size=8", "batch.micro_size=4"]
    given += [f"run.dir={folder}", "run.device=cpu", "run.steps=4", "logging.console=none", "lr.warmup=1"]
    given += ["imports=[support.disturbance]", f"{TERM}.lacking=3"]
    given += [f"{TERM}.rank={world - 1}", "checkpoint.at_end=false", *more]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    [port] = free_ports()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "PYTHONPATH": path}
    place |= {"LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [warm_python(), "-m", "trainer", *given],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said)]


CODED = ("grad_comm.inner.codec=int8", "grad_comm.inner.error_feedback=classic", "grad_comm.min_size=0")
"""Quantised gradients with error feedback."""


@pytest.mark.parametrize(
    "world, more",
    [(1, ["optimizer.ema.decay=0.9"]), (2, ["parallel.zero.stage=2", *(f"parallel.{one}" for one in CODED)])],
    ids=["average", "error feedback"],
)
def test_a_run_that_lacks_memory_says_what_was_planned_what_was_taken_and_what_fits(tmp_path, cache, world, more):
    """What is offered is legal for the run's processes, needs less, and is what `diagnose` offers again. All states are
    as large as planned, to the byte; of the gathered parameters all are there when the loss is computed."""
    code, text = started(run := tmp_path / "run", cache, world, *more)[-1]
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("out of memory"))
    assert code == 1 and lines[first] == f"out of memory on rank {world - 1}: {LACKING}" and "Traceback" not in text
    assert lines[first + 1].startswith("  planned on the fullest rank, at ")
    assert lines[first + 1].endswith(f"; taken on rank {world - 1} after the error:")
    content = json.loads((run / "out_of_memory.json").read_text())
    actual, planned = content["actual"], content["planned"]
    assert content["rank"] == world - 1 and content["counted"]["machine"] > 2**20 and not content["unknown"]
    for name in ("parameters", "optimizer", "gathered parameters", "average of weights", "error feedback"):
        assert actual[name] == planned.get(name, 0), name
        assert (
            f"    {name}: planned {format_bytes(planned.get(name))}, taken {format_bytes(actual[name])}" in lines
            or not actual[name]
        )
    assert bool(actual["error feedback"]) == (world == 2) != bool(actual["average of weights"])
    assert actual["activations and all else"] > 2**20 < planned["activations"]
    offered = [one["text"] for one in content["overrides"]]
    assert offered and all(any(one in line for line in lines) for one in offered)
    for one in content["overrides"]:
        assert one["memory"] * GIB < sum(planned.values()) and one["relative"] > 0
        trainer.planning.resolve.compose(["model=tiny", "batch.global_size=8", *shlex.split(one["text"])], None, world)
    if world == 1:
        assert not any("parallel" in text for text in offered)
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["step"]) == ("failed", 2 if world == 2 else 1) and LACKING in status["reason"]
    found = diagnose_run(run)
    assert found.kind == "memory capacity" and LACKING in found.text
    assert [one.text for one in found.findings[0].overrides] == offered
    assert f"  parameters: planned {format_bytes(planned['parameters'])}, taken " in "\n".join(
        found.findings[0].cost.evidence
    )
    (run / "out_of_memory.json").unlink()
    again = diagnose_run(run)
    assert again.kind == "memory capacity" and again.findings[0].overrides and "activations" not in str(again.findings)


MESSAGE = SimpleNamespace(reduce_scatter_input=torch.ones(1000))


@pytest.mark.parametrize("kept", [{"reduce_scatter_states": [MESSAGE]}, {"reduce_scatter_state": MESSAGE}])
def test_what_is_held_in_the_middle_of_a_step_is_told_without_asking_for_memory(tmp_path, cache, monkeypatch, kept):
    """Before the last backward pass: gathered copies in bf16, the first micro-batch's gradients in fp32, and a message,
    as torch keeps it since 2.12, and as 2.11 does."""
    made, held = [], out_of_memory.memory_breakdown

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            before = {value.untyped_storage().data_ptr() for value in arguments if isinstance(value, torch.Tensor)}
            result = function(*arguments, **(options or {}))
            if result.untyped_storage().data_ptr() not in before:
                made.append(function)
            return result

    def watched(state):
        context = parameter_group(state.stages[0]).comm_ctx
        own = {"reduce_scatter_states", "reduce_scatter_state"} & vars(context).keys()
        assert [vars(context).pop(name) or None for name in own] == [None]  # whole shards need no message
        vars(context).update(kept)
        with Watched():
            return held(state)

    def lacks(*_):
        raise torch.OutOfMemoryError(LACKING)

    monkeypatch.setattr(out_of_memory, "memory_breakdown", watched)
    monkeypatch.setattr("trainer.parallel.zero.fsdp.FSDPSharding.begin_reducing_backward", lacks)
    more = {"precision": "bf16", "batch.micro_size": 4, "optimizer": "lion"}
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer.run(composed(tmp_path / "run", cache, **more))
    finally:
        dist.destroy_process_group()  # which a run that fails leaves to the end of its process
    found = oom_report.read_oom_report(tmp_path / "run")
    weights = found.planned["parameters"]
    assert not made and found.actual["parameters"] == weights == found.actual["gradients"]
    assert (
        found.actual["optimizer"] == found.planned["optimizer"] and found.actual["gathered parameters"] == weights / 2
    )
    assert found.actual["communication buffers"] == MESSAGE.reduce_scatter_input.nbytes and not found.unknown
    assert "gradients: planned" in format_oom(caught.value, LACKING)


def test_why_states_are_not_known_is_told(tmp_path, cache):
    config, world = composed(tmp_path, cache), SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    layout, memory = resolve_layout(config, 1, config.model), MachineMemory(None, 1000 * GIB)
    with pytest.raises(MemoryError) as caught, explain_oom(config, layout, world, memory, lambda: 0) as states:
        states.append(lambda: 1 / 0)
        raise MemoryError("no room")
    text = format_oom(caught.value, "no room")
    assert "what of activations and all else are states (ZeroDivisionError: division by zero) is not known" in text


def test_whatever_fails_beside_it_memory_is_what_is_told(tmp_path, cache, monkeypatch):
    """An estimator that fails, and a folder that takes nothing."""
    config, world = composed(tmp_path, cache), SimpleNamespace(rank=3, size=1, device=torch.device("cpu"))
    layout, memory = resolve_layout(config, 1, config.model), MachineMemory(None, 1000 * GIB)

    def told() -> str:
        with pytest.raises(MemoryError) as caught, explain_oom(config, layout, world, memory, lambda: 7):
            raise MemoryError("no room")
        return format_oom(caught.value, "no room")

    assert "needs less: " in told() and json.loads((tmp_path / "status.json").read_text())["step"] == 7
    monkeypatch.setattr("trainer.diagnosis.suggestions.estimate_within", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("trainer.diagnosis.suggestions.check_config", lambda *_: 1 / 0)
    text = told()
    assert "the estimator failed (ZeroDivisionError" in text and "start more processes" in text and "taken" in text
    assert "what of activations and all else are states is not known" in text
    monkeypatch.setattr("trainer.training.out_of_memory.measured_memory", lambda *_: 1 / 0)
    config.run.dir = "/proc/nowhere"
    assert told() == "out of memory on rank 0: no room"
    with pytest.raises(ValueError) as other, explain_oom(config, layout, world, memory, lambda: 7):
        raise ValueError("another")
    assert not hasattr(other.value, "__notes__")


BIG = {
    **{"model.width": 1024, "model.depth": 8, "model.attention.heads": 16, "model.attention.kv_heads": 16},
    **{"model.attention.head_dim": 64, "model.feed_forward.width": 4096, "batch.sequence_length": 2048},
    **{"run.device": "cuda", "precision": "bf16", "batch.micro_size": 32, "batch.global_size": 32},
    **{"loss.tile": 0, "activation.tile": 0},
}
"""Of fewer tokens, eager layers keep the host busier than the GPU, and recomputing them whole takes it less than
choosing."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_what_was_taken_is_told_by_category(tmp_path, cache):
    """Of a GPU that gives this process less than activations take."""
    torch.cuda.set_per_process_memory_fraction(6 * GIB / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.run(composed(tmp_path / "run", cache, activation="none", **BIG))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        dist.destroy_process_group()
    found = oom_report.read_oom_report(tmp_path / "run")
    assert not found.unknown and found.actual["parameters"] == found.planned["parameters"] > 0
    assert found.actual["activations and all else"] > GIB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_no_more_is_reserved_than_may_be(tmp_path, cache):
    """Between what the uniform modes take, and the allocator tries once."""
    plain = composed(tmp_path / "plain", cache, **BIG)
    least, most = peak(plain, "full"), peak(plain, "none")
    for share in (0.3, 0.7):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, limit = torch.cuda.memory_reserved(), least + share * (most - least)
        tries = torch.cuda.memory_stats()["num_alloc_retries"]
        auto = {"activation": "auto", "activation.memory": limit}
        assert trainer.run(composed(tmp_path / f"{share}", cache, **BIG, **auto)).code == 0
        written = yaml.safe_load((tmp_path / f"{share}" / "config.yaml").read_text())["activation"]
        assert written["mode"] == "selective"
        assert torch.cuda.max_memory_reserved() - before <= 1.05 * limit * GIB
        assert torch.cuda.memory_stats()["num_alloc_retries"] == tries
