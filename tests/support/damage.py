"""Files as a crash, a bad disk or somebody who wishes to harm would leave them: any file's bytes, and JSON's values."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD = [
    None,
    True,
    "text",
    -1,
    1.5,
    2**70,
    10**400,
    float("inf"),
    [],
    {},
    [[[]]],
    {"a": [None]},
    "../outside",
    "/etc/hosts",
]
"""Values of all kinds; which of them fit where they are put is known there."""


class Call:
    """Pickled, it is a call that makes the folder `canary`."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Call(canary))


def damaged_bytes(content: bytes, canary: Path, flips: int = 12) -> Iterator[tuple[str, bytes]]:
    """The content of any file, damaged: what is said of the damage, and the bytes."""
    draw = random.Random(len(content))
    for end in sorted({0, 1, len(content) // 3, len(content) // 2, len(content) - 1}):
        yield f"cut at {end}", content[:end]
    for _ in range(flips):
        changed, at = bytearray(content), draw.randrange(len(content))
        changed[at] ^= 1 << draw.randrange(8)
        yield f"a bit flipped at {at}", bytes(changed)
    middle = len(content) // 2
    for name, put in {
        "nul": b"\0" * 9,
        "no UTF-8": b"\xff\xfe\xc3(",
        "digits": b"9" * 5000,
        "half a pair": b"\\ud800",
    }.items():
        yield f"{name} in the middle", content[:middle] + put + content[middle:]
        yield f"{name} in front", put + content
    yield "a pickled call", pickled(canary)
    yield "a pickled call behind", content + pickled(canary)
    yield "twice", content + content
    yield "random", draw.randbytes(1000)


def damaged_texts(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Texts that are JSON, or nearly, and nothing that anybody reads."""
    for name, text in {
        "deep lists": "[" * 100_000,
        "deep lists, closed": "[" * 50_000 + "]" * 50_000,
        "deep mappings": '{"a":' * 100_000,
        "digits": "9" * 100_000,
        "exponent": "1e999999999",
        "words": "NaN",
        "a call": f"__import__('os').mkdir({str(canary)!r})",
        "a YAML call": f"!!python/object/apply:os.mkdir [{str(canary)!r}]",
        **{f"only {json.dumps(value)[:20]}": json.dumps(value) for value in ODD if value != 10**400},
    }.items():
        yield name, text.encode() + b"\n"


def damaged_values(value: Any, most: int = 10**9) -> Iterator[tuple[str, bytes]]:
    """JSON values with something odd in every place, and with every entry left out; a random `most` of them."""
    cases = []
    for place in places(value):
        for odd in [*ODD, REMOVED]:
            changed = copy.deepcopy(value)
            around = changed
            for key in place[:-1]:
                around = around[key]
            if odd is REMOVED:
                del around[place[-1]]
            else:
                around[place[-1]] = odd
            what = "removed" if odd is REMOVED else str(odd)[:20]
            cases.append((f"{'.'.join(map(str, place))} {what}", json.dumps(changed).encode() + b"\n"))
    random.Random(1).shuffle(cases)
    yield from cases[:most]


REMOVED = object()


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Where something stands in a JSON value: keys and indices from the outside."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*path, key)
        yield from places(item, (*path, key))


def other_files(path: Path, outside: Path) -> Iterator[str]:
    """Puts something at `path` that is no file, and says what."""
    path.unlink(missing_ok=True)
    path.mkdir()
    yield "a folder"
    path.rmdir()
    os.mkfifo(path)
    yield "a pipe, which nobody writes"
    path.unlink()
    path.symlink_to("/dev/zero")
    yield "a link to a file without end"
    path.unlink()
    path.symlink_to(path)
    yield "a link to itself"
    path.unlink()
    path.symlink_to(outside / "nothing")
    yield "a link to nothing"
    path.unlink()
