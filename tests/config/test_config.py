"""Composition of a configuration: what wins over what, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainer.config import Config, ConfigError, ParallelConfig, typed
from trainer.config.fields import CONFIGS, describe_outside
from trainer.config.model import ModelSpec
from trainer.planning.resolve import compose


def refused(*overrides: str, world_size: int | None = 1, config_dir: object = None) -> list[str]:
    try:
        compose(overrides, config_dir, world_size)
    except ConfigError as error:
        return error.problems
    return []


def problems(*overrides: str, **where: object) -> list[str]:
    found = refused(*overrides, **where)
    assert found, "this should have been refused"
    return found


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_defaults_and_overrides():
    config = compose()
    assert isinstance(config, Config) and config.model.name == "tiny" and config.run.dir == "runs/run"
    config = compose(
        ["lr=wsd", "lr.peak=1e-2", "++run.steps=50", "compile=true", "logging.trace=[3,4]", "logging.wandb.project=us"]
    )
    assert (config.lr.schedule, config.lr.peak, config.run.steps, config.compile) == ("wsd", 0.01, 50, True)
    assert config.logging.trace == [3, 4] and config.logging.wandb.project == "us"


def test_precedence(tmp_path):
    write(
        tmp_path,
        "config/base",
        "# @package _global_\ndefaults:\n  - override /parallel: zero2\n  - _self_\nrun: {steps: 70, seed: 7}\n",
    )
    write(
        tmp_path,
        "config/child",
        "# @package _global_\ndefaults:\n  - base\n  - override /lr: linear\n  - _self_\nrun: {steps: 80}\n",
    )
    write(tmp_path, "config/other", "# @package _global_\nrun: {steps: 90}\n")
    child = compose(["+config=child"], tmp_path)
    assert (child.parallel.zero.stage, child.lr.schedule, child.run.steps, child.run.seed) == (2, "linear", 80, 7)
    assert compose(["+config=[child,other]"], tmp_path).run.steps == 90
    assert compose(["+config=[other,child]"], tmp_path).run.steps == 80
    last = compose(["run.steps=60", "parallel=zero1", "+config=[child,other]"], tmp_path)
    assert (last.run.steps, last.parallel.zero.stage) == (60, 1)


def test_own_folder_wins(tmp_path):
    write(tmp_path, "model/tiny", "name: mine\nwidth: 64\n")
    write(tmp_path, "model/another", "name: another\n")
    write(tmp_path, "config/debug", "# @package _global_\nrun: {steps: 33}\n")
    write(tmp_path, "config.yaml", "run: {steps: 1}\n")  # a run folder has one; it is no defaults list
    write(tmp_path, "cluster/big", "# @package _global_\nparallel: {shard: 1}\n")
    assert compose([], tmp_path).model.name == "mine" and compose().model.name == "tiny"
    assert compose(["model=another"], tmp_path).model.name == "another"
    assert compose(["+config=debug", "+cluster=big"], tmp_path).run.steps == 33
    assert compose(["parallel=zero1"], str(tmp_path)).parallel.zero.stage == 1
    assert "there is no folder" in problems(config_dir=tmp_path / "none")[0]


def test_plus_is_optional():
    assert compose(["config=debug"]).run.steps == 5
    assert compose(["+parallel=zero1"]).parallel.zero.stage == 1


def test_interpolation_and_entries():
    config = compose(["lr.warmup=7", "run.steps=${lr.decay}", "lr.decay=40", "run.name=a", "data.vocab_size=300"])
    assert (config.run.steps, config.run.dir) == (40, "runs/a")
    rules = compose(["precision.types.rules={layers.0.*: {lr_scale: 1}}", "+model.overrides.1.attention.window=16"])
    assert rules.precision.types.rules == {"layers.0.*": {"lr_scale": 1.0}}, "only what is given, in its type"
    assert rules.model.layer(1).attention.window == 16 and rules.model.layer(0).attention.window == 0
    sources = compose(
        ["+data.sources.a={kind: text, path: a.txt}", "+data.sources.b={kind: text, path: b.txt}", "~data.sources.b"]
    )
    assert (
        sources.data.sources["a"].path == "a.txt"
        and sources.data.sources["a"].weight == 1.0
        and "b" not in sources.data.sources
    )


def test_shipped_files_compose():
    for recipe in sorted(set(CONFIGS.glob("config/*.yaml")) - set(CONFIGS.glob("config/*_h[12]00x*"))):  # own test
        own = ["model.from_hf=null"] if recipe.stem in ("finetune", "lora") else []  # which its user names
        chosen = f"+config={recipe.stem}", "data=stdlib", *own
        assert not all(refused(*chosen, world_size=world) for world in (4, 8, 1)), refused(*chosen, world_size=4)
    for group in ("model", "parallel", "precision", "activation", "optimizer", "lr", "logging"):
        options = sorted(path.stem for path in CONFIGS.glob(f"{group}/*.yaml"))
        assert options
        for option in options:
            compose([f"{group}={option}", *["compile=true"] * (group == "activation")], world_size=4)
    for corpus in CONFIGS.glob("data/*.yaml"):
        assert all("has no value" in text for text in refused(f"data={corpus.stem}")), refused(f"data={corpus.stem}")


def test_shipped_plans():
    plan = {
        path.stem: compose([f"parallel={path.stem}"], world_size=4).parallel for path in CONFIGS.glob("parallel/*.yaml")
    }
    assert [plan[name].zero.stage for name in ("ddp", "zero1", "zero2", "zero3", "hsdp", "zero3_offload")] == [
        0,
        1,
        2,
        3,
        3,
        3,
    ]
    assert plan["hsdp_int8"] == dataclasses.replace(plan["hsdp"], grad_comm=plan["hsdp_int8"].grad_comm)
    assert (plan["hsdp"].grad_comm.outer.codec, plan["hsdp_int8"].grad_comm.outer.codec) == ("none", "int8")
    assert plan["hsdp"].shard == 2 and plan["zero3_offload"].zero.offload and not plan["zero3"].zero.offload


WRONG = [  # overrides, what the one problem must say
    (["+parallel.tpp=3"], ["'parallel.tpp'", "did you mean 'parallel.tp'"]),
    (["parallel.tpp=3"], ["'parallel.tpp'", "did you mean 'parallel.tp'"]),
    (["steps=5"], ["'steps'", "did you mean 'run.steps'"]),
    (["stage=3"], ["'stage'", "'parallel.zero.stage'"]),
    (["paralel=zero3"], ["'paralel'", "did you mean 'parallel'"]),
    (["qqq=1"], ["'qqq'", "legal: run, model, data"]),
    (["model.attention.hedas=3"], ["'model.attention.hedas'", "did you mean 'model.attention.heads'"]),
    (["batch={globl_size: 8}"], ["'batch.globl_size'", "did you mean 'batch.global_size'"]),
    (["~optim"], ["~optim", "here it is 'optimizer.name'", "only entries of mappings"]),
    (["~parallel"], ["~parallel", "only entries of mappings"]),
    (["~run.steps"], ["~run.steps", "only entries of mappings"]),
    (["parallel=null"], ["parallel=None: there is no such option", "legal: "]),
    (["parallel=zero33"], ["parallel=zero33", "did you mean 'zero3'"]),
    (["lr=3e-4"], ["lr=3e-4", "legal: constant, cosine, linear, wsd", "lr.peak=VALUE"]),
    (["parallel={stage: 3}"], ["parallel={'stage': '3'}", "parallel.NAME=VALUE"]),
    (["+config=debug", "+config=demo"], ["+config=[a,b]"]),
    (["config=debug", "+config=debug"], ["+config=[a,b]"]),
    (["+config=debugg"], ["config=debugg", "recipe", "did you mean 'debug'"]),
    (["+config=[debug,nothing_like_it]"], ["config=nothing_like_it", "legal: ", "debug"]),
    (["optimizer.name=adamv"], ["optimizer.name=adamv", "adamw, lion, sgd", "did you mean 'adamw'"]),
    (["parallel.zero.stage=7"], ["parallel.zero.stage=7", "0, 1, 2, 3"]),
    (["precision.compute=null"], ["precision.compute=null", "fp32, bf16, fp16"]),
    (["run.steps=abc"], ["run.steps=abc", "whole number"]),
    (["run.steps=1.5"], ["run.steps=1.5", "whole number"]),
    (["run.steps=null"], ["run.steps=null", "whole number"]),
    (["run.steps.foo=3"], ["run.steps=", "whole number"]),
    (["lr.peak=high"], ["lr.peak=high", "a number"]),
    (["lr.peak=nan"], ["lr.peak=nan", "a number"]),
    (["model.attention.rope.theta=0"], ["model.attention.rope.theta=0.0", "above 0"]),
    (["model.norm.eps=-1"], ["model.norm.eps=-1.0", "at least 0"]),
    (["model.norm.eps=nan"], ["model.norm.eps=nan", "a number"]),
    (["model.overrides={0: {norm: {eps: nan}}}"], ["model.overrides.0.norm.eps=nan", "a number"]),
    (["compile=maybe"], ["compile=maybe", "true or false"]),
    (["run.name=[a]"], ["run.name=['a']", "text"]),
    (["run.device=???"], ["run.device", "no value"]),
    (["batch=4"], ["batch=4", "sequence_length, global_size"]),
    (["logging.trace=3"], ["logging.trace=3", "list"]),
    (["logging.trace=[1,x]"], ["logging.trace.1=x", "whole number"]),
    (["logging.trace=[0]"], ["logging.trace=0", "at least 1"]),
    (["+data.sources.a={kind: txt}"], ["data.sources.a.kind=txt", "did you mean 'text'"]),
    (
        ["+data.sources.a={kind: text, pathh: x, path: y}"],
        ["'data.sources.a.pathh'", "did you mean 'data.sources.a.path'"],
    ),
    (["+data.sources.a=3", "+data.sources.b={}"], ["data.sources.a=3", "mapping"]),
    (["+data.sources.a={kind: jsonl}"], ["data.sources.a.kind=jsonl", "data.sources.a.path"]),
    (["+data.sources.a={weight: -1}"], ["data.sources.a.weight=-1.0", "at least 0"]),
    (["data.tokenizer=bpe", "data.vocab_size=4096"], ["model.vocab_size=512", "data.vocab_size=4096"]),
    (["data.tokenizer=bytes", "model.vocab_size=256"], ["model.vocab_size=256", "257 tokens"]),
    (["precision.types.rules={a: {lr_scal: 1}}"], ["'precision.types.rules.a.lr_scal'", "did you mean", "lr_scale"]),
    (
        ["precision.types.rules={a: {optimizer: adamww}}"],
        ["precision.types.rules.a.optimizer=adamww", "did you mean 'adamw'"],
    ),
    (["precision.types.rules={a: {lr_scale: -1}}"], ["precision.types.rules.a.lr_scale=-1.0", "at least 0"]),
    (["precision.types.norm.weight_decay=-1"], ["precision.types.norm.weight_decay=-1.0", "at least 0"]),
    (["model.pattern=[{attention: {windw: 4}}]"], ["'model.pattern.0.attention.windw'", "did you mean", "window"]),
    (["model.pattern=[{attention: {window: x}}]"], ["model.pattern.0.attention.window=x", "whole number"]),
    (["model.pattern=[{norm: {kind: rmss}}]"], ["model.pattern.0.norm.kind=rmss", "did you mean 'rms'"]),
    (["+model.overrides.0.attn={}"], ["'model.overrides.0.attn'", "attention"]),
    (["model.overrides={99: {norm: {kind: rms}}}"], ["model.overrides", "layer 99", "-4 to 3"]),
    (["model.overrides={3\\:9: {norm: {kind: rms}}}"], ["model.overrides", "layer 3:9", "within 0:4"]),
    (["model.overrides={3\\:2: {norm: {kind: rms}}}"], ["model.overrides", "layer 3:2", "within 0:4"]),
    (["model.overrides={0\\:\\:2: {norm: {kind: rms}}}"], ["model.overrides", "'0::2'", "such as 2:5"]),
    (["model.attention.heads=3"], ["model.attention.heads=3", "model.width=128"]),
    (["run.steps=0", "lr.warmup=0"], ["run.steps=0", "at least 1"]),
    (["optimizer.beta1=1"], ["optimizer.beta1=1.0", "[0, 1)"]),
    (["data.eval_fraction=1"], ["data.eval_fraction=1.0", "[0, 1)"]),
    (["checkpoint.keep_last=-1"], ["checkpoint.keep_last=-1", "at least 0"]),
    (["eval.every=5", "data.eval_fraction=0"], ["eval.every=5", "data.eval_fraction"]),
    (["run.steps=10", "lr.warmup=10"], ["lr.warmup=10", "run.steps=10"]),
    (["lr=wsd", "run.steps=30", "lr.warmup=10", "lr.decay=21"], ["lr.decay=21", "run.steps=30", "lr.decay=20"]),
    (
        ["model.learned_positions=true", "batch.sequence_length=4096"],
        ["batch.sequence_length=4096", "model.max_length=2048"],
    ),
    (["batch.sequence_length=0"], ["batch.sequence_length=0", "at least 1"]),
    (["batch.global_size=7", "batch.micro_size=2"], ["batch.global_size=7", "6 or 8"]),
    (["run.name="], ["run.name=", "runs/"]),
    (["run.dir="], ["run.dir=", "folder"]),
    (["run.steps=5", "lr.warmup=1", "logging.trace=[3,999]"], ["logging.trace=[999]", "run.steps=5"]),
    (["run.dir=${run.nam}"], ["run.dir", "run.nam"]),
    (["run.dir=${run.dir}"], ["run.dir", "ecursive"]),
    (["lr.peak=1e-3,1e-4"], ["lr.peak=1e-3,1e-4", "--multirun", "lr.peak=[...]"]),
    (["hydra.run.dir=x"], ["hydra.run.dir=x", "--config-dir"]),
    (["steps"], ["'steps'", "SETTING=VALUE"]),
    (["=5"], ["'=5'", "SETTING=VALUE"]),
    (["run.name=a b=c"], ["'run.name=a b=c'", "quote"]),
    (["parallel@x=ddp"], ["parallel@x"]),
    (["hydra/job_logging=none"], ["hydra/job_logging", "--config-dir"]),
]


@pytest.mark.parametrize("overrides, words", WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_refused_once_with_the_way_out(overrides, words):
    found = problems(*overrides)
    assert len(found) == 1, found
    for word in words:
        assert word in found[0], found[0]


def test_everything_at_once():
    found = problems(
        "paralel=zero3",
        "optimizer=adamv",
        "+lr.pek=3",
        "run.seed=abc",
        "precision.compute=fp31",
        "model.attention.heads=3",
        "data.eval_fraction=2",
        "batch.global_tokens=1000",
        "foo",
        "parallel.dp=3",
    )
    wanted = [
        "'paralel'",
        "optimizer=adamv",
        "'lr.pek'",
        "run.seed=abc",
        "precision.compute=fp31",
        "model.attention.heads=3",
        "data.eval_fraction=2",
        "batch.global_tokens=1000",
        "'foo'",
        "parallel.dp=3",
    ]
    assert len(found) == len(wanted)
    for word in wanted:
        assert sum(word in text for text in found) == 1, (word, found)


def test_no_consequences_of_a_refused_value():
    assert len(problems("run.steps=abc", "lr.warmup=200")) == 1, (
        "the warm-up is only too long for the default that stands in"
    )
    assert len(problems("+config=debugg", "lr.warmup=200")) == 1


def test_wrong_files(tmp_path):
    write(tmp_path, "config/typo", "# @package _global_\nrun: {stepz: 3, seed: x}\n")
    write(tmp_path, "config/bare", "run: {steps: 3}\n")
    write(tmp_path, "config/debug", "# @package _global_\ndefaults: [/config/debug, _self_]\nrun: {steps: 3}\n")
    write(tmp_path, "config/group", "# @package _global_\ndefaults:\n  - override /parallel: zero9\n")
    write(tmp_path, "config/broken", "# @package _global_\nrun: {steps: 3\n")
    write(tmp_path, "config/three", "# @package _global_\ndefaults: 3\n")
    write(tmp_path, "config/launcher", "# @package _global_\ndefaults: [override hydra/launcher: basic]\n")
    found = problems("+config=typo", config_dir=tmp_path)
    assert len(found) == 2 and "did you mean 'run.steps'" in found[0] and "run.seed=x" in found[1]
    assert "# @package _global_" in problems("+config=bare", config_dir=tmp_path)[0]
    assert "zero9" in (text := problems("+config=group", config_dir=tmp_path)[0]) and "zero3" in text
    assert "give the file another name" in problems("+config=debug", config_dir=tmp_path)[0]
    assert "broken.yaml" in problems("+config=broken", config_dir=tmp_path)[0]
    assert "'config/three', defaults must be a list" in problems("+config=three", config_dir=tmp_path)[0]
    assert "'config/launcher'" in (text := problems("+config=launcher", config_dir=tmp_path)[0]) and "hydra/" in text


def test_world_size(monkeypatch):
    assert "4" in problems("parallel.dp=4", world_size=2)[0]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert compose(["parallel.dp=4"]).parallel.dp == 4
    assert "4 data-parallel ranks" in problems("batch.global_size=6", world_size=None)[0]


def test_model_fields_are_not_checked_beside_a_transformers_folder():
    assert (
        compose(["model.from_hf=somewhere", "model.attention.heads=3", "data.vocab_size=4096"]).model.from_hf
        == "somewhere"
    )


def test_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    assert compose(["+config=debug"]) == compose(["+config=debug"])
    problems("+config=[debug", "x")
    assert not GlobalHydra.instance().is_initialized() and not list(tmp_path.iterdir())
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.2"):
        outer, base = GlobalHydra.instance().hydra, hydra.version.getbase()
        compose()
        assert GlobalHydra.instance().hydra is outer and hydra.version.getbase() == base


def test_yaml_round_trip():
    config = compose(
        [
            "+config=debug",
            "model.pattern=[{attention: {window: 8}, repeat: 2}]",
            "precision.types.rules={a.*: {lr_scale: 2}}",
            "optimizer.eps=1e-30",
            "run.name='on'",
        ]
    )
    found: typed.Problems = {}
    assert (
        typed.build_typed(OmegaConf.to_container(OmegaConf.create(typed.to_yaml(config))), found) == config
        and not found
    )


def test_schema_is_documented_and_its_defaults_are_legal():
    every = {setting.path: setting for setting in typed.list_settings()}
    assert len(every) > 100 and all(setting.doc for setting in every.values())
    assert all(
        setting.default in setting.choices
        for setting in every.values()
        if setting.choices and setting.default is not None
    )
    assert not typed.out_of_range(Config(), "")
    assert sum(setting.range is not None for setting in every.values()) > 40
    found: typed.Problems = {}
    assert typed.build_typed(dataclasses.asdict(Config()), found) == Config() and not found


@given(
    value=st.floats(allow_nan=True),
    low=st.integers(-3, 3),
    high=st.integers(4, 9),
    ends=st.sampled_from(["[]", "[)", "(]", "()"]),
)
def test_intervals(value, low, high, ends):
    legal = (value >= low if ends[0] == "[" else value > low) and (value <= high if ends[1] == "]" else value < high)
    assert (describe_outside("x", value, f"{ends[0]}{low}, {high}{ends[1]}") is None) == legal
    told = describe_outside("x", value, "[0, inf)")
    assert told == (None if 0 <= value < math.inf else told)
    assert told is None or told.endswith("must be at least 0") != (value == math.inf), "which is at least 0"


def test_copies_beside_products_go_with_fp8():
    plan = ["parallel.tp=2", "precision=bf16", "precision.float8.recipe=tensorwise", "precision.float8.ends=0"]
    copied = compose([*plan, "parallel.tp_overlap=copy_engine"], world_size=2)
    assert copied.parallel.tp_overlap == "copy_engine"


def test_off_is_a_word_also_in_yaml():
    for text in ("parallel: {tp_overlap: off}", "parallel: {tp_overlap: 'off'}"):
        found: dict = {}
        assert typed.build_typed(yaml.safe_load(text), found).parallel.tp_overlap == "off" and not found
    assert "parallel.tp_overlap=on is not one of off, copy_engine" in problems("parallel.tp_overlap=on")[0]
    assert compose(["parallel.tp_overlap=off"]).parallel.tp_overlap == "off"


def test_auto_is_null_where_a_setting_may_be_null():
    config = compose(["loss.tile=auto", "activation.tile=auto", "activation.offload=auto"])
    assert config.loss.tile is config.activation.tile is config.activation.offload is None
    with pytest.raises(ConfigError, match="loss.chunk=auto must be a whole number"):
        compose(["loss.chunk=auto"])


def integer_settings(kind: type, path: str) -> list[str]:
    """The names of all settings of a section that take whole numbers."""
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        kinds = typing.get_args(hint) or (hint,)
        found += [f"{path}.{name}"] * (int in kinds)
        found += [
            inner for one in kinds if dataclasses.is_dataclass(one) for inner in integer_settings(one, f"{path}.{name}")
        ]
    return found


@pytest.mark.parametrize("name", [*integer_settings(ModelSpec, "model"), *integer_settings(ParallelConfig, "parallel")])
def test_refusals_of_whole_numbers_name_a_way_out(name):
    """No list of legal values is empty."""
    for value in (-1, 0, 3, 7, 4097, 10**7):
        for problem in refused(f"{name}={value}", world_size=4):
            assert not re.search(r"legal:\s*([(;,]|$|or )", problem), problem
            assert re.search(r"legal:|one of|\b(set|leave|must|needs|start|above|beyond)\b", problem), problem


@pytest.mark.parametrize(
    "width, ways", [(4097, "4096 or 4104"), (1, "8"), (102, "96 or 104, or model.attention.heads to")]
)
def test_a_width_that_heads_do_not_divide(width, ways):
    (problem,) = problems(f"model.width={width}")
    assert f"does not divide model.width={width}; set model.width={ways}" in problem
    for legal in re.findall(r"\d+", ways):
        assert not refused(f"model.width={legal}")
