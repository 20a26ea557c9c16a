"""DeepSpeed as the engine: the numbers of one process and of the torch engine, overflows, checkpoints, refusals."""
from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import textwrap

import pytest

from distributed import launch
from trainer.config import Config, ConfigError, ParallelConfig
from trainer.parallel.deepspeed_config import check_settings, generate
from trainer.parallel.plan import check_plan, resolve_plan
from workers.deepspeed_engine import CASES, LEGS, STEPS
from workers.parallel_runs import run


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What tests/workers/deepspeed_engine.py saw on four processes."""
    root = tmp_path_factory.mktemp("deepspeed")
    (root / "corpus").mkdir()
    for module in (argparse, shutil, textwrap):
        shutil.copy(module.__file__, root / "corpus" / f"{module.__name__}.txt")
    launch("deepspeed_engine.py", 4, root, timeout=500)
    return json.loads((root / "results.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_one_process(seen, name):
    result = seen["parity"][name]
    assert result["verdict"] == "PASS", result["reasons"]
    assert result["their_norms"] == pytest.approx(result["norms"], rel=1e-5)  # DeepSpeed's own, in fp32


def test_every_optimizer_and_type_of_moments(seen):
    assert all(worst < 1e-6 for worst in seen["optimizers"].values()), seen["optimizers"]


def test_stage_3_keeps_no_layer_for_backward(seen):
    alive, whole = seen["gathered"][::2], seen["gathered"][1::2]
    assert alive == [0, 0] and whole == [4 * 14] * 2


def test_overflows_are_skipped_alike_on_all_ranks(seen):
    for result in seen["overflows"]:
        for engine in ("torch", "deepspeed"):
            steps = [{key: value for key, value in step.items() if key != "changed"} for step in result[engine][0]]
            for other in result[engine][1:]:
                assert json.dumps([{k: v for k, v in step.items() if k != "changed"} for step in other]) == json.dumps(steps), result["case"]
            *steps, last = result[engine][0]
            assert [step["found_inf"] for step in steps] == [0, 1, 1, 0, 1, 0, 0, 1, 1, 0], (engine, result["case"])
            assert [step["scale"] for step in steps] == [1024, 1024, 512, 256, 256, 128, 128, 256, 128, 64], (engine, result["case"])
            assert [step["updates"] for step in steps] == [1, 1, 1, 2, 2, 3, 4, 4, 4, 5]
            assert not any(step["changed"] for some in result[engine] for step in some[:-1] if step["found_inf"])
            assert last == {"scaler": result["torch"][0][-1]["scaler"]} and last["scaler"]["_growth_tracker"] == 1
        mine, theirs = ([step for step in result[engine][0][:-1] if not step["found_inf"]] for engine in ("torch", "deepspeed"))
        for key in ("loss", "norm"):
            assert [step[key] for step in theirs] == pytest.approx([step[key] for step in mine], rel=2e-4), result["case"]


def test_a_run_goes_on_under_the_other_engine(seen):
    losses, norms, evals = [], [], {}
    for leg, some in enumerate(seen["legs"], start=1):
        assert some["code"] == 0 and some["steps"] == list(range(1, 2 * leg + 1))
        losses, norms, evals = some["losses"], some["norms"], evals | some["eval"]
    assert losses == pytest.approx(seen["whole"]["losses"], rel=2e-6)
    assert norms == pytest.approx(seen["whole"]["norms"], rel=5e-6)
    assert evals == pytest.approx(seen["whole"]["eval"], rel=2e-6) and len(evals) == len(LEGS)
    assert STEPS >= 3  # moments count from the second on


def parallel(**changes) -> ParallelConfig:
    """A plan for DeepSpeed; `changes` of the plan, and of its section `zero`."""
    config = ParallelConfig()
    config.zero.engine, config.zero.stage = "deepspeed", 1
    for name, value in changes.items():
        setattr(config.zero if hasattr(config.zero, name) else config, name, value)
    return config


ZEROPP = {"zero_optimization": {"zero_quantized_gradients": True}}

REFUSED = [  # processes, nodes, the plan, words of the refusal, a legal neighbour that it names
    (4, 1, {"stage": 0}, ["parallel.zero.stage=0", "parallel.zero.stage=1", "engine=torch"], {"stage": 1}),
    (4, 1, {"stage": 2, "pp": 2}, ["parallel.zero.stage=2", "parallel.pp=2", "parallel.zero.stage=1", "engine=torch"], {"stage": 2, "pp": 2, "engine": "torch"}),
    (4, 1, {"stage": 3, "pp": 2}, ["parallel.zero.stage=3", "parallel.pp=2"], {"stage": 1, "pp": 2}),
    (4, 1, {"stage": 2, "tp": 2}, ["parallel.zero.stage=2", "parallel.tp=2"], {"stage": 1, "tp": 2}),
    (4, 1, {"stage": 3, "tp": 2}, ["parallel.zero.stage=3", "parallel.tp=2"], {"stage": 3, "tp": 2, "engine": "torch"}),
    (4, 1, {"shard": 2, "stage": 3}, ["parallel.shard=2", "parallel.shard=-1"], {"stage": 3}),
    (4, 1, {"stage": 2, "nvme": "/disk"}, ["parallel.zero.nvme=/disk", "parallel.zero.stage=3", "parallel.zero.offload=true"], {"stage": 3, "nvme": "/disk"}),
    (4, 1, {"engine": "torch", "stage": 3, "nvme": "/disk"}, ["parallel.zero.nvme=/disk", "engine=deepspeed"], {"stage": 3, "nvme": "/disk"}),
    (4, 1, {"engine": "torch", "deepspeed": ZEROPP}, ["parallel.zero.deepspeed", "engine=deepspeed"], {}),
    (4, 1, {"stage": 3, "deepspeed": ZEROPP}, ["zero_quantized_gradients", "one", "leave it out"], {"stage": 3}),
    (4, 2, {"stage": 2, "deepspeed": ZEROPP}, ["zero_quantized_gradients", "parallel.zero.stage=3"], {"stage": 3, "deepspeed": ZEROPP}),
    (4, 1, {"stage": 3, "deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}, ["zero_hpz_partition_size"], {"stage": 3}),
    (4, 1, {"deepspeed": {"zero_optimization": {"stage": 3}}}, ["zero_optimization.stage", "leave it out"], {}),
    (4, 1, {"deepspeed": {"gradient_clipping": 1.0}}, ["parallel.zero.deepspeed.gradient_clipping", "zero_optimization"], {}),
    (4, 1, {"deepspeed": {"zero_optimization": 3}}, ["zero_optimization=3", "mapping"], {})]


@pytest.mark.parametrize("world, nodes, plan, words, neighbour", REFUSED)
def test_refused_with_the_way_out(world, nodes, plan, words, neighbour):
    found = check_plan(parallel(**plan), world, None, world // nodes)
    assert len(found) == 1 and all(word in found[0] for word in words), found
    assert not check_plan(parallel(**neighbour), world, None, world // nodes)


@pytest.mark.parametrize("change, words", [
    ({"compile": True, "parallel.zero.stage": 3}, ["compile=true", "compile=false"]),
    ({"precision.compute": "fp16", "precision.scale_backoff": 0.25}, ["precision.scale_backoff=0.25", "0.5"]),
    ({"parallel.pp": 2, "parallel.pipeline.schedule": "auto"}, ["schedule=auto", "interleaved"])])
def test_settings_that_contradict_the_engine(change, words):
    config = Config(parallel=parallel())
    assert not list(check_settings(config))
    for path, value in change.items():
        *parents, last = path.split(".")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    found, = check_settings(config)
    assert all(word in found for word in words), found


def test_deepspeed_checks_its_own_settings(tmp_path):
    import torch
    from trainer.parallel.deepspeed import check
    for change, words in (({"deepspeed": {"zero_optimization": {"sub_grup_size": 1}}}, ["sub_grup_size"]),
                          ({"nvme": str(tmp_path / "none")}, ["parallel.zero.nvme", "make it"])):
        with pytest.raises(ConfigError) as caught:
            check(Config(parallel=parallel(stage=3, **change)), torch.device("cpu"))
        assert all(word in str(caught.value) for word in words)
    check(Config(parallel=parallel(stage=3, offload=True, deepspeed={"zero_optimization": {"sub_group_size": 1e6}})), torch.device("cpu"))


def test_what_is_given_is_added_to_what_follows():
    import torch
    config = Config(parallel=parallel(stage=3, offload=True, deepspeed={
        "aio": {"thread_count": 2}, "zero_optimization": {"sub_group_size": 7, "offload_param": {"buffer_count": 3}}}))
    zero = generate(config, torch.device("cpu"))["zero_optimization"]
    assert zero["stage"] == 3 and zero["sub_group_size"] == 7 and zero["offload_optimizer"]["device"] == "cpu"
    assert zero["offload_param"] == {"device": "cpu", "buffer_count": 3, "pin_memory": False}
    assert generate(config, torch.device("cuda"))["zero_optimization"]["offload_param"]["pin_memory"]
    assert "DeepSpeed" in resolve_plan(config.parallel, 4).describe()


def test_imported_only_where_it_is_asked_for():
    subprocess.run([sys.executable, "-c", "import sys, trainer.train, trainer.parity.cli; assert 'deepspeed' not in sys.modules"], check=True)


def test_state_on_a_disk(tmp_path):
    """Where libaio is installed: masters, moments and parameters in files, and checkpoints to and from the torch engine."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("needs libaio-dev, and at the first time a few minutes of compiling")
    (tmp_path / "corpus").mkdir()
    shutil.copy(argparse.__file__, tmp_path / "corpus" / "argparse.txt")
    (tmp_path / "disk").mkdir()
    large = {"model.width": 256, "parallel.zero.stage": 3}  # DeepSpeed leaves small tensors in memory
    disk = large | {"parallel.zero.engine": "deepspeed", "parallel.zero.nvme": str(tmp_path / "disk"), "parallel.zero.deepspeed": {
        "zero_optimization": {"sub_group_size": 1_000_000, "offload_optimizer": {"buffer_count": 5}, "offload_param": {"buffer_size": 1_000_000}}}}
    whole = run(tmp_path / "whole", 6, **large)
    for steps, plan in ((2, disk), (4, large), (6, disk)):
        legs = run(tmp_path / "legs", steps, **plan)
    assert sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*") if file.is_file()) > 2**24
    assert legs["losses"] == pytest.approx(whole["losses"], rel=2e-6) and legs["norms"] == pytest.approx(whole["norms"], rel=5e-6)
