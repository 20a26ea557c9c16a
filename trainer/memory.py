"""Lack of memory: how it is recognised, and what a run says of it.

By words, since it comes as different exceptions, in the text that torchrun keeps of other ranks, and behind a pipeline's own
error. Needs no torch.
"""
from __future__ import annotations

import re

from trainer.config import Config

SIGNS = re.compile(r"\bOutOfMemoryError\b|\bMemoryError\b|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
                   r"CUDNN_STATUS_ALLOC_FAILED|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory")
"""Of GPU allocators, cuBLAS and cuDNN, the host's allocator, Python and NumPy, the operating system."""

NOISE = re.compile(r"^\w*(?:Error|Exception): |\[enforce fail at [^]]*\] \S* == \S* |^\. | If reserved but unallocated memory.*|"
                   r" See documentation.*")


def lacks_memory(text: str) -> bool:
    """Whether an error's text says that memory ran out."""
    return SIGNS.search(text) is not None


def missing_memory(error: BaseException | None) -> str | None:
    """What an error, or a cause of it, says of the memory that could not be had, on one line; None where it is another error."""
    while error is not None:
        if lacks_memory(text := f"{type(error).__name__}: {error}"):
            return said(text)
        error = error.__cause__
    return None


def said(text: str) -> str:
    """The first line of an error's text, without what is of no use to its reader."""
    first = next(filter(None, map(str.strip, text.splitlines())), "")
    return NOISE.sub("", NOISE.sub("", first)).strip(" .")


def advice(config: Config) -> str:
    """What to override so that a run needs less memory, least costly first: only what it does not have already."""
    parallel, mode = config.parallel, config.activation.mode
    ways = [*(["activation=selective (keeps attention and every second product)"] if mode == "none" else []),
            *(["activation=full"] if mode != "full" else []),
            *(["a smaller batch.micro_size (the table at the start shows it)"] if config.batch.micro_size is None else []),
            *([f"batch.micro_size below {config.batch.micro_size}"] if (config.batch.micro_size or 1) > 1 else []),
            *([f"parallel.zero.stage={parallel.zero.stage + 1} or more" if parallel.zero.stage < 2 else "parallel.zero.stage=3"]
              if parallel.zero.stage < 3 else ["parallel.zero.offload=true"] if not parallel.zero.offload else []),
            f"parallel.tp={2 * parallel.tp}"]
    return f"{', '.join(ways[:-1])} or {ways[-1]}"
