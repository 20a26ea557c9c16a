"""Transfers between the ranks of one pipeline, and what they tell each other when one of them fails.

Every directed pair of ranks has a communicator of its own. NCCL runs what shares a communicator one after the other, in
the order of posting: on a shared one, a receive that waits for its sender would hold up the sends and receives behind
it, and two ranks that each wait so for the other would never go on.

The communicators are made on the store, not by `dist.new_group`: that makes one out of the default group with all its
ranks taking part (NCCL, once that group has a device), or names it by how many groups a rank has seen, which differs
along a pipeline (`use_local_synchronization`).
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
"""Sender and receiver, as ranks within the pipeline."""

_numbers = itertools.count()
"""Ranks of a pipeline build their channels together, so they number them alike."""


class PipelineError(RuntimeError):
    """A step cannot be finished, because of a failure here or on another rank of the pipeline, which the message
    names."""


class PeerError(PipelineError):
    """The failure was on another rank."""


class TransferError(RuntimeError):
    """A transfer broke, most often because the rank at its other end has gone. peer: that rank, of the whole run."""

    def __init__(self, what: str, peer: int, cause: Exception):
        super().__init__(f"{what} rank {peer}: {str(cause).splitlines()[0].partition('. ')[0]}")
        self.peer = peer


def stage_edges(placement: tuple[int, ...]) -> set[Edge]:
    """The directed pairs of ranks between which hidden states (one way) and their gradients (the other) travel."""
    neighbours = {pair for pair in itertools.pairwise(placement) if pair[0] != pair[1]}
    return neighbours | {(b, a) for a, b in neighbours}


class PipelineChannels:
    """Point-to-point transfers of one pipeline; messages of an edge arrive in the order in which they were sent.

    ranks: by pipeline rank, the rank of the whole run. store: where the ranks find each other; the default process
    group's if None. All ranks of the pipeline construct, extend and close it together."""

    def __init__(
        self,
        ranks: Iterable[int],
        edges: Iterable[Edge],
        device: torch.device,
        store: dist.Store | None = None,
        timeout: timedelta = timedelta(minutes=20),
    ):
        self.ranks, self.device, self.timeout = tuple(ranks), device, timeout
        self.rank = self.ranks.index(dist.get_rank())
        # Wide as the run: a failure in another pipeline breaks this one through data parallelism.
        self._store = dist.PrefixStore(f"pipeline/{next(_numbers)}", store or c10d_internals.default_store())
        self.failures = FailureStore(self._store)
        self._known: set[Edge] = set()
        self._links: dict[Edge, _EdgeEnd] = {}
        self._backends: list[Backend] = []
        self.members: dict[str, tuple[int, ...]] = {}
        """The ranks that each communicator connects, of the whole run, by its name."""
        self._receiving: set[PendingTensor] = set()
        self.extend(edges)

    def extend(self, edges: Iterable[Edge]) -> None:
        """Opens those of `stage_edges` that are not open yet: all ranks together, with the same edges.

        Each is opened and used once before the next, in one order that all ranks share: opening a communicator blocks
        until both its ranks do so.
        """
        for edge in sorted(set(edges) - self._known):
            self._known.add(edge)
            if self.rank in edge:
                self._links[edge] = _EdgeEnd(self.connect(edge, "pipeline"))
                if self.rank == edge[0]:
                    self.send(torch.zeros(1, device=self.device), edge[1])
                    self.flush()
                else:
                    self.recv(torch.Size([1]), torch.float32, edge[0]).wait()

    def send(self, tensor: Tensor, destination: int) -> None:
        """Starts to send `tensor` to pipeline rank `destination`; it is kept, and must not be changed, until it has
        gone."""
        link = self._links[self.rank, destination]
        tensor = tensor.detach().contiguous()
        try:
            work = link.backend.send([tensor], 1, link.next_tag())
        except RuntimeError as error:
            raise TransferError("sending to", self.ranks[destination], error) from error
        # gloo only says that a send is over when it is waited for, so there all are kept until `flush`.
        while link.sending and link.sending[0][0].is_completed():
            link.sending.popleft()
        link.sending.append((work, tensor))

    def recv(self, shape: torch.Size, dtype: torch.dtype, source: int) -> PendingTensor:
        """Starts to receive the next tensor of pipeline rank `source` into a buffer allocated now."""
        link = self._links[source, self.rank]
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        try:
            work = link.backend.recv([buffer], 0, link.next_tag())
        except RuntimeError as error:
            raise TransferError("receiving from", self.ranks[source], error) from error
        pending = PendingTensor(self, work, buffer, source)
        self._receiving.add(pending)
        return pending

    def flush(self) -> None:
        """Waits until all that was sent has gone: the host on gloo, the current stream on CUDA."""
        for (_, destination), link in self._links.items():
            while link.sending:
                try:
                    link.sending[0][0].wait()
                except RuntimeError as error:
                    raise TransferError("sending to", self.ranks[destination], error) from error
                link.sending.popleft()

    def close(self, abort: bool = False) -> None:
        """Closes all edges. `abort` does not wait for what is under way; on gloo, the ranks at the other ends then see
        their transfers break at once."""
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
        """A communicator of some ranks of the pipeline, which call this together; `what` tells it from others."""
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
    """One end of an edge. Tags count its messages: gloo then matches them in order, as NCCL, which knows no tags,
    does."""

    backend: Backend
    messages: int = 0
    sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def next_tag(self) -> int:
        self.messages += 1
        return self.messages % 2**30


class PendingTensor:
    """A tensor on its way here."""

    __slots__ = ("_channels", "_work", "_buffer", "_source")

    def __init__(self, channels: PipelineChannels, work: dist.Work, buffer: Tensor, source: int):
        self._channels, self._work, self._buffer, self._source = channels, work, buffer, source

    def wait(self) -> Tensor:
        """The tensor, once it is here (CUDA: for the work that is queued on the current stream from now on)."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransferError("receiving from", self._channels.ranks[self._source], error) from error
        self._channels._receiving.discard(self)
        return self._buffer

    def drop(self) -> None:
        """Gives up the transfer."""
        self._work = None


FAILING = threading.Event()
"""Set while this process exchanges with the others what failed; it ends by that error soon."""


class FailureStore:
    """What the first rank that failed said about it. The others only see that their transfers break, so they look
    here."""

    def __init__(self, store: dist.Store):
        self._store = store

    def report(self, failure: str) -> str:
        """Leaves `failure` for the others; the answer is the first one told, by any rank."""
        try:
            return self._store.compare_set("failure", "", failure).decode()
        except RuntimeError:  # the store has gone too
            return failure

    def find_first(self, patience: float = 0.0) -> str | None:
        """The first failure told, waiting up to `patience` seconds for one."""
        FAILING.set()
        end = time.monotonic() + patience
        try:
            while not (found := self._store.check(["failure"])) and time.monotonic() < end:
                time.sleep(0.05)
            return self._store.get("failure").decode() if found else None
        except RuntimeError:
            return None

    def keep_for_others(self, patience: float) -> None:
        """To be called last, by all ranks of the run. Rank 0, whose process holds the store where no agent of torchrun
        does, returns when all others have called this, or after `patience` seconds: what it ended with would be gone
        before they could look."""
        end = time.monotonic() + patience
        try:
            heard = self._store.add("heard", 1)
            while dist.get_rank() == 0 and heard < dist.get_world_size() and time.monotonic() < end:
                time.sleep(0.05)
                heard = self._store.add("heard", 0)
        except RuntimeError:  # the store has gone
            pass
