"""Checkpoints as somebody might send them who wishes to harm: damaged in every place, with checksums that fit."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.damage import ODD as ANYWHERE
from support.damage import REMOVED, pickled
from torch import Tensor

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.config import CheckpointConfig
from trainer.config.model import ModelSpec
from trainer.planning.parameters import declare_parameters

STATES = {
    "plan": {"pp": 1},
    "batch": {"global_size": 4},
    "launchers": ["node 1 2"],
    "tokens": 64,
    "samples": 8,
    "skipped": 0,
    "scaler": {"scale": 65536.0, "_growth_tracker": 2},
    "data": {"run.seed": 0},
    "compression": {"chosen": ["inner"]},
}
ODD = [*ANYWHERE, 2**62]

PATHS = [
    "../secret.bin",
    "/etc/passwd",
    "sub/file",
    "..",
    ".",
    "",
    "x" * 300,
    "a\0b",
    "\ud800",
    "a\nb",
    "rank-00001.bin",
]
CALLS = ["builtins eval", "builtins exec", "posix system", "os mkdir", "torch load", "torch.storage _load_from_bytes"]
CALLS += [
    "torch._utils _rebuild_parameter",
    "collections Counter",
    "torch os.mkdir",
    "torch.distributed.checkpoint dcp",
]


class Case(NamedTuple):
    """One malformed checkpoint. damage: of the folder of a good one; outcome: 'refused', 'same' where the damage does
    not matter, or 'any' where it may have hit values or what nobody reads."""

    name: str
    damage: Callable[[Path], object]
    outcome: str = "refused"


def model() -> tuple[ModelSpec, dict[str, Tensor]]:
    """A tiny model and what a checkpoint of it holds."""
    spec = ModelSpec(vocab_size=16, width=8, depth=1, max_length=16)
    spec.attention.heads, spec.attention.kv_heads, spec.feed_forward.width = 2, 1, 8
    generator = torch.Generator().manual_seed(1)
    tensors = {f"model.{n}": torch.randn(i.shape, generator=generator) for n, i in declare_parameters(spec).items()}
    return spec, tensors | {"optimizer.updates": torch.tensor(2), "error": torch.ones(3, 4, dtype=torch.int8)}


def save(folder: Path) -> Path:
    """A good checkpoint in the folder of checkpoints `folder`."""
    spec, tensors = model()
    checkpointer = Checkpointer(folder, CheckpointConfig())
    checkpointer.save(2, tensors, {"spec": spec.to_dict(), **STATES}, wait=True)
    checkpointer.close()
    return folder / "step-00000002"


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text())


def put(file: Path, content: bytes) -> None:
    """Replaces a file, not what other names of it lead to."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def put_manifest(path: Path, content: Any) -> None:
    """Writes a manifest whose own checksum fits."""
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name != "sha256"}
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    put(path / "manifest.json", json.dumps(content).encode())


def fit(path: Path) -> None:
    """Makes all checksums fit the files as they are."""
    about = manifest(path)
    for name in about["files"]:
        content = (path / name).read_bytes()
        about["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    put_manifest(path, about)


def at(place: tuple, value: Any) -> Callable[[Path], None]:
    """Puts `value` into the manifest at `place`, or removes what is there; checksums fit."""

    def damage(path: Path) -> None:
        about = manifest(path)
        inside = about
        for key in place[:-1]:
            inside = inside[key]
        if value is REMOVED:
            del inside[place[-1]]
        else:
            inside[place[-1]] = value(copy.deepcopy(inside[place[-1]])) if callable(value) else value
        put_manifest(path, about)

    return damage


def rewritten(name: str, change: Callable[[bytes], bytes], fitted: bool = True) -> Callable[[Path], None]:
    """Changes the content of a file; with checksums that fit, unless told otherwise."""

    def damage(path: Path) -> None:
        put(path / name, change((path / name).read_bytes()))
        if fitted and name != "manifest.json":
            fit(path)

    return damage


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(len(content) * share)]


def flipped(seed: int, bits: int = 1) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        draw, changed = random.Random(seed), bytearray(content)
        for _ in range(bits):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)

    return change


def another_file(name: str, outside: Path) -> Iterator[Case]:
    """The file `name` is something else than a regular file of the folder."""

    def link(path: Path) -> None:
        target = outside / f"{path.parent.name}-{name}"
        shutil.move(path / name, target)
        (path / name).symlink_to(target)

    def folder(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    def pipe(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    def loop(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(name)

    changes = {
        "link": link,
        "folder": folder,
        "pipe": pipe,
        "loop": loop,
        "missing": lambda path: (path / name).unlink(),
    }
    for kind, change in changes.items():
        yield Case(f"{name} {kind}", change)


def manifests(outside: Path) -> Iterator[Case]:
    """Manifests that are no manifests, or that hold states of other kinds."""
    name = "manifest.json"
    yield from another_file(name, outside)
    for share in (0, 0.01, 0.2, 0.5, 0.9, 0.99):
        yield Case(f"{name} cut at {share}", rewritten(name, cut(share)))
    for seed in range(20):
        yield Case(f"{name} flip {seed}", rewritten(name, flipped(seed)))
    texts = [b"\xff\xfe{", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"{}", b"null", b'"text"', b"[1]"]
    texts += [b'{"format": ' + b"9" * 4000 + b"}", b'{"format": 2, "sha256": 1}', pickled(outside / "canary")]
    for number, text in enumerate(texts):
        yield Case(f"{name} text {number}", rewritten(name, lambda _, text=text: text))

    def sparse(path: Path) -> None:
        (path / name).unlink()
        with open(path / name, "wb") as file:
            file.truncate(2**40)

    yield Case(f"{name} of a terabyte", sparse)
    deep: Any = 1
    for _ in range(700):
        deep = {"a": deep}
    fits = {
        "plan": [*ODD, deep, REMOVED],
        "saved": [*ODD, deep, REMOVED],
        "torch": [*ODD, deep, REMOVED],
        "launchers": [[], REMOVED],
        "batch": [{}, {"a": [None]}, deep, REMOVED],
        "data": [{}, {"a": [None]}, deep, REMOVED],
        "compression": [None, REMOVED],
        "scaler": [{}],
        **{key: [2**62] for key in ("step", "tokens", "samples", "skipped")},
    }
    for key in ("format", "step", "files", "tensors", "spec", *STATES, "saved", "torch"):
        for value in (*ODD, deep, REMOVED):
            good = any(value is fit or value == fit and type(value) is type(fit) for fit in fits.get(key, ()))
            shown = "removed" if value is REMOVED else "deep" if value is deep else repr(value)
            yield Case(f"{key} = {shown}", at((key,), value), "same" if good else "refused")
    yield Case("format 3", at(("format",), 3))
    for key, values in {"scale": ["1", -1, 0, 1e300, 2**200], "_growth_tracker": ["1", -1, 0.5, 2**40]}.items():
        for value in (*values, None, REMOVED):
            yield Case(f"scaler.{key} = {value}", at(("scaler", key), value))


def models(outside: Path) -> Iterator[Case]:
    """Specs of models that cannot be, or are not those of the tensors."""
    for key in ("vocab_size", "width", "depth", "max_length", "tied", "attention", "norm", "pattern", "overrides"):
        for value in ("text", -1, 0, 2**40, 2**70, [1], {"b": 1}, None):
            outcome = "any" if key in ("max_length", "tied") and type(value) is int else "refused"
            yield Case(f"spec.{key} = {value!r}", at(("spec", key), value), outcome)
    for change in (
        {"repeat": 2**40, "norm": {"kind": "layer"}},
        {"repeat": "x"},
        {"attention": 1},
        {"attention": {"x": 1}},
    ):
        yield Case(f"spec.pattern = {change}", at(("spec", "pattern"), [change]))
    yield Case("spec of another field", at(("spec", "code"), "import os"))
    yield Case("spec with heads for ever", at(("spec", "attention", "heads"), 2**60))


def indexes(outside: Path) -> Iterator[Case]:
    """Chunks that are elsewhere, too large, double, missing, or no chunks."""
    name = "model.embedding.weight"
    entry: tuple = ("tensors", name)
    for key in ("shape", "dtype", "chunks"):
        for value in (*ODD, REMOVED):
            yield Case(f"{key} = {value!r:.20}", at((*entry, key), value))
    for value in (*ODD, REMOVED):
        yield Case(f"tensor = {value!r:.20}", at(entry, value))
    for dtype in ("load", "float32 ", "complex128", "quint8", "float64", "uint8", "__dict__"):
        yield Case(f"dtype {dtype}", at((*entry, "dtype"), dtype))
    for shape in (
        [16],
        [16, 8, 1],
        [8, 16],
        [17, 8],
        [2**31, 2**31],
        [0, 2**63],
        [2**40, 2**40, 0],
        [-16, -8],
        [1] * 3000,
    ):
        yield Case(f"shape {shape[:3]}", at((*entry, "shape"), shape))
    chunk = (*entry, "chunks", 0)
    for key in ("offsets", "sizes", "file", "start"):
        for value in (*ODD, REMOVED):
            yield Case(f"chunk {key} = {value!r:.20}", at((*chunk, key), value))
    for file in PATHS:
        yield Case(f"chunk in {file!r:.20}", at((*chunk, "file"), file))
        yield Case(f"files has {file!r:.20}", vouched(file, outside))
    lists = {
        "offsets": [[1, 0], [0], [0, 0, 0], [-1, 0], [0, 2**63], [16, 0]],
        "sizes": [[15, 8], [17, 8], [0, 8], [8]],
    }
    for key, values in lists.items():
        for value in values:
            yield Case(f"chunk {key} = {value}", at((*chunk, key), value))
    both = (*entry, "chunks")
    yield Case("chunk twice", at(both, lambda chunks: chunks * 2))
    yield Case("ten thousand chunks of the same bytes", at(both, lambda chunks: chunks * 10_000))
    yield Case("in two halves", at(both, lambda chunks: halves(chunks[0], 8)), "same")
    yield Case("halves that overlap", at(both, lambda chunks: halves(chunks[0], 8, 7)))
    yield Case("halves with a gap", at(both, lambda chunks: halves(chunks[0], 7, 8)))
    yield Case("one of two halves", at(both, lambda chunks: halves(chunks[0], 8)[:1]))
    yield Case("beyond the file", at((*chunk, "start"), 10**5))
    yield Case("all in the same bytes", shared_bytes)
    yield Case("a terabyte", terabyte)
    yield Case(
        "of nothing and never ending", at(("tensors", "error"), {"shape": [0, 2**62], "dtype": "int8", "chunks": []})
    )


def halves(chunk: dict[str, Any], rows: int, second: int | None = None) -> list[dict[str, Any]]:
    """A chunk [16, 8] of float32 cut behind `rows` rows; the other half begins at row `second`."""
    second = rows if second is None else second
    behind = {"offsets": [second, 0], "sizes": [16 - second, 8], "start": chunk["start"] + second * 32}
    return [chunk | {"sizes": [rows, 8]}, chunk | behind]


def vouched(name: str, outside: Path) -> Callable[[Path], None]:
    """The manifest vouches for a file of this name, and a tensor lies there."""

    def damage(path: Path) -> None:
        about = manifest(path)
        (file,) = about["files"]
        content = (path / file).read_bytes()
        (outside.parent / "secret.bin").write_bytes(content)
        about["files"] = {name: about["files"][file]}
        for tensor in about["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk["file"] = name
        put_manifest(path, about)

    return damage


def shared_bytes(path: Path) -> None:
    about = manifest(path)
    for tensor in about["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["start"] = 0
    about["tensors"] |= {f"more{i}": about["tensors"]["model.embedding.weight"] for i in range(100)}
    put_manifest(path, about)


def terabyte(path: Path) -> None:
    about = manifest(path)
    (file,) = about["files"]
    about["files"][file]["bytes"] = 2**42
    tensor = about["tensors"]["model.embedding.weight"]
    tensor["shape"] = tensor["chunks"][0]["sizes"] = [2**35, 8]
    put_manifest(path, about)


def tensor_files(outside: Path) -> Iterator[Case]:
    """Files of values that are too short, too long, something else, or somewhere else."""
    name = "rank-00000.bin"
    yield from another_file(name, outside)
    for share in (0, 0.1, 0.5, 0.999):
        yield Case(f"values cut at {share}", rewritten(name, cut(share), fitted=False))
        yield Case(f"values cut at {share}, fitted", rewritten(name, cut(share)))
    for seed in range(6):
        yield Case(f"values flipped {seed}", rewritten(name, flipped(seed), fitted=False))
    yield Case("values and more", rewritten(name, lambda content: content + b"more", fitted=False))
    yield Case("values and more, fitted", rewritten(name, lambda content: content + b"more"), "same")
    call = pickled(outside / "canary")
    yield Case("values are a pickle", rewritten(name, lambda content: call))
    yield Case("values begin with a pickle", rewritten(name, lambda content: call + content[len(call) :]), "any")
    yield Case("a stray index", lambda path: put(path / ".metadata", call), "same")

    def older(path: Path) -> None:
        put(path / ".metadata", call)
        put_manifest(path, manifest(path) | {"format": 1})

    yield Case("a manifest of format 1", older)


KINDS = {kind.__name__: kind for kind in (manifests, models, indexes, tensor_files)}
"""Generators of cases; what they put beside a checkpoint lies in the folder that they are given."""
