"""Compiles Triton kernels for a Hopper GPU, without one."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


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
