"""Flags that a GPU's streams raise and wait for, between the GPUs of a node: by the driver, without a kernel.

A stream that waits keeps no multiprocessor. On CPUs the process itself does both."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

LOOK = 20e-6
"""Seconds between a CPU's looks at a flag."""
MAX_POLLS = 0
"""Looks at a flag after which a wait ends with an error, in kernels too; 0: never. Tests of the protocol set it: the
host then looks on GPUs too, and waits for every kernel."""
AT_LEAST = WITH_BARRIER = 0
"""The driver's flags: wait for the value or a later one; write when all before is visible to all GPUs."""


def raise_flag(flag: Tensor, epoch: int) -> None:
    """Sets any rank's flag, int32 [1], to an epoch, behind all that the current stream has done before."""
    if flag.is_cuda:
        stream_command("cuStreamWriteValue32_v2", flag, epoch, WITH_BARRIER)
    else:
        flag.fill_(epoch)


def await_flag(flag: Tensor, epoch: int) -> None:
    """Has the current stream go on when this rank's flag has come to the epoch. Raises `TimeoutError` after
    `MAX_POLLS`."""
    if flag.is_cuda and not MAX_POLLS:
        stream_command("cuStreamWaitValue32_v2", flag, epoch, AT_LEAST)
        return
    for number in itertools.count(1):
        if read_flags(flag).item() >= epoch:
            return
        if number == MAX_POLLS:
            raise TimeoutError(f"after {MAX_POLLS} looks")
        time.sleep(LOOK)


def read_flags(flags: Tensor) -> Tensor:
    """What flags say now, on the host, whatever the current stream waits for."""
    with torch.cuda.stream(side_stream(flags.device)) if flags.is_cuda else contextlib.nullcontext():
        return flags.to("cpu", copy=True)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def stream_command(name: str, flag: Tensor, value: int, how: int) -> None:
    stream = torch.cuda.current_stream(flag.device).cuda_stream
    error = driver_function(name)(stream, flag.data_ptr(), value, how)
    if error:
        raise RuntimeError(
            f"{name} ends with CUDA error {error}; set parallel.fusion=off and parallel.zero.transport=collectives"
        )


@cache
def driver_function(name: str) -> Callable[..., int]:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return function
