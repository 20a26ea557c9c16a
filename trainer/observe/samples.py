"""samples.jsonl: what the model wrote while it was trained."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.util.lines import LineFile
from trainer.util.run_folder import SAMPLES

Sample = tuple[str, str]
"""A prompt and its continuation."""


class SamplesFile:
    """One JSON object a continuation. Every start appends: a step that is trained again has its lines twice."""

    def __init__(self, folder: Path):
        self.path = folder / SAMPLES

    def write(self, record: dict[str, Any]) -> None:
        """Metrics are in a file of their own."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        now = time.time()
        lines = [{"step": step, "time": now, "prompt": prompt, "text": text} for prompt, text in samples]
        with LineFile(self.path) as file:
            file.append("".join(json.dumps(line) + "\n" for line in lines))

    def close(self, status: str) -> None:
        pass


def format_sample(number: int, sample: Sample) -> str:
    """A continuation for people, with its prompt, indented."""
    return f"sample {number}:\n    " + escape_controls("".join(sample)).replace("\n", "\n    ")


def escape_controls(text: str) -> str:
    """A text without what a terminal would obey: a model writes anything."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
