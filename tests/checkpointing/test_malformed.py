"""Malformed checkpoints, hundreds of them: each is refused with one error, or read where the damage does not matter.
None runs what is in it, writes elsewhere, or takes memory for what is not there."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from support import malformed
from support.checkpoints import read_tensors
from support.damage import pickled
from support.malformed import Case
from torch import Tensor

from trainer.checkpointing.loading import load_tensors, open_saved, read_states
from trainer.checkpointing.retention import find_newest, find_resume
from trainer.config import ConfigError

SPEC, TENSORS = malformed.model()
MEMORY = 2**30
"""Bytes beyond what the process has."""


@pytest.fixture
def little_memory():
    now, limits = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(), resource.RLIMIT_AS
    before = resource.getrlimit(limits)
    resource.setrlimit(limits, (now + MEMORY, before[1]))
    yield
    resource.setrlimit(limits, before)


def use(path: Path) -> dict[str, Tensor]:
    """All that opens a checkpoint: a resume, sampling and export. Returns the tensors of a resume."""
    found, _ = find_resume(str(path), path.parent)
    read_states(found)
    saved = open_saved(str(path))
    assert saved.tensor("norm.weight").shape == TENSORS["model.norm.weight"].shape
    assert read_tensors(path).keys() >= TENSORS.keys()
    mine = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    load_tensors(path, mine)
    return mine


def wrong(case: Case, good: Path, folder: Path) -> str | None:
    """What is wrong with how a case ends, if anything."""
    path = folder / "run" / good.name
    shutil.copytree(good, path, copy_function=os.link)
    case.damage(path)
    try:
        newest, warnings = find_newest(path.parent)
        assert newest == path or len(warnings) == 1
        tensors = use(path)
    except ConfigError as error:
        (problem,) = error.problems
        clear = str(path) in problem and len(problem) < 1000 and problem.isprintable()
        return None if clear and case.outcome != "same" else f"{case.name}: {problem}"
    except Exception as error:
        return f"{case.name}: {error!r}"
    finally:
        shutil.rmtree(path.parent)
    if case.outcome == "refused":
        return f"{case.name}: was read"
    if case.outcome == "same" and not all(torch.equal(tensor, TENSORS[name]) for name, tensor in tensors.items()):
        return f"{case.name}: other values"
    return None


def test_what_a_case_calls_would_leave_a_trace(tmp_path):
    pickle.loads(pickled(tmp_path / "canary"))
    assert (tmp_path / "canary").is_dir()


@pytest.mark.parametrize("kind", malformed.KINDS)
def test_malformed_checkpoints_are_refused(tmp_path, little_memory, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    good = malformed.save(tmp_path / "good")
    assert wrong(Case("untouched", lambda path: None, "same"), good, tmp_path) is None
    problems = [wrong(case, good, tmp_path) for case in malformed.KINDS[kind](outside)]
    assert [problem for problem in problems if problem] == []
    assert not (outside / "canary").exists()
    assert {file.name for file in tmp_path.iterdir()} <= {"good", "outside", "secret.bin"}


def test_a_checkpoint_of_the_first_format_is_refused_with_the_version_that_reads_it(tmp_path):
    path = malformed.save(tmp_path)
    malformed.put_manifest(path, malformed.manifest(path) | {"format": 1})
    with pytest.raises(ConfigError, match="manifest.json has format 1, which only version 0.1.0 reads"):
        read_tensors(path)
