"""A setting that is a text, and the name of an entry, keep the characters that the user wrote."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainer.cluster.job import begin_job
from trainer.config import Config, ConfigError, register, typed
from trainer.config.compose import gather_values, quote_value, to_config
from trainer.config.fields import LOADER, option
from trainer.planning.neighbours import plan_list
from trainer.sweep.plan import expand_sweep, make_trials

WORDS = (
    "12e4567 98e7654 3.10 1e3 007 0 -0 +5 1_000 0x1F 0o17 .5 5. nan NaN inf -INF .inf true TRUE False yes no on off "
    "Y n 12:30:45 1:1 2020-01-01 2020-01-01T10:00:00 1e-5 1.0.0 a-b a/b @x $y 50%"
).split()
"""Texts that Hydra or YAML may take for something else. All can be written without quotes."""

NUMBERS = st.from_regex(
    r"[+-]?(0|[1-9][0-9_]{0,5})(\.[0-9]{0,3})?([eE][+-]?[0-9]{1,4})?(:[0-5][0-9]){0,2}", fullmatch=True
)
ANY = st.text(st.characters(exclude_characters="$", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12)
WRITTEN = st.one_of(
    st.sampled_from(WORDS).map(lambda word: (word, word)),
    NUMBERS.map(lambda word: (word, word)),
    st.one_of(ANY, st.sampled_from([*WORDS, "null", "~", "", " 1 ", "a=b", "'", '"', "\\", "a: b", "# a", "- 1"])).map(
        lambda text: (quote_value(text), text)
    ),
)
"""What stands on the command line, and the text that it is."""


def text_settings() -> Iterator[tuple[str, bool]]:
    """Every setting that is any text, and whether it is a list of texts."""
    entries = [
        typed.Setting(setting.path.replace(".NAME.", ".some."), *setting[1:])
        for mapping in ("data.sources", "eval.sets")
        for setting in typed.entry_settings(mapping)
    ]
    for setting in [*typed.list_settings(), *entries]:
        if setting.hint in (str, str | None, list[str]) and not setting.choices and setting.path != "imports":
            yield setting.path, setting.hint == list[str]


def compose_plainly(*overrides: str, config_dir: object = None) -> Config:
    """The typed configuration. Contradictions between settings are not looked for."""
    values, problems = gather_values(overrides, config_dir)
    config = to_config(values, problems)
    if problems:
        raise ConfigError(list(problems.values()))
    return config


def select(config: Config, path: str) -> object:
    """A setting by its path; what stands in `rules` and the like is plain."""
    value: object = config
    for part in path.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@settings(max_examples=25, deadline=None)
@given(WRITTEN)
def test_every_text_setting_keeps_its_characters(both):
    """On the command line, and in the config.yaml of the run, whoever reads it."""
    written, text = both
    places = dict(text_settings())
    assert {"run.name", "data.tokenizer", "data.sources.some.path", "eval.generate.prompts"} <= places.keys()
    config = compose_plainly(*(f"{path}={f'[{written}]' if listed else written}" for path, listed in places.items()))
    assert {path: select(config, path) for path in places} == {
        path: [text] if listed else text for path, listed in places.items()
    }
    saved = typed.to_yaml(config)
    for again in (yaml.load(saved, LOADER), OmegaConf.to_container(OmegaConf.create(saved))):
        assert typed.build_typed(again, problems := {}) == config and not problems


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(WORDS), NUMBERS), min_size=1, max_size=3, unique=True))
def test_names_of_entries_keep_their_characters(names):
    names = [name for name in names if ":" not in name]  # which a key within braces cannot have
    entries = ",".join(f"{name}: {{kind: text, path: {name}}}" for name in names)
    config = compose_plainly("~data.sources.stdlib", f"+data.sources={{{entries}}}")
    assert {name: source.path for name, source in config.data.sources.items()} == {name: name for name in names}
    rules = ",".join(f"{name}: {{optimizer: sgd}}" for name in names)
    assert [*compose_plainly(f"precision.types.rules={{{rules}}}").precision.types.rules] == names


@pytest.mark.parametrize("word", [*WORDS[::3], "no", "1e3", "12:30:45", "null", "~", "''"])
@pytest.mark.parametrize("place", ["name", "list", "key", "inner"])
def test_a_yaml_file_keeps_the_characters_or_is_refused(word, place, tmp_path):
    line, path = {
        "name": ("run: {{name: {}}}", "run.name"),
        "list": ("precision: {{float8: {{linears: [{}]}}}}", "precision.float8.linears.0"),
        "key": ("eval: {{sets: {{{}: {{kind: stdlib}}}}}}", "eval.sets"),
        "inner": ("data: {{sources: {{stdlib: {{path: {}}}}}}}", "data.sources.stdlib.path"),
    }[place]
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "mine.yaml"
    for written in (word, f"'{word}'"):
        if word == "@x" and written == word or word == "''" and written != word:
            continue  # no YAML
        file.write_text(f"# @package _global_\n{line.format(written)}\n")
        try:
            config = compose_plainly("+config=mine", config_dir=tmp_path)
        except ConfigError as error:
            hint = "Incompatible key" if place == "key" and word in ("null", "~") else "quotes"
            assert written == word and path in str(error) and hint in str(error), error
            continue
        found = {
            "name": lambda: config.run.name,
            "list": lambda: config.precision.float8.linears[0],
            "key": lambda: next(iter(config.eval.sets)),
            "inner": lambda: config.data.sources["stdlib"].path,
        }[place]()
        null = place == "inner" and written in ("null", "~")
        assert found == (None if null else written.strip("'"))


def test_layers_have_numbers(tmp_path):
    (tmp_path / "config").mkdir()
    text = "# @package _global_\nmodel: {overrides: {0: {attention: {window: 16}}}}\nparallel: {tp_overlap: off}\n"
    (tmp_path / "config" / "mine.yaml").write_text(text)
    config = compose_plainly("+config=mine", config_dir=tmp_path)
    assert [*config.model.overrides] == ["0"] and config.parallel.tp_overlap == "off"


def test_settings_of_what_is_registered(kept_registries):
    @dataclass
    class Settings:
        label: str = option("", "a text")
        labels: dict[str, str] = option({}, "texts")

    @register.callback("labelled", Settings)
    class Labelled:
        def __init__(self, settings): ...
        def step(self, run): ...

    config = compose_plainly("callbacks={labelled: {label: 1e3, labels: {007: 3.10, no: off}}}")
    assert config.callbacks == {"labelled": {"label": "1e3", "labels": {"007": "3.10", "no": "off"}}}


def test_names_of_recipes(tmp_path):
    (tmp_path / "config").mkdir()
    for seed, name in enumerate(("2024", "1e3", "3.10", "true")):
        (tmp_path / "config" / f"{name}.yaml").write_text(f"# @package _global_\nrun: {{seed: {seed}}}\n")
        assert compose_plainly(f"+config={name}", config_dir=tmp_path).run.seed == seed
        assert compose_plainly(f"+config=[debug,{name}]", config_dir=tmp_path).run.seed == seed
    assert plan_list("[2024,1e3,no,null]") == ["2024", "1e3", "no", "null"]


@pytest.mark.parametrize("words", [WORDS[:4], WORDS[4:9], WORDS[12:18]])
def test_sweeps(words, tmp_path):
    """The values of a sweep, its own settings, and what its trials are started with."""
    arguments = ["+config=debug", f"data.tokenizer={','.join(words)}", "lr.peak=1e-3", f"sweep.name={words[0]}"]
    sweep, common, values = expand_sweep(arguments)
    assert sweep.name == words[0]
    trials = make_trials(sweep, common, values, None, 0)
    assert [trial.settings["data"]["tokenizer"] for trial in trials] == words
    for trial, word in zip(trials, words):
        assert trial.swept == [f"data.tokenizer={word}"] and f"{words[0]}/" in trial.settings["run"]["name"]
        assert compose_plainly(*trial.words(None)).data.tokenizer == word
    assert expand_sweep(["lr.peak=1e-3,2e-3"])[2] == [["lr.peak=0.001"], ["lr.peak=0.002"]]


@pytest.mark.parametrize("word", ["12e4567", "3.10", "no", "007"])
def test_jobs(word, tmp_path, monkeypatch):
    """What train.sbatch hands on, also for a task of an array."""
    monkeypatch.chdir(tmp_path)
    for environment, name in (({}, word), ({"SLURM_ARRAY_TASK_ID": "3"}, f"{word}-3")):
        job = begin_job(1, 1, ["+config=debug", f"run.name={word}"], {"SLURM_JOB_ID": "1", **environment})
        assert job["run_dir"] == f"runs/{name}"
        handed = shlex.split(shlex.join(job["args"]))
        assert compose_plainly(*handed).run.name == name
