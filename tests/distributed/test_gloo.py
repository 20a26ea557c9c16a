"""Collectives of one gloo communicator that run at the same time."""

from support.launch import launch


def test_gathers_started_together_leave_the_heap_whole() -> None:
    """With torch's own two threads a communicator, some such processes end in `malloc(): unaligned tcache chunk
    detected`, so what prevents it is looked at too; and gloo's threads are to interrupt none that holds its locks."""
    lines = launch("gloo_threads.py", 1, forks=True).stdout.splitlines()
    assert lines == ["threads 1"] * 3 + ["interrupt nobody True", "gathered"]
