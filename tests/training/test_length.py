"""How long a run trains: so many tokens, and no longer than so many hours at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import trainer
from trainer.config import Config, ConfigError
from trainer.observe import metrics
from trainer.training.session import RunClock

STEP_TOKENS = 4 * 16


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def settings(cache):
    def make(folder: Path, **overrides: object) -> Config:
        values = {
            "model": "tiny",
            "model.width": 32,
            "model.depth": 1,
            "data.tokenizer": "bytes",
            "data.cache": cache,
            "data.sources.stdlib.limit": 20,
            "batch.sequence_length": 16,
            "batch.global_size": 4,
            "run.dir": folder,
            "run.device": "cpu",
            "lr.warmup": 1,
            "logging.console": "plain",
            **overrides,
        }
        return trainer.compose([f"{name}={value}" for name, value in values.items()])

    return make


def series(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics.read_metrics(folder) if "loss" in line]


def test_tokens_decide_the_number_of_steps_and_the_schedule(settings, tmp_path, capsys):
    assert trainer.run(settings(tmp_path / "tokens", **{"run.tokens": "4.5e2", "run.steps": 3})).code == 0
    assert "8 steps, for run.tokens=450" in capsys.readouterr().out
    assert trainer.run(settings(tmp_path / "steps", **{"run.steps": 8})).code == 0
    assert series(tmp_path / "tokens", "tokens")[-1] == 8 * STEP_TOKENS
    for name in ("lr", "loss", "step"):
        assert series(tmp_path / "tokens", name) == series(tmp_path / "steps", name)


def test_tokens_are_counted_on_by_a_resumed_run_with_another_batch(settings, tmp_path, capsys):
    assert trainer.run(settings(tmp_path, **{"run.tokens": 4 * STEP_TOKENS})).code == 0
    longer = settings(tmp_path, **{"run.tokens": 7 * STEP_TOKENS, "batch.global_size": 8})
    assert trainer.run(longer).code == 0
    assert series(tmp_path, "step") == list(range(1, 7)), "two steps of twice as many"
    assert series(tmp_path, "tokens")[-1] == 8 * STEP_TOKENS
    capsys.readouterr()
    assert trainer.run(longer).code == 0
    assert "run.tokens=448 asks for no more: raise run.tokens" in capsys.readouterr().out


def test_tokens_that_do_not_fit_the_schedule_are_refused(settings, tmp_path):
    with pytest.raises(ConfigError, match="lr.warmup=9 must be below the 2 steps of run.tokens=100"):
        settings(tmp_path, **{"run.tokens": 100, "lr.warmup": 9})
    with pytest.raises(ConfigError, match="run.tokens=1.5 must be a whole number"):
        settings(tmp_path, **{"run.tokens": 1.5})
    assert settings(tmp_path, **{"run.tokens": 20e9}).run.tokens == 20_000_000_000


def test_hours_end_a_start_with_a_checkpoint_and_the_same_command_goes_on(settings, tmp_path, capsys):
    whole = {"run.steps": 12, "run.deterministic": True}
    assert trainer.run(settings(tmp_path / "whole", **whole)).code == 0
    codes = [trainer.run(settings(tmp_path / "parts", **whole, **{"run.hours": 1e-9})).code for _ in range(2)]
    assert codes == [75, 75] and series(tmp_path / "parts", "step") == [1, 2], "a step at least"
    assert "stopped by run.hours=1e-09 after step 2 of 12" in capsys.readouterr().out
    assert trainer.run(settings(tmp_path / "parts", **whole, **{"run.hours": 5})).code == 0
    for name in ("loss", "lr", "grad_norm"):
        assert series(tmp_path / "parts", name) == series(tmp_path / "whole", name)


def test_room_is_left_for_two_passes_and_the_save(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trainer.training.session.time.monotonic", lambda: now[0])

    def stopped_at(save: float | None, first: float = 50.0, step: float = 10.0) -> float:
        now[0] = 100.0
        clock = RunClock(1.0)
        while True:
            clock.next_pass()
            if clock.up(save):
                return now[0] - 100
            now[0] += step if clock.passes > 1 else first

    for save, room in ((30.0, 60), (None, 180)):  # twice the longest save; a twentieth as long as none is known
        left = 3600 - stopped_at(save)
        assert room + 20 - 10 < left <= room + 20, "between this and a pass less"
    assert math.isinf(RunClock(None).limit or math.inf) and not RunClock(None).up(1e9)
