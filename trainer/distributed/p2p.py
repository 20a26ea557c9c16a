"""Point-to-point transfers between the ranks of one pipeline, and how they tell each other about failures.

Every directed pair of ranks has a communicator of its own. NCCL runs the operations of one communicator one after the
other, in the order of posting. On a shared one, a receive that waits for its sender would block the sends and receives
behind it, and two ranks that wait for each other in this way would deadlock.

The communicators are created on the store, not by `dist.new_group`. That either needs all ranks of the default group
(NCCL, once that group has a device), or names a group by the number of groups that a rank has seen, which differs along
a pipeline (`use_local_synchronization`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed import c10d_internals
from trainer.distributed.c10d_internals import Backend

Edge = tuple[int, int]
"""(sender, receiver), as ranks within the pipeline."""

_numbers = itertools.count()
"""Numbers the channels of this process. Ranks of a pipeline create their channels together, so the numbers agree."""


class PipelineError(RuntimeError):
    """A step cannot be finished because of a failure on this rank or on another rank of the pipeline, which the message
    names."""


class PeerError(PipelineError):
    """A `PipelineError` whose failure was on another rank."""


class TransferError(RuntimeError):
    """A transfer failed, most often because the rank at its other end has died. peer: global rank of that end."""

    def __init__(self, what: str, peer: int, cause: Exception):
        super().__init__(f"{what} rank {peer}: {str(cause).splitlines()[0].partition('. ')[0]}")
        self.peer = peer


def stage_edges(placement: tuple[int, ...]) -> set[Edge]:
    """The directed pairs of ranks between which hidden states and, in the other direction, their gradients travel."""
    neighbours = {pair for pair in itertools.pairwise(placement) if pair[0] != pair[1]}
    return neighbours | {(b, a) for a, b in neighbours}


class PipelineChannels:
    """Point-to-point transfers of one pipeline. The messages of an edge arrive in the order in which they were sent.

    ranks: pipeline rank -> global rank. All ranks of the pipeline construct, extend and close it together.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        edges: Iterable[Edge],
        device: torch.device,
        timeout: timedelta = timedelta(minutes=20),
    ):
        self.ranks, self.device, self.timeout = tuple(ranks), device, timeout
        self.rank = self.ranks.index(dist.get_rank())
        # All pipelines of the run share this prefix: a failure in one breaks the others through data parallelism, and
        # they have to find its cause.
        self._store = dist.PrefixStore(f"pipeline/{next(_numbers)}", c10d_internals.default_store())
        self.failures = FailureStore(self._store)
        self._known: set[Edge] = set()
        self._links: dict[Edge, _EdgeEnd] = {}
        self._backends: list[Backend] = []
        self.members: dict[str, tuple[int, ...]] = {}
        """The ranks that each communicator connects, of the whole run, by its name."""
        self._receiving: set[PendingTensor] = set()
        self.extend(edges)

    def extend(self, edges: Iterable[Edge]) -> None:
        """Opens those of `edges` that are not open yet. All ranks call it with the same edges.

        Each edge is opened and used once before the next, in one order that all ranks share: opening a communicator
        blocks until both its ranks do so.
        """
        for edge in sorted(set(edges) - self._known):
            self._known.add(edge)
            if self.rank in edge:
                self._links[edge] = _EdgeEnd(self.connect(edge, "pipeline"))
                if self.rank == edge[0]:
                    # NCCL connects lazily, in the first transfer. Doing that here keeps it out of the schedule, where
                    # it could block.
                    self.send(torch.zeros(1, device=self.device), edge[1])
                    self.flush()
                else:
                    self.recv(torch.Size([1]), torch.float32, edge[0]).wait()

    def send(self, tensor: Tensor, destination: int) -> None:
        """Starts to send `tensor` to pipeline rank `destination`. The tensor is kept alive until it has been sent, and
        must not be changed before."""
        link = self._links[self.rank, destination]
        tensor = tensor.detach().contiguous()
        try:
            work = link.backend.send([tensor], 1, link.next_tag())
        except RuntimeError as error:
            raise TransferError("sending to", self.ranks[destination], error) from error
        # gloo reports the completion of a send only to whoever waits for it. There all tensors are kept until `flush`.
        while link.sending and link.sending[0][0].is_completed():
            link.sending.popleft()
        link.sending.append((work, tensor))

    def recv(self, shape: torch.Size, dtype: torch.dtype, source: int) -> PendingTensor:
        """Starts to receive the next tensor from pipeline rank `source`, into a buffer that is allocated now."""
        link = self._links[source, self.rank]
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        try:
            work = link.backend.recv([buffer], 0, link.next_tag())
        except RuntimeError as error:
            raise TransferError("receiving from", self.ranks[source], error) from error
        pending = PendingTensor(self, work, buffer, source)
        # `close` has to find the receives that are still posted: their `Work` keeps a gloo connection open.
        self._receiving.add(pending)
        return pending

    def flush(self) -> None:
        """Waits until everything has been sent: the host on gloo, the current stream on CUDA."""
        for (_, destination), link in self._links.items():
            while link.sending:
                try:
                    link.sending[0][0].wait()
                except RuntimeError as error:
                    raise TransferError("sending to", self.ranks[destination], error) from error
                link.sending.popleft()

    def close(self, abort: bool = False) -> None:
        """Closes all edges. abort: does not wait for transfers in progress. On gloo, the ranks at the other ends then
        see their transfers fail at once."""
        for link in self._links.values():
            link.sending.clear()
        for backend in self._backends if self.device.type == "cuda" else []:
            backend.abort() if abort else backend.shutdown()
        self._backends.clear()
        for pending in self._receiving:
            pending.drop()
        self._receiving.clear()
        self._links.clear()  # a gloo connection ends with the last reference to it

    def connect(self, members: tuple[int, ...], what: str) -> Backend:
        """A communicator of some ranks of the pipeline, which call this together. what: distinguishes it from
        others."""
        ranks = [self.ranks[member] for member in members]
        store, rank = dist.PrefixStore(f"{what}/{'-'.join(map(str, ranks))}", self._store), members.index(self.rank)
        name = f"{what} {' to '.join(map(str, ranks))}"
        self.members[name] = tuple(ranks)
        if self.device.type != "cuda":
            backend = c10d_internals.make_gloo(store, rank, len(ranks), self.timeout)
        else:
            backend = c10d_internals.make_nccl(store, rank, ranks, name, self.timeout)
        self._backends.append(backend)
        return backend


@dataclass
class _EdgeEnd:
    """One end of an edge. Tags count its messages, so that gloo matches them in order, as NCCL does without tags."""

    backend: Backend
    messages: int = 0
    sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def next_tag(self) -> int:
        self.messages += 1
        return self.messages % 2**30


class PendingTensor:
    """A tensor that is being received."""

    __slots__ = ("_channels", "_work", "_buffer", "_source")

    def __init__(self, channels: PipelineChannels, work: dist.Work, buffer: Tensor, source: int):
        self._channels, self._work, self._buffer, self._source = channels, work, buffer, source

    def wait(self) -> Tensor:
        """The tensor, once it has arrived: on gloo the host waits, on CUDA the work that is queued on the current
        stream from now on."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransferError("receiving from", self._channels.ranks[self._source], error) from error
        self._channels._receiving.discard(self)
        return self._buffer

    def drop(self) -> None:
        """Abandons the transfer."""
        self._work = None


FAILING = threading.Event()
"""Set while this process exchanges causes of a failure with the others. It is about to end with that error."""


class FailureStore:
    """The first failure of the run, as reported by the rank where it happened. The other ranks only see that their
    transfers fail, and look here for the cause."""

    def __init__(self, store: dist.Store):
        self._store = store

    def report(self, failure: str) -> str:
        """Stores `failure` unless there is one already. Returns the first failure that any rank reported."""
        try:
            return self._store.compare_set("failure", "", failure).decode()
        except RuntimeError:  # the store has gone too
            return failure

    def find_first(self, patience: float = 0.0) -> str | None:
        """The first failure that was reported, waiting for one up to `patience` seconds; else None."""
        FAILING.set()
        end = time.monotonic() + patience
        try:
            while not (found := self._store.check(["failure"])) and time.monotonic() < end:
                time.sleep(0.05)
            return self._store.get("failure").decode() if found else None
        except RuntimeError:
            return None

    def keep_for_others(self, patience: float) -> None:
        """Called last, by all ranks of the run. Keeps rank 0 alive until all others have called it, or for `patience`
        seconds: where no torchrun agent holds the store, rank 0's process does, and the cause would be gone with it."""
        end = time.monotonic() + patience
        try:
            finished = self._store.add("heard", 1)
            while dist.get_rank() == 0 and finished < dist.get_world_size() and time.monotonic() < end:
                time.sleep(0.05)
                finished = self._store.add("heard", 0)
        except RuntimeError:  # the store has gone
            pass
