"""Checkpoints as somebody might send them who wishes to harm: damaged in every place, with checksums that fit."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from support.damage import ODD as ANYWHERE
from support.damage import REMOVED, Call, pickled
from torch import Tensor

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.config import CheckpointConfig
from trainer.config.model import ModelSpec
from trainer.planning.cost.parameters import declarations

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
    tensors = {f"model.{n}": torch.randn(i.shape, generator=generator) for n, i in declarations(spec).items()}
    return spec, tensors | {"optimizer.updates": torch.tensor(2), "error": torch.ones(3, 4, dtype=torch.int8)}


def save(folder: Path) -> Path:
    """A good checkpoint in the folder of checkpoints `folder`."""
    spec, tensors = model()
    checkpointer = Checkpointer(folder, CheckpointConfig())
    checkpointer.save(2, tensors, {"spec": spec.to_dict(), **STATES}, wait=True)
    checkpointer.close()
    return folder / "step-00000002"


def save_format_1(folder: Path) -> Path:
    """The same as version 0.1.0 would have saved it."""
    spec, tensors = model()
    path = folder / "step-00000002"
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    held = {name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for name, t in tensors.items()}
    about = {"format": 1, "saved": 1.0, "spec": spec.to_dict(), **STATES, "step": 2, "files": {}, "tensors": held}
    put_manifest(path, about | {"files": {file.name: {} for file in path.iterdir()}})
    fit(path)
    return path


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

    yield Case("an index of format 1 in format 2", older)


def old_indexes(outside: Path) -> Iterator[Case]:
    """`.metadata` of format 1 that is cut, flipped, or calls something."""
    name, canary = ".metadata", outside / "canary"
    yield from another_file(name, outside)
    for share in (0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        yield Case(f"index cut at {share}", rewritten(name, cut(share)))
    for seed in range(60):
        yield Case(f"index flip {seed}", rewritten(name, flipped(seed, bits=1 + seed % 3)), "any")
    for number, content in enumerate(
        [Call(canary), [Call(canary)], {"a": Call(canary)}, (1, Call(canary)), 1, {}, None]
    ):
        yield Case(
            f"index is another pickle {number}", rewritten(name, lambda _, content=content: pickle.dumps(content))
        )
        protocol = rewritten(name, lambda _, content=content: pickle.dumps(content, protocol=0))
        yield Case(f"index is another old pickle {number}", protocol)
    for call in CALLS:
        program = b"c" + call.replace(" ", "\n").encode() + b"\n(X" + len(str(canary)).to_bytes(4, "little")
        program += str(canary).encode() + b"tR."
        yield Case(f"index calls {call}", rewritten(name, lambda _, program=program: b"\x80\x02" + program))
        yield Case(
            f"index calls {call} and goes on",
            rewritten(name, lambda content, program=program: b"\x80\x04" + program[:-1] + b"0" + content[2:]),
        )
    bombs = {
        "memo": b"\x80\x02Nr\xff\xff\xff\xff.",
        "bytes": b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b".",
        "text": b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b".",
        "frame": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b".",
        "number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "nest": b"\x80\x02" + b"(" * 10**5 + b"t" * 10**5 + b".",
        "doubling": b"\x80\x02N" + b"q\x00h\x00\x86" * 4000 + b".",
        "doubling key": b"\x80\x02}N" + b"q\x00h\x00\x86" * 200 + b"Ns.",
        "empty stack": b"\x80\x02R.",
        "no end": b"\x80\x02N",
        "unknown": b"\x80\x02\xee.",
    }
    for kind, program in bombs.items():
        yield Case(f"index bomb {kind}", rewritten(name, lambda _, program=program: program))
    for field in ("planner_data", "storage_meta", "version"):
        yield Case(f"a call as {field}", in_index(lambda index, f=field: setattr(index, f, Call(canary))))
    yield Case("a call as a tensor", in_index(lambda index: index.state_dict_metadata.update(error=Call(canary))))
    changes: dict[str, Callable[[Any], object]] = {
        "escape": lambda place: setattr(place, "relative_path", "../secret.bin"),
        "absolute": lambda place: setattr(place, "relative_path", "/etc/passwd"),
        "no path": lambda place: setattr(place, "relative_path", 3),
        "itself": lambda place: setattr(place, "relative_path", ".metadata"),
        "manifest": lambda place: setattr(place, "relative_path", "manifest.json"),
        "beyond": lambda place: setattr(place, "offset", 2**40),
        "negative": lambda place: setattr(place, "offset", -1),
        "huge": lambda place: setattr(place, "length", 2**62),
        "short": lambda place: setattr(place, "length", 10),
        "other": lambda place: setattr(place, "offset", 0),
        "transformed": lambda place: setattr(place, "transform_descriptors", ["zstd"]),
        "no length": lambda place: delattr(place, "length"),
    }
    for kind, change in changes.items():
        yield Case(
            f"a place: {kind}", in_index(lambda index, change=change: change(list(index.storage_data.values())[-1]))
        )
    yield Case("no places", in_index(lambda index: index.storage_data.clear()))
    yield Case("no tensors", in_index(lambda index: index.state_dict_metadata.clear()))
    yield Case("huge", in_index(lambda i: setattr(i.state_dict_metadata["error"], "size", torch.Size([2**40, 4]))))
    yield Case("no chunks", in_index(lambda i: i.state_dict_metadata["error"].chunks.clear()))


def in_index(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Changes the objects in `.metadata`."""

    def rewrite(content: bytes) -> bytes:
        index = pickle.loads(content)  # of a file that this test has written
        change(index)
        return pickle.dumps(index)

    return rewritten(".metadata", rewrite)


def old_archives(outside: Path) -> Iterator[Case]:
    """Tensors of format 1 in archives that are cut, flipped, swollen, or call something."""
    name, canary = "__0_0.distcp", outside / "canary"
    yield from another_file(name, outside)
    for share in (0, 0.1, 0.5, 0.999):
        yield Case(f"archives cut at {share}", rewritten(name, cut(share)))
    for seed in range(60):
        yield Case(f"archives flip {seed}", rewritten(name, flipped(seed, bits=20)), "any")
    tensor = torch.ones(3, 4, dtype=torch.int8)
    contents: dict[str, Any] = {
        "a call": Call(canary),
        "a call in a list": [tensor, Call(canary)],
        "two tensors": [tensor, tensor],
        "a parameter": torch.nn.Parameter(tensor.float()),
        "another shape": torch.ones(4, 3, dtype=torch.int8),
        "another dtype": tensor.int(),
        "sparse": tensor.to_sparse(),
        "a module": torch.nn.Linear(1, 1),
        "text": "text",
    }
    for kind, content in contents.items():
        yield Case(f"an archive with {kind}", archive(saved(content)))
    yield Case("an archive of a transposed tensor", archive(saved(torch.ones(4, 3, dtype=torch.int8).t())), "same")
    yield Case("an archive of expanded values", archive(saved(torch.ones(1, 1, dtype=torch.int8).expand(3, 4))), "same")
    yield Case("an archive in the old form", archive(saved(tensor, _use_new_zipfile_serialization=False)))
    call = pickle.dumps(Call(canary), protocol=2)
    changes: dict[str, Callable[[dict[str, bytes]], object]] = {
        "call": lambda records: records.update({"archive/data.pkl": call}),
        "no pickle": lambda records: records.pop("archive/data.pkl"),
        "no values": lambda records: records.pop("archive/data/0"),
        "few values": lambda records: records.update({"archive/data/0": b"1"}),
        "big end": lambda records: records.update({"archive/byteorder": b"big"}),
        "two roots": lambda records: records.update({"other/data.pkl": call}),
        "hooks": lambda records: records.update({"archive/data.pkl": with_hooks(records["archive/data.pkl"], canary)}),
    }
    for kind, change in changes.items():
        yield Case(f"records: {kind}", archive(repacked(saved(tensor), change)))
    bomb = repacked(
        saved(tensor), lambda records: records.update({"archive/data/0": b"\0" * 10**6}), zipfile.ZIP_DEFLATED
    )
    yield Case("a compressed archive", archive(bomb))


def saved(content: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def with_hooks(program: bytes, canary: Path) -> bytes:
    """A tensor's pickle that calls something where it has its hooks."""
    call = pickle.dumps(Call(canary), protocol=2)[2:-1]
    return program.replace(b"ccollections\nOrderedDict\n", call, 1)


def repacked(content: bytes, change: Callable[[dict[str, bytes]], object], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with other records."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return stream.getvalue()


def archive(content: bytes) -> Callable[[Path], None]:
    """The tensor `error` of a checkpoint of format 1 is this archive."""

    def damage(path: Path) -> None:
        end = (path / "__0_0.distcp").stat().st_size

        def move(index: Any) -> None:
            (place,) = (place for key, place in index.storage_data.items() if key.fqn == "error")
            place.offset, place.length = end, len(content)

        rewritten("__0_0.distcp", lambda before: before + content)(path)
        in_index(move)(path)

    return damage


KINDS = {kind.__name__: kind for kind in (manifests, models, indexes, tensor_files, old_indexes, old_archives)}
"""Generators of cases; what they put beside a checkpoint lies in the folder that they are given."""
