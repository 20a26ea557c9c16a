"""Errors that say that memory ran out.

They are recognised by their text: libraries raise them as different exception types, the errors of other ranks reach
torchrun as text, and a pipeline wraps them in an error of its own.
"""

from __future__ import annotations

import re

SIGNS = re.compile(
    r"\bOutOfMemoryError\b|\bMemoryError\b|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory"
)
"""Of GPU allocators, cuBLAS and cuDNN, the host's allocator, Python and NumPy, the operating system."""

NOISE = re.compile(
    r"^\w*(?:Error|Exception): |\[enforce fail at [^]]*\] \S* == \S* |^\. | If reserved but unallocated memory.*|"
    r" See documentation.*"
)


def lacks_memory(text: str) -> bool:
    """Whether an error's text says that memory ran out."""
    return SIGNS.search(text) is not None


def missing_memory(error: BaseException | None) -> str | None:
    """What an error, or a cause of it, says of the memory that could not be had, on one line; None where it is another
    error."""
    while error is not None:
        if lacks_memory(text := f"{type(error).__name__}: {error}"):
            return error_reason(text)
        error = error.__cause__
    return None


def error_reason(text: str) -> str:
    """The first line of an error's text, without what is of no use to its reader."""
    first = next(filter(None, map(str.strip, text.splitlines())), "")
    return NOISE.sub("", NOISE.sub("", first)).strip(" .")
