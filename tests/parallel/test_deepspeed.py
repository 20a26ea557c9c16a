"""DeepSpeed as the engine: the numbers of one process and of the torch engine, overflows, checkpoints, refusals."""

from __future__ import annotations

import inspect
import json
import subprocess

import pytest
import torch
from support.corpora import sources_of_runs
from support.estimates import every_way
from support.launch import launch, warm_python
from workers.deepspeed_engine import ADAPTED_LEGS, CASES, CUBES, LEGS, STEPS
from workers.parallel_runs import run

from trainer.config import Config, ConfigError, ParallelConfig
from trainer.parallel.zero.deepspeed_base import generate_config
from trainer.parallel.zero.fsdp import ENGINES, Engine, import_engine, load_engine
from trainer.parallel.zero.plan import check_settings
from trainer.planning.features import check_plan, resolve_plan


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What tests/workers/deepspeed_engine.py saw on four processes."""
    root = tmp_path_factory.mktemp("deepspeed")
    sources_of_runs(root)
    launch("deepspeed_engine.py", 4, root, forks=True)
    return json.loads((root / "4.json").read_text()) | {"root": root}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The same of data, tensor and pipeline parallelism at once."""
    root = tmp_path_factory.mktemp("deepspeed_8")
    launch("deepspeed_engine.py", 8, root, forks=True)
    return json.loads((root / "8.json").read_text())


@pytest.mark.parametrize("name", [*CASES, *CUBES])
def test_same_numbers_as_one_process(request, name):
    result = request.getfixturevalue("four" if name in CASES else "eight")["parity"][name]
    assert result["verdict"] == "PASS", result["reasons"]
    assert result["their_norms"] == pytest.approx(result["norms"], rel=1e-5)  # DeepSpeed's own, in fp32


def test_every_optimizer_and_type_of_moments(four):
    """A moment in bf16 may round the other way where a gradient differs in its last bit, as single ones do on some
    processors: their updates differ by the last bit of bf16, times the learning rate."""
    for found in four["optimizers"].values():
        assert found["others"] < 1e-6 and found["rounded"] <= 2 and found["matrices"] < 1e-3 / 2**8, found


def test_stage_3_keeps_no_layer_for_backward(four):
    alive, whole = four["gathered"][::2], four["gathered"][1::2]
    assert alive == [0, 0] and whole == [2 * 14] * 2


def test_a_lost_loss_alone_is_skipped(four):
    for result in four["lost"]:
        steps = result["steps"]
        assert [step["found_inf"] for step in steps] == [0, 1, 0] and [step["updates"] for step in steps] == [
            1,
            1,
            2,
        ], result
        assert [step["changed"] for step in steps] == [True, False, True], result


def test_overflows_are_skipped_alike_on_all_ranks(four):
    for result in four["overflows"]:
        for engine in ("torch", "deepspeed"):
            steps = [{key: value for key, value in step.items() if key != "changed"} for step in result[engine][0]]
            for other in result[engine][1:]:
                assert json.dumps([{k: v for k, v in step.items() if k != "changed"} for step in other]) == json.dumps(
                    steps
                ), result["case"]
            *steps, last = result[engine][0]
            assert [step["found_inf"] for step in steps] == [0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0], (engine, result["case"])
            assert [step["scale"] for step in steps] == [1024, 1024, 512, 256, 256, 128, 128, 128, 256, 128, 64], (
                engine,
                result["case"],
            )
            assert [step["updates"] for step in steps] == [1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5]
            assert not any(step["changed"] for some in result[engine] for step in some[:-1] if step["found_inf"])
            assert last == {"scaler": result["torch"][0][-1]["scaler"]} and last["scaler"]["_growth_tracker"] == 1
        mine, theirs = (
            [step for step in result[engine][0][:-1] if not step["found_inf"]] for engine in ("torch", "deepspeed")
        )
        for key in ("loss", "norm"):
            assert [step[key] for step in theirs] == pytest.approx([step[key] for step in mine], rel=2e-4), result[
                "case"
            ]


@pytest.mark.parametrize(("name", "count"), [("legs", len(LEGS)), ("adapters", len(ADAPTED_LEGS))])
def test_a_run_goes_on_under_the_other_engine(four, name, count):
    losses, norms, evals, whole = [], [], {}, four[name]["whole"]
    for leg, some in enumerate(four[name]["legs"], start=1):
        assert some["code"] == 0 and some["steps"] == list(range(1, 2 * leg + 1))
        losses, norms, evals = some["losses"], some["norms"], evals | some["eval"]
    assert losses == pytest.approx(whole["losses"], rel=2e-6)
    assert norms == pytest.approx(whole["norms"], rel=5e-6)
    assert evals == pytest.approx(whole["eval"], rel=2e-6) and len(evals) == count
    assert STEPS >= 3  # moments count from the second on


def test_a_checkpoint_of_adapters_holds_what_is_trained(four):
    paths = [*(four["root"] / "adapters/checkpoints").glob("step-*")]
    assert paths
    for path in paths:
        names = json.loads((path / "manifest.json").read_text())["tensors"]
        held = [name.removeprefix("model.") for name in names if name.startswith("model.")]
        assert "norm.weight" in held and all(
            name.endswith((".lora_a", ".lora_b")) for name in {*held} - {"norm.weight"}
        )


OFFLOADED = "parallel.zero.offload=true"


def parallel(**changes) -> ParallelConfig:
    """A plan for DeepSpeed; `changes` of the plan, and of its section `zero`."""
    config = ParallelConfig()
    config.zero.engine, config.zero.stage = "deepspeed", 1
    for name, value in changes.items():
        setattr(config.zero if hasattr(config.zero, name) else config, name, value)
    return config


def zero(**keys) -> dict:
    return {"zero_optimization": keys}


TWO = zero(zero_hpz_partition_size=2)

REFUSED = [  # processes, nodes, the plan, words of the refusal, a legal neighbour that it names
    (4, 1, {"stage": 0}, ["parallel.zero.stage=0", "parallel.zero.stage=1", "engine=torch"], {"stage": 1}),
    (
        4,
        1,
        {"stage": 2, "pp": 2},
        ["parallel.zero.stage=2", "parallel.pp=2", "parallel.zero.stage=1", "engine=torch"],
        {"stage": 2, "pp": 2, "engine": "torch"},
    ),
    (4, 1, {"stage": 3, "pp": 2}, ["parallel.zero.stage=3", "parallel.pp=2"], {"stage": 1, "pp": 2}),
    (4, 1, {"stage": 2, "tp": 2}, ["parallel.zero.stage=2", "parallel.tp=2"], {"stage": 1, "tp": 2}),
    (4, 1, {"stage": 3, "tp": 2}, ["parallel.zero.stage=3", "parallel.tp=2"], {"stage": 3, "tp": 2, "engine": "torch"}),
    (
        4,
        1,
        {"stage": 1, "tp": 2, "tp_overlap": "copy_engine"},
        ["parallel.tp_overlap=copy_engine", "tp_overlap=off"],
        {"stage": 1, "tp": 2},
    ),
    (4, 1, {"shard": 2, "stage": 3}, ["parallel.shard=2", "parallel.shard=-1"], {"stage": 3}),
    (
        4,
        1,
        {"stage": 2, "nvme": "/disk"},
        ["parallel.zero.nvme=/disk", "parallel.zero.stage=3", "parallel.zero.offload=true"],
        {"stage": 3, "nvme": "/disk"},
    ),
    (
        4,
        1,
        {"engine": "torch", "stage": 3, "nvme": "/disk"},
        ["parallel.zero.nvme=/disk", "engine=deepspeed"],
        {"stage": 3, "nvme": "/disk"},
    ),
    (4, 1, {"engine": "torch", "deepspeed": TWO}, ["parallel.zero.deepspeed", "engine=deepspeed"], {}),
    (4, 1, {"stage": 3, "deepspeed": TWO}, ["zero_hpz_partition_size=2", "one", "leave it out"], {"stage": 3}),
    (
        4,
        2,
        {"stage": 2, "deepspeed": TWO},
        ["zero_hpz_partition_size", "parallel.zero.stage=3"],
        {"stage": 3, "deepspeed": TWO},
    ),
    (
        12,
        2,
        {"stage": 3, "deepspeed": zero(zero_hpz_partition_size=4)},
        ["zero_hpz_partition_size=4", "6 processes", "1, 2, 3, 6"],
        {"stage": 3, "deepspeed": zero(zero_hpz_partition_size=3)},
    ),
    (
        4,
        2,
        {"stage": 3, "nvme": "/disk", "deepspeed": TWO},
        ["zero_hpz_partition_size=2", "parallel.zero.nvme"],
        {"stage": 3, "deepspeed": TWO},
    ),
    (
        4,
        2,
        {"stage": 3, "deepspeed": zero(zero_hpz_partition_size=True)},
        ["=true", "whole number"],
        {"stage": 3, "deepspeed": TWO},
    ),
    (
        4,
        1,
        {"stage": 3, "deepspeed": zero(zero_hpz_partition_size="2")},
        ["=2", "whole number"],
        {"stage": 3, "deepspeed": zero(zero_hpz_partition_size=1)},
    ),
    *(
        (
            4,
            nodes,
            {"stage": stage, "deepspeed": zero(zero_quantized_gradients=value)},
            ["zero_quantized_gradients", "parallel.grad_comm"],
            {},
        )
        for nodes, stage, value in ((2, 3, True), (1, 3, 1), (1, 2, "true"))
    ),
    (
        4,
        2,
        {"stage": 3, "deepspeed": zero(zero_quantized_weights="true")},
        ["zero_quantized_weights=true must be true or false"],
        {"stage": 3, "deepspeed": zero(zero_quantized_weights=True)},
    ),
    (
        4,
        1,
        {"stage": 3, "deepspeed": zero(zero_quantized_weights=True)},
        ["zero_quantized_weights", "between nodes", "leave it out"],
        {},
    ),
    (4, 2, {"stage": 3, "deepspeed": zero(zero_quantized_nontrainable_weights=1)}, ["frozen", "leave it out"], {}),
    (4, 1, {"deepspeed": zero(stage=3)}, ["zero_optimization.stage", "leave it out"], {}),
    (
        4,
        1,
        {"deepspeed": {"gradient_clipping": 1.0}},
        ["parallel.zero.deepspeed.gradient_clipping", "zero_optimization"],
        {},
    ),
    (4, 1, {"deepspeed": {1: 2}}, ["parallel.zero.deepspeed.1", "zero_optimization"], {}),
    *(
        (4, 1, {"deepspeed": zero(**{key: value})}, [f"zero_optimization.{key}", "leave it out"], {})
        for key, value in (
            ("round_robin_gradients", True),
            ("parameter_alignment", True),
            ("compute_grad_norm", False),
            ("cpu_offload", True),
            ("allgather_bucket_size", 3),
            ("legacy_stage1", True),
            ("zenflow", {}),
            ("sub_grup_size", 1),
        )
    ),
    (
        4,
        1,
        {"deepspeed": zero(offload_optimizer={"pin_memory": False})},
        ["offload_optimizer", "parallel.zero.offload=true"],
        {"offload": True, "deepspeed": zero(offload_optimizer={"pin_memory": False})},
    ),
    (
        4,
        1,
        {"offload": True, "deepspeed": zero(offload_param={"pin_memory": False})},
        ["offload_param", "parallel.zero.stage=3"],
        {"offload": True, "stage": 3, "deepspeed": zero(offload_param={"pin_memory": False})},
    ),
    (
        4,
        1,
        {"offload": True, "deepspeed": zero(offload_optimizer={"device": "none"})},
        ["offload_optimizer.device", "leave it out"],
        {},
    ),
    (
        4,
        1,
        {"offload": True, "stage": 3, "deepspeed": zero(offload_optimizer={"ratio": 0.5})},
        ["offload_optimizer.ratio", "pin_memory"],
        {},
    ),
    (
        4,
        1,
        {"offload": True, "stage": 3, "deepspeed": zero(offload_param={"buffer_count": 3})},
        ["buffer_count", "parallel.zero.nvme"],
        {"nvme": "/disk", "stage": 3, "deepspeed": zero(offload_param={"buffer_count": 3})},
    ),
    (
        4,
        1,
        {"stage": 2, "deepspeed": zero(overlap_comm=True)},
        ["overlap_comm", "parallel.zero.stage=3"],
        {"stage": 3, "deepspeed": zero(overlap_comm=False)},
    ),
    (
        4,
        1,
        {"deepspeed": {"aio": {"block_size": 1}}},
        ["aio", "parallel.zero.nvme"],
        {"stage": 3, "nvme": "/disk", "deepspeed": {"aio": {"block_size": 1}}},
    ),
    *(
        (4, 1, {"deepspeed": given}, words, {})
        for given, words in (
            (zero(reduce_bucket_size={"a": 1}), ["reduce_bucket_size={'a': 1}", "whole number"]),
            (zero(reduce_bucket_size=0), ["from 1 on"]),
            (zero(reduce_bucket_size=float("inf")), ["whole number"]),
            (zero(reduce_bucket_size="1e8"), ["whole number"]),
            (zero(contiguous_gradients=None), ["=null", "true or false"]),
            ({"zero_optimization": 3}, ["zero_optimization=3", "mapping"]),
            ({"zero_optimization": None}, ["zero_optimization=null", "mapping"]),
            ({"comms_logger": [1]}, ["comms_logger=[1]", "mapping"]),
            ({"comms_logger": {"prof_ops": "all"}}, ["prof_ops=all", "list"]),
            ({"wall_clock_breakdown": "yes"}, ["true or false"]),
        )
    ),
]


@pytest.mark.parametrize("world, nodes, plan, words, neighbour", REFUSED)
def test_refused_with_the_way_out(world, nodes, plan, words, neighbour):
    found = check_plan(parallel(**plan), world, None, world // nodes)
    assert len(found) == 1 and all(word in found[0] for word in words), found
    assert not check_plan(parallel(**neighbour), world, None, world // nodes)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"compile": True, "parallel.zero.stage": 3}, ["compile=true", "compile=false"]),
        ({"parallel.pp": 2, "parallel.pipeline.schedule": "auto"}, ["schedule=auto", "interleaved"]),
    ],
)
def test_settings_that_contradict_the_engine(change, words):
    config = Config(parallel=parallel())
    assert not list(check_settings(config))
    for path, value in change.items():
        *parents, last = path.split(".")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    (found,) = check_settings(config)
    assert all(word in found for word in words), found


def test_deepspeed_checks_its_own_settings(tmp_path, monkeypatch):
    engine = import_engine(torch.device("cpu"))
    (tmp_path / "file").touch(mode=0o777)
    for change, words in (
        ({"deepspeed": zero(sub_grup_size=1)}, ["sub_grup_size"]),
        ({"deepspeed": {"aio": 3}}, ["DeepSpeed says", "int"]),
        ({"deepspeed": zero(mics_shard_size=2)}, ["DeepSpeed says: ", "mics_shard_size"]),
        ({"deepspeed": zero(zero_quantized_weights=True)}, ["zero_quantized_weights=true", "run.device=cuda"]),
        ({"nvme": str(tmp_path / "none")}, ["parallel.zero.nvme", "make it"]),
        ({"nvme": str(tmp_path / "file")}, ["parallel.zero.nvme", "make it"]),
    ):
        with pytest.raises(ConfigError) as caught:
            engine.DeepSpeed.check(Config(parallel=parallel(stage=3, **change)), torch.device("cpu"))
        assert all(word in str(caught.value) for word in words) and "http" not in str(caught.value)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no no-such-compiler here; install it"):
        engine.DeepSpeed.check(Config(parallel=parallel(stage=3, nvme=str(tmp_path))), torch.device("cpu"))
    engine.DeepSpeed.check(
        Config(parallel=parallel(stage=3, offload=True, deepspeed=zero(sub_group_size=1e6))), torch.device("cpu")
    )


def test_what_is_given_is_added_to_what_follows():
    given = {
        "steps_per_print": 2,
        "zero_optimization": {"sub_group_size": 7, "overlap_comm": False, "offload_param": {"pin_memory": False}},
    }
    config = Config(parallel=parallel(stage=3, offload=True, deepspeed=given))
    section = generate_config(config, torch.device("cuda"))["zero_optimization"]
    assert section["stage"] == 3 and section["sub_group_size"] == 7 and not section["overlap_comm"]
    assert section["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert section["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert not generate_config(config, torch.device("cpu"))["zero_optimization"]["offload_optimizer"]["pin_memory"]
    assert "DeepSpeed" in resolve_plan(config.parallel, 4).describe() and not check_plan(config.parallel, 4)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_the_methods_of_the_protocol(name):
    engine = load_engine(name, torch.device("cpu"))
    asked = {name: member for name, member in vars(Engine).items() if inspect.isfunction(member) and name[0] != "_"}
    assert {"shard", "materialize", "build_optimizer", "sharding"} <= asked.keys()
    for method, member in asked.items():
        assert list(inspect.signature(getattr(engine, method)).parameters) == list(inspect.signature(member).parameters)


def test_imported_only_where_it_is_asked_for_and_for_the_device_of_the_run():
    subprocess.run(
        [
            warm_python(),
            "-c",
            "import sys, torch, trainer.training.run, trainer.parity; assert 'deepspeed' not in sys.modules\n"
            "torch.cuda.is_available = lambda: True\nfrom trainer.parallel.zero.fsdp import import_engine\n"
            "assert import_engine(torch.device('cpu')).get_accelerator().device_name() == 'cpu'",
        ],
        check=True,
    )
    import_engine(torch.device("cpu"))
    with pytest.raises(ConfigError, match="run.device=cuda: .* for run.device=cpu; set that"):
        import_engine(torch.device("cuda"))


@pytest.mark.parametrize(
    "changes, ways",
    [
        ({"stage": 1}, {"parallel.zero.stage=2", "parallel.zero.stage=3", "parallel.tp=2", OFFLOADED}),
        ({"stage": 1, "compile": True}, {"parallel.zero.stage=2", "parallel.tp=2", OFFLOADED}),
        ({"stage": 1, "tp": 2, "pp": 2}, {"parallel.tp=4", OFFLOADED}),
        ({"stage": 1, "pp": 2, "offload": True}, {"parallel.tp=2"}),
        ({"stage": 2}, {"parallel.zero.stage=3", OFFLOADED}),
        ({"stage": 3}, {OFFLOADED, "parallel.zero.nvme=FOLDER"}),
        ({"stage": 3, "offload": True}, {"parallel.zero.nvme=FOLDER"}),
        ({"stage": 3, "nvme": "/disk"}, set()),
    ],
)
def test_what_a_run_without_memory_is_offered_are_plans_that_run(changes, ways):
    config = Config(compile=changes.pop("compile", False), parallel=parallel(**changes))
    config.activation.mode, config.batch.micro_size = "full", 1
    config.batch.global_size, config.batch.accumulation = 8, None
    offered = {text for text in every_way(config, 8) if text.startswith("parallel.") and "batch" not in text}
    assert ways <= offered and not [text for text in offered - ways if "zero" in text or "tp" in text], offered


def test_state_on_a_disk(tmp_path):
    """Where libaio is installed: masters, moments and parameters in files, and checkpoints to and from the torch
    engine."""
    try:
        import_engine(torch.device("cpu")).DeepSpeed.check(
            Config(parallel=parallel(stage=3, nvme=str(tmp_path))), torch.device("cpu")
        )
    except ConfigError as error:
        pytest.skip(f"not tested here, and takes two minutes to compile at the first time: {error}")
    sources_of_runs(tmp_path)
    (tmp_path / "disk").mkdir()
    large = {"model.width": 256, "parallel.zero.stage": 3}  # DeepSpeed leaves small tensors in memory
    disk = large | {
        "parallel.zero.engine": "deepspeed",
        "parallel.zero.nvme": str(tmp_path / "disk"),
        "parallel.zero.deepspeed": {
            "zero_optimization": {
                "sub_group_size": 1_000_000,
                "offload_optimizer": {"buffer_count": 5},
                "offload_param": {"buffer_size": 1_000_000},
            }
        },
    }
    whole = run(tmp_path / "whole", 6, **large)
    for steps, plan in ((2, disk), (4, large), (6, disk)):
        legs = run(tmp_path / "legs", steps, **plan)
    assert sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*") if file.is_file()) > 2**24
    assert legs["losses"] == pytest.approx(whole["losses"], rel=2e-6) and legs["norms"] == pytest.approx(
        whole["norms"], rel=5e-6
    )
