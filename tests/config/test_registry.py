"""What packages of the user register: their settings are ours in overrides, recipes, help and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.registries import forgotten, package

from trainer.commands import train
from trainer.config import ConfigError, typed
from trainer.config.compose import import_modules
from trainer.config.fields import describe_outside
from trainer.planning.resolve import compose
from trainer.sweep.plan import expand_sweep, make_trials

GOOD = """
from dataclasses import dataclass

@dataclass
class Settings:
    patience: int = option(3, "evaluations without a lower loss", unit="evaluations", range="[1, inf)")
    share: float = option(0.5, "share", range="(0, 1]")
    watch: str = option("loss", "what is watched", ("loss", "eval_loss"))
    tags: list[str] = option([], "words")
    limit: int | None = option(None, "most")

@register.callback("early", Settings)
class Early:
    def step(self, run): ...

@register.callback("bare")
class Bare:
    def step(self, run): ...
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path) -> Iterator[str]:
    """The name of a package that registers two callbacks."""
    with forgotten(tmp_path):
        yield package(tmp_path, "good", GOOD)


def problems(*overrides: str, **where: object) -> list[str]:
    with pytest.raises(ConfigError) as error:
        compose(overrides, world_size=1, **where)
    return error.value.problems


def test_settings_are_typed_and_complete(tmp_path, mine):
    config = compose(["imports=[good]", "callbacks.early.share=1", "callbacks.bare={}", "+callbacks.early.tags=[a,1]"])
    early = {"patience": 3, "share": 1.0, "watch": "loss", "tags": ["a", "1"], "limit": None}
    assert config.callbacks == {"early": early, "bare": {}} and isinstance(config.callbacks["early"]["share"], float)
    resolved = OmegaConf.to_container(OmegaConf.create(typed.to_yaml(config)))
    assert typed.build_typed(resolved, found := {}) == config and not found, "config.yaml of the run says all"
    assert "early" not in compose(["imports=[good]", "callbacks.early={}", "~callbacks.early"]).callbacks
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "# @package _global_\nimports: [good]\ncallbacks: {early: {patience: 7, limit: '${run.steps}'}}\n"
    )
    ours = compose(["+config=mine", "run.steps=30"], tmp_path).callbacks["early"]
    assert (ours["patience"], ours["limit"], ours["watch"]) == (7, 30, "loss")


def test_what_is_wrong_is_found_at_once_with_the_way_out(mine):
    assert "nothing has registered any" in problems("callbacks.early={}")[0], "only what is imported is known"
    found = problems(
        "imports=[good]",
        "callbacks.early={patience: many, wacth: loss, share: 2, limit: 1.5, tags: a}",
        "callbacks.bare=3",
        "callbacks.erly={}",
        "logging.sinks.none={}",
    )
    text = "\n".join(found)
    for said in (
        "callbacks.early.patience=many must be a whole number",
        "unknown setting 'callbacks.early.wacth'; did you mean 'callbacks.early.watch'?",
        "callbacks.early.share=2.0 must lie in (0, 1]",
        "callbacks.early.limit=1.5 must be a whole number",
        "callbacks.early.tags=a must be a list",
        "callbacks.bare=3 must be a mapping of its settings (); it has none: callbacks.bare={}",
        "callbacks.erly: there is no callback 'erly' to be set up; did you mean 'early'? (imports=[PACKAGE]",
        "logging.sinks.none: there is no sink 'none' to be set up; nothing has registered any",
    ):
        assert said in text, f"{said}\nis not in\n{text}"
    assert problems("imports=[good]", "callbacks.early.watch=lss") == [
        "callbacks.early.watch=lss is not one of loss, eval_loss; did you mean 'loss'?"
    ]
    assert "did you mean 'callbacks.early.watch'" in problems("imports=[good]", "watch=loss")[0]


@given(st.integers(-3, 3), st.floats(-1, 2))
def test_ranges_are_those_of_the_schema(patience, share):
    import_modules(["good"])
    wanted = [
        text
        for text in (
            describe_outside("callbacks.early.patience", patience, "[1, inf)"),
            describe_outside("callbacks.early.share", share, "(0, 1]"),
        )
        if text
    ]
    config = typed.build_typed({"callbacks": {"early": {"patience": patience, "share": share}}}, {})
    assert typed.out_of_range(config) == wanted


def test_help_knows_them(capsys, mine):
    assert train.main(["--help", "callbacks", "imports=[good]"]) == 0
    page = capsys.readouterr().out
    assert 'callbacks.early.watch="loss"\n    what is watched; one of loss, eval_loss' in page
    assert "callbacks.early.patience=3\n    evaluations without a lower loss; in evaluations; whole number;" in page
    assert train.main(["--help", "imports=[good]"]) == 0 and "callbacks" in capsys.readouterr().out
    assert train.main(["--help", "callbacks", "imports=[bad.name.]"]) == 2
    assert "bad.name." in capsys.readouterr().err


def test_trials_of_a_sweep_have_them(tmp_path, mine):
    words = ["+config=debug", "imports=[good]", "callbacks.early.patience=1,2", f"sweep.dir={tmp_path}"]
    sweep, common, swept = expand_sweep(words)
    trials = make_trials(sweep, common, swept, None, 0)
    assert [trial.settings["callbacks"]["early"]["patience"] for trial in trials] == [1, 2]
    assert all("imports=[good]" in trial.overrides for trial in trials), "each trial's processes import for themselves"


BROKEN = [  # text of a module, what the one problem must say beside the module's name
    ("import nothing_of_the_kind", ["ModuleNotFoundError: No module named 'nothing_of_the_kind'", "broken.py, line 2"]),
    ("def f(:", ["SyntaxError", "broken.py, line 2"]),
    ("x = 1 / 0", ["ZeroDivisionError", "broken.py, line 2"]),
    ("@register.callback('early')\nclass A:\n    def on_step(self, run): ...", ["broken.A", "start, step, evaluation"]),
    ("@register.callback('my-name')\nclass A:\n    def step(self, run): ...", ["broken.A", "'my-name' is no name"]),
    (
        "import good\n@register.callback('early')\nclass A:\n    def step(self, run): ...",
        ["broken.A", "'early' of a callback is taken by good.Early"],
    ),
]
SCHEMAS = [  # a field of a settings dataclass, what the one problem must say
    ("x: int = 3", ["x has no meaning", "option(DEFAULT, 'meaning')"]),
    ("x: int = option(0.5, 'm')", ["x=0.5 must be a whole number"]),
    ("x: int = option(0, 'm', range='[1, 5]')", ["x=0 must lie in [1, 5]"]),
    ("x: str = option('c', 'm', ('a', 'b'))", ["x=c is not one of a, b"]),
    ("x: tuple = option((1,), 'm')", ["x is of type", "legal: int, float"]),
    ("x: Nothing = option(1, 'm')", ["name 'Nothing' is not defined"]),
]


@pytest.mark.parametrize("text, said", BROKEN)
def test_modules_that_cannot_be_imported(tmp_path, text, said):
    package(tmp_path, "broken", text)
    [problem] = problems("imports=[broken]", "callbacks.broken={}")
    assert problem.startswith("imports=[broken]: ") and all(word in problem for word in said), problem


@pytest.mark.parametrize("field, said", SCHEMAS)
def test_settings_that_are_declared_wrongly(tmp_path, field, said):
    text = f"""
from __future__ import annotations
from dataclasses import dataclass
from trainer import option, register
@dataclass
class Settings:
    {field}
@register.callback("other", Settings)
class Other:
    def step(self, run): ...
"""
    (tmp_path / "broken.py").write_text(text)
    [problem] = problems("imports=[broken]")
    assert problem.startswith("settings of the callback 'other' (broken.Other): "), problem
    assert all(word in problem for word in said), problem


def test_names_that_are_no_modules():
    [problem] = problems("imports=[no_such_package.hooks]", "lr.pek=3")[-1:]
    assert (
        "imports=[no_such_package.hooks]: there is no module 'no_such_package'" in problem and "PYTHONPATH" in problem
    )
    assert "'./hooks.py' is no name of a module" in problems("imports=['./hooks.py']")[0]
    assert problems("imports=good") == ["imports=good must be a list, such as [a, b]"]


def test_a_cell_that_runs_again_takes_its_own_place(tmp_path, mine):
    import_modules(["good"])
    import good

    exec(compile(GOOD.replace("3,", "4,"), "cell", "exec"), vars(good))
    assert compose(["callbacks.early={}"]).callbacks["early"]["patience"] == 4
