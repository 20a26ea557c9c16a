"""Triton kernels without a GPU: on forked processes that share memory, without one of their calls, and compiled for a
Hopper GPU."""

from __future__ import annotations

import ast
import importlib.util
import mmap
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from trainer.kernels.exchange import SymmetricRegion


class Memory:
    """What the ranks share: forked processes see it at the same addresses."""

    def __init__(self, size: int, elements: int, flags: int):
        self.kept = [mmap.mmap(-1, 4 * count) for _ in range(size) for count in (2 * elements, flags)]
        boxes, self.flags = (
            [torch.frombuffer(one, dtype=dtype) for one in self.kept[start::2]]
            for start, dtype in ((0, torch.float32), (1, torch.int32))
        )
        for box in boxes:
            box.fill_(float("nan"))
        self.half = elements
        self.tables = [torch.tensor([one.data_ptr() for one in some]) for some in (boxes, self.flags)]

    def region(self, rank: int) -> SymmetricRegion:
        tickets, error = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
        boxes, flags = (table.data_ptr() for table in self.tables)
        return SymmetricRegion(rank, len(self.flags), boxes, flags, self.half, tickets, error)


ENDED = mmap.mmap(-1, 1)
"""Whether a rank of `run` has come to its end."""


def be_late(seconds: float) -> None:
    """So late, or until another rank of `run` has ended, which it does at once where it should have waited."""
    end = time.monotonic() + seconds
    while not ENDED[0] and time.monotonic() < end:
        time.sleep(0.01)


def run(work: Callable[[int], None], size: int) -> list[str]:
    """What ranks that do `work`, a process each, have to say: nothing where all is well."""
    ENDED[0], ranks = 0, []
    for rank in range(size):
        reader, writer = os.pipe()
        if (process := os.fork()) == 0:
            try:
                work(rank)
            except BaseException:
                os.write(writer, traceback.format_exc()[-1500:].encode())
            finally:
                ENDED[0] = 1
                os._exit(0)
        os.close(writer)
        ranks.append((process, reader))
    said = []
    for process, reader in ranks:
        with os.fdopen(reader) as words:
            said.append(words.read())
        os.waitpid(process, 0)
    return [words for words in said if words]


def without(kernels: ModuleType, name: str, number: int, count: int) -> ModuleType:
    """The kernels without call `number`, of `count`, of `wait_for_flag` or `signal_peer`."""
    tree = ast.parse(Path(kernels.__file__).read_text())
    calls = [
        statement
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) == name
    ]
    assert len(calls) == count
    calls[number].value = ast.Constant(None)
    path = Path(tempfile.mkdtemp(), f"without_{name}_{number}.py")
    path.write_text(ast.unparse(tree))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    worst = (found - expected).abs().max().item()
    assert worst < 1e-4, f"{what}: {worst}"  # NaN too


def compile_for_hopper(
    kernel: Any,
    numbers: dict[str, Any],
    types: dict[str, str] | None = None,
    warps: int = 8,
    stages: int = 3,
    whole: Sequence[str] = (),
) -> tuple[str, str]:
    """A kernel's PTX, and the resources that its machine code takes. numbers: of its constants; types: of arguments
    that are no addresses of bf16; whole: numbers that are multiples of 16, as addresses and strides are."""
    types = {"tickets": "*i64", "error": "*i32", "boxes": "i64", "flags": "i64", "epoch": "i32"} | (types or {})
    names = [parameter.name for parameter in kernel.params]
    signature = {one: "constexpr" if one in numbers else types.get(one, "*bf16") for one in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, one in enumerate(names)
        if signature[one][0] == "*" or one in ("boxes", "flags", *whole) or one.endswith("_stride")
    }
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={one: numbers[one] for one in names if one in numbers}, attrs=aligned
    )
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 227 * 2**10, f"{numbers}: {made.metadata.shared} bytes of shared memory"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return made.asm["ptx"], told.stdout


def count_by_tensors() -> None:
    """Lets interpreted kernels count from tensors on: Triton 3.6 holds a number as an array of one element, which NumPy
    2.4 refuses to take for an integer."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))

    interpreter._patch_lang_tensor = patched
