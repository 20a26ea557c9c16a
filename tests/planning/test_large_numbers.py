"""Numbers far beyond any machine: a command answers or refuses them, at once and in little memory."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.commands import estimate, plot
from trainer.config import ConfigError, ParallelConfig, typed
from trainer.config.model import DEEPEST
from trainer.planning.features import check_plan
from trainer.planning.plan import MOST_MICRO_BATCHES, MOST_PROCESSES
from trainer.planning.resolve import compose

SECONDS, MEMORY = 30, 2 << 30
"""Most that a command may take: three times what was asked for, since other tests run beside this one; and bytes
beyond those of this process."""

NUMBERS = [one.path for one in typed.list_settings() if type(one.default) in (int, float) or one.default is None]
NUMBERS += ["nodes", "processes", "top", "tokens", "hardware.devices", "hardware.memory", "hardware.node.bandwidth"]
BASES = [
    ["+config=debug"],
    ["+config=debug", "model=tiny_experts"],
    ["+config=debug", "batch.global_size=null"],
    ["+config=debug", "batch.global_size=null", "parallel.pp=2", "parallel.pipeline.schedule=interleaved"],
    ["+config=debug", "batch.global_size=null", "parallel.zero.stage=3", "parallel.tp=2"],
]


def outcome(command, arguments: list[str]) -> str:
    """How a command ends in a process of its own that may take so much time and memory: its exit code, or what killed
    it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            faulthandler.register(signal.SIGPROF, 2, chain=True)  # shows where it was
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor, which others use too
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10 * SECONDS)  # for a process that waits and computes nothing
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    end = str(command(arguments))
                except BaseException as error:
                    end = f"{type(error).__name__}: {str(error)[:200]}"
            os.write(write, end.encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return answer or f"killed by {signal.Signals(os.WTERMSIG(status)).name}"


@given(
    name=st.sampled_from(NUMBERS),
    value=st.one_of(st.sampled_from([2**20, 1_250_000, 10**9, 10**12, 10**12 + 39]), st.integers(10, 10**12)),
    base=st.sampled_from(BASES),
)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_number_of_a_setting_is_answered_or_refused(name, value, base):
    assert outcome(estimate.main, [*base, f"{name}={value}"]) in ("0", "2")


@pytest.mark.parametrize(
    "words",
    [
        ["nodes=1250000"],
        ["processes=1000000000000"],
        ["nodes=1250000", "plans=all"],
        ["hardware.devices=1000000000"],
        ["processes=1", "batch.accumulation=1000000000"],
        ["processes=1", "batch.micro_size=1", "batch.global_size=1000000000"],
        ["processes=4", "parallel.pp=4", "batch.accumulation=1000000"],
        ["processes=1", "model.depth=1000000000"],
        ["processes=1", "parallel.tp=1000000000000"],
        ["processes=8", "parallel.tp=1000000000000", "model.vocab_size=3"],
    ],
    ids=" ".join,
)
def test_numbers_beyond_any_machine_are_refused_by_name(words, capsys):
    begun = time.process_time()
    assert outcome(estimate.main, ["+config=debug", "batch.global_size=null", *words]) == "2"
    assert time.process_time() - begun < 10
    assert estimate.main(["+config=debug", "batch.global_size=null", *words]) == 2
    told = capsys.readouterr().err
    assert "legal: up to" in told or "processes" in told
    assert len(told) < 2000


def test_what_stands_at_the_bounds_is_answered():
    for words in (
        [f"processes={MOST_PROCESSES}"],
        ["processes=1", f"batch.accumulation={MOST_MICRO_BATCHES}"],
        ["processes=4", "parallel.pp=4", f"batch.accumulation={MOST_MICRO_BATCHES // 4}"],
        ["processes=1", f"model.depth={DEEPEST}"],
    ):
        assert outcome(estimate.main, ["+config=debug", "batch.global_size=null", *words]) == "0", words


def test_a_world_of_too_many_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(10**12))
    with pytest.raises(ConfigError, match=f"1000000000000 processes are more .* up to {MOST_PROCESSES}"):
        compose(["+config=debug"])
    assert not check_plan(ParallelConfig(), MOST_PROCESSES)


@pytest.mark.parametrize("option", ["--ranks", "--microbatches", "--chunks"])
@pytest.mark.parametrize("template", ["1f1b", "interleaved", "zb_v", "greedy"])
def test_a_picture_of_too_much_is_refused(template, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"--ranks": "4", "--microbatches": "8", option: "1000000000000"}
    words = ["--schedule", template, *(word for pair in given.items() for word in pair)]
    assert outcome(plot.main, words) == "2" and not any(tmp_path.iterdir())
