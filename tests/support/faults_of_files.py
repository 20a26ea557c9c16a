"""Faults at every file operation of a piece of work: the process dies before it, or the operation fails."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator

CHANGES = frozenset(
    "open write pwrite ftruncate truncate mkdir rmdir rename replace unlink remove link symlink chmod utime sendfile "
    "copy_file_range __exit__ save".split()
)
"""Names of functions in C that change files. The state of the disk before each call covers every state that a killed
process can leave, but for a part of what one `write` writes."""
OTHERS = frozenset("pread fsync close scandir listdir stat".split())
"""Names of functions that change nothing, and may fail."""
UNDISTURBED, SURVIVED, DIED, REFUSED, FAILED = 0, 40, 41, 42, 43


def disturbed(work: Callable[[], object], number: int, fault: OSError | None, refusals: tuple[type, ...]) -> int:
    """Does the work in a forked process in which operation `number` fails with `fault`, or ends the process where
    `fault` is None.

    Returns `UNDISTURBED` where the work has fewer operations, `SURVIVED` where it ends in spite of the fault, `DIED`
    after the end of the process, `REFUSED` where the work raises one of `refusals`, and `FAILED` for any other error,
    which is printed."""
    process = os.fork()
    if process == 0:
        code, fail = FAILED, _Fail(number, fault)
        try:
            sys.setprofile(fail)
            try:
                work()
            finally:
                sys.setprofile(None)
            code = SURVIVED if fail.left <= 0 else UNDISTURBED
        except refusals:
            code = REFUSED
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def every_fault(
    prepare: Callable[[], object], work: Callable[[], object], fault: OSError | None, refusals: tuple[type, ...] = ()
) -> Iterator[tuple[int, int]]:
    """Does the work again and again, each time with the fault one operation later, until the work has no more. Yields
    the number of the operation and what `disturbed` returns."""
    number, code = 0, SURVIVED
    while code != UNDISTURBED:
        prepare()
        number += 1
        if (code := disturbed(work, number, fault, refusals)) != UNDISTURBED:
            yield number, code


class _Fail:
    """Counts operations down, and has the last one fail."""

    def __init__(self, left: int, fault: OSError | None):
        self.left, self.fault = left, fault

    def __call__(self, frame: object, event: str, function: object) -> None:
        name = getattr(function, "__name__", "") if event == "c_call" else ""
        if name in CHANGES or self.fault is not None and name in OTHERS:
            self.left -= 1
            if self.left == 0:
                if self.fault is None:
                    os._exit(DIED)
                raise self.fault
