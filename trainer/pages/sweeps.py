"""What became of the trials of a sweep or a search, and what a search foretold of its plans, for the templates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.diagnosis.verdict import as_json
from trainer.pages.folder import FolderFiles
from trainer.pages.sections import GIB, NONE
from trainer.util.lines import BEST, RESULTS, SEARCH, TRIALS, read_json_lines
from trainer.util.reading import MAYBE_NUMBER, NUMBER, Shape, make_printable, read_bytes, read_json
from trainer.util.tables import format_bytes, format_count, format_duration, format_number, format_percent

LINE: Shape = {
    **dict.fromkeys(("trial", "status"), str),
    "reason": (str, type(None)),
    **dict.fromkeys("step_seconds_p50 predicted_seconds expected_seconds tokens_per_second".split(), MAYBE_NUMBER),
    **dict.fromkeys("mfu memory_gib predicted_memory_gib".split(), MAYBE_NUMBER),
}
"""Of a line of results.jsonl or trials.jsonl, as far as the page shows it."""
SEARCH_SHAPE: Shape = {
    **dict.fromkeys(("name", "machine"), str),
    **dict.fromkeys(("ended", "best", "command"), (str, type(None))),
    **dict.fromkeys(("plans", "budget"), int),
    "foretold": [{"plan": str, **dict.fromkeys("predicted expected low high memory_gib tokens".split(), NUMBER)}],
}
"""Of search.json. machine: on what it measures; ended: why it is over, null while it goes on; best: the fastest
measured plan, and the command that starts it. foretold: of every plan, seconds of a step as predicted, and as expected
when it was chosen or, if it was not, now, with two standard deviations below and above; GiB reserved on a device;
tokens of a step."""
MOST, LETTERS = 1000, 400
"""The most trials, and plans, that are shown, and the most letters of a reason."""

COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step time", "step_seconds_p50", format_duration),
    ("expected", "expected_seconds", format_duration),
    ("predicted", "predicted_seconds", format_duration),
    ("tokens/s", "tokens_per_second", format_count),
    ("MFU", "mfu", format_percent),
    ("memory", "memory_gib", lambda value: format_bytes(value * GIB)),
    ("predicted memory", "predicted_memory_gib", lambda value: format_bytes(value * GIB)),
)
"""Numbers of a trial of a search: title, key, and how it is written."""


class SweepFolder(FolderFiles):
    """A sweep, or a search if it has search.json."""

    def __init__(self, folder: Path):
        super().__init__(
            folder,
            {
                **dict.fromkeys((RESULTS, TRIALS), lambda path: as_json([*deque(read_json_lines(path, LINE), MOST)])),
                SEARCH: lambda path: read_json(path, SEARCH_SHAPE, "the same search writes it anew"),
                BEST: lambda path: read_bytes(path).decode(errors="replace"),
            },
        )

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The trials in their order."""
        return self.values.get(TRIALS) or self.values.get(RESULTS, [])

    @property
    def search(self) -> dict[str, Any] | None:
        """What search.json says."""
        return self.values.get(SEARCH)

    @property
    def recipe(self) -> str:
        """The fastest plan of a search as a recipe; empty where there is none."""
        lines = self.values.get(BEST, "").splitlines()
        return "\n".join(map(make_printable, lines)) if self.search and self.search.get("best") else ""

    def drawn(self) -> list[dict[str, Any]]:
        """The plans of a search as points of its pictures: what was foretold of each, and of those that were tried,
        what was measured; `pareto_points` says whether it is fastest in its memory."""
        lines = {line["trial"]: line for line in self.lines}
        points = [
            {
                **one,
                "status": line.get("status"),
                "measured": line.get("step_seconds_p50") if line.get("status") == "done" else None,
                "memory": line.get("memory_gib"),
            }
            for one in as_json((self.search or {"foretold": []})["foretold"][:MOST])
            for line in [lines.get(one["plan"], {})]
            if None not in one.values() and min(one[name] for name in ("predicted", "expected", "low")) > 0
        ]
        best = set(
            pareto_points([(one["memory"], one["tokens"] / one["measured"]) for one in points if is_measured(one)])
        )
        return [
            one | {"front": bool(is_measured(one) and (one["memory"], one["tokens"] / one["measured"]) in best)}
            for one in points
        ]

    def shown(self) -> dict[str, Any]:
        """Trials and, of a search, how it stands, for the template."""
        known = {key for line in self.lines for key, value in line.items() if value is not None}
        # The numbers of a sweep's trials are those of its runs.
        columns = [column for column in COLUMNS if self.search and column[1] in known]
        return {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            "search": self.search and describe_search(self.search, self.lines),
            "recipe": self.recipe,
            "columns": [title for title, *_ in columns],
            "trials": [
                {
                    "name": make_printable(line["trial"]),
                    "status": make_printable(line["status"].replace("_", " ")),
                    "reason": make_printable((line.get("reason") or "")[:LETTERS]),
                    "best": bool(self.search and line["trial"] == self.search.get("best")),
                    "numbers": [NONE if line.get(key) is None else write(line[key]) for _, key, write in columns],
                }
                for line in self.lines
            ],
            "problems": self.problems,
        }


def is_measured(point: dict[str, Any]) -> bool:
    """Whether a plan has a measured time and memory."""
    return bool(point["measured"] and point["memory"])


def pareto_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (memory, speed) than which no other is as fast in as little memory; least memory first."""
    kept: list[tuple[float, float]] = []
    for memory, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or speed > kept[-1][1]:
            kept.append((memory, speed))
    return kept


def describe_search(search: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How a search stands, in words. lines: its trials."""
    best = next((line for line in lines if line["trial"] == search.get("best")), None)
    timed = [line["step_seconds_p50"] for line in lines if line["status"] == "done" and line.get("step_seconds_p50")]
    words = [f"{format_number(len(lines), 'trial')} of {search['plans']} plans", f"budget {search['budget']}"]
    return {
        "about": " · ".join([*words, make_printable(search["machine"])]),
        "ended": make_printable(search.get("ended") or ""),
        "best": best and make_printable(best["trial"]),
        "numbers": [
            (title, write(best[key]))
            for title, key, write in COLUMNS
            if best and key in ("step_seconds_p50", "tokens_per_second", "memory_gib", "mfu") and best.get(key)
        ],
        "slowest": format_duration(max(timed)) if len(timed) > 1 else "",
        "command": make_printable(search.get("command") or ""),
    }
