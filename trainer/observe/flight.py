"""Where a process stands: the collectives in torch's flight recorder, and the source line of its main thread.

The flight recorder keeps the last collectives of a process with the source lines that called them. A summary of it as
plain data is compared among ranks, and says which ranks wait for which (`describe_waits`)."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.distributed.c10d_internals import group_members, list_recorders

PROJECT = str(Path(__file__).parents[1]) + os.sep
CALLERS = 3
"""Source lines shown of a call's stack, the innermost first."""

WRAPPERS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_functional_collectives.py",
)
"""Files of torch through which every collective goes."""

ENTRIES = 2000
"""Collectives that the recorder keeps."""

Groups = dict[str, dict[str, Any]]
"""By name of a process group, a dictionary: `desc`; `ranks` (global); `entered`, how many collectives this rank has
entered; and, if one has not ended, of the first such its `number`, `what` (operation and tensors), `at` (source
lines)."""


def enable_recorder(folder: Path) -> None:
    """Switches the flight recorder on for process groups that are created from now on.

    NCCL's own timeout also dumps it to `folder`, if that exists by then. Variables that are set already stay."""
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", ENTRIES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", 1),
        ("TORCH_FR_DUMP_TEMP_FILE", folder / "nccl_timeout_rank_"),
    ):
        os.environ.setdefault(name, str(value))


def dump_recorders(stacks: bool) -> dict[str, bytes]:
    """What torch has recorded in this process, pickled, by name of the recorder: NCCL's, or that of other backends.

    The first dump with stacks takes a second, in which torch reads symbols."""
    return {name: dump(includeStackTraces=stacks) for name, dump in list_recorders().items()}


def summarise_own(recorder: str, dump: bytes) -> Groups:
    """The summary of one of this process's own dumps."""
    # Each recorder counts the collectives of a group by itself, so a group is named together with its recorder.
    return {f"{recorder} {name}": group for name, group in summarise_dump(pickle.loads(dump), group_members()).items()}


def summarise_dump(dump: dict[str, Any], members: dict[str, list[int]]) -> Groups:
    """A recorder's dump, summed up by process group. members: global ranks by group, which gloo's dumps leave out."""
    groups: Groups = {}
    listed = {
        name: [int(rank) for rank in re.findall(r"\d+", group["ranks"])]
        for name, group in dump.get("pg_config", {}).items()
    }
    for entry in dump.get("entries", []):
        name, desc = entry["process_group"]
        kind = "p2p" if entry["is_p2p"] else "collective"  # torch counts the two kinds separately
        number = entry[f"{kind}_seq_id"]
        group = groups.setdefault(
            f"{name} {kind}", {"desc": desc, "ranks": members.get(name) or listed.get(name) or [], "entered": 0}
        )
        group["entered"] = max(group["entered"], number)
        # gloo never marks work as completed; it retires it.
        if not entry["retired"] and entry["state"] != "completed" and number <= group.get("number", number):
            sizes = " ".join(
                f"{dtype}{list(shape)}" for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"])
            )
            group |= {
                "number": number,
                "what": f"{entry['profiling_name'].partition(':')[2]} {sizes}".strip(),
                "at": project_lines(
                    (frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", [])
                ),
            }
    return groups


def project_lines(frames: Iterable[tuple[str, int, str]]) -> str:
    """The project's own lines of a stack, the innermost first.

    A stack without any, such as FSDP's in autograd's thread, gives its innermost line outside of `WRAPPERS`."""
    frames = list(frames)
    own = [(file.removeprefix(PROJECT), line, name) for file, line, name in frames if file.startswith(PROJECT)]
    callers = [frame for frame in frames if not frame[0].endswith(WRAPPERS)] or frames
    other = [(os.path.basename(file), line, name) for file, line, name in callers[:1]]
    return " < ".join(f"{file}:{line} {name}" for file, line, name in (own or other)[:CALLERS])


def main_thread() -> str:
    """The source lines at which the main thread of this process stands, also while it waits in C++."""
    return project_lines(_frames(sys._current_frames().get(threading.main_thread().ident)))


def _frames(frame: Any) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def describe_waits(everyone: dict[int, Groups]) -> list[str]:
    """One line for each collective that ranks wait in, with the ranks that have not entered it.

    everyone: what each rank has recorded. Collectives that some rank has not entered come first."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for rank, groups in everyone.items():
        for name, group in groups.items():
            if "number" in group:
                found.setdefault((name, group["number"], group["what"]), []).append(rank)
    texts = []
    for (name, number, what), inside in sorted(found.items()):
        group = everyone[inside[0]][name]
        absent = [
            rank for rank in group["ranks"] if everyone.get(rank, {}).get(name, {"entered": 0})["entered"] < number
        ]
        silent = [rank for rank in absent if rank not in everyone]
        places = dict.fromkeys(at for rank in inside if (at := everyone[rank][name]["at"]))
        text = (
            f"{format_ranks(inside)} in {what} (number {number} of "
            f"{group['desc'] or name}){' at ' if places else ''}{' and '.join(places)}"
        )
        for some, verb in ((sorted(set(absent) - set(silent)), "did not enter"), (silent, "may not have entered")):
            text += f", which {format_ranks(some)} {verb}" if some else ""
        texts.append((not absent, text))
    return [text for _, text in sorted(texts)]


def format_ranks(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    single = len(runs) == 1 and len(runs[0]) == 1
    return f"rank{'' if single else 's'} " + ", ".join("-".join(map(str, run)) for run in runs)
