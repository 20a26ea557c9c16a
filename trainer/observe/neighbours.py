"""Notices within a second that the process of another rank has ended, whatever this rank waits for.

A rank that waits for its GPU does not learn from NCCL that another rank is gone, and handles no signal: torchrun ends
it by SIGKILL, 30 seconds later. The kernel, however, closes the TCP connections of a process that ends for any reason.
Each rank therefore holds one to the next rank, and a thread that waits for it to close."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

import torch.distributed as dist

from trainer.util.reading import find_mismatch, parse_json

CONNECT = 10.0
"""Seconds that a connection to an address of the next rank may take."""

GOODBYE = b"end\n"
"""The last line of a rank that ends in order. Any other line is the number of a rank that has not."""


class NeighbourWatch:
    """Connections of this rank to the ranks before and after it, in a ring over all ranks.

    When a neighbour's connection closes without a goodbye, or a neighbour says that of another rank, `lost` is called
    once, with the number of that rank, in the thread of the watch; the other neighbour is told before. Where no
    connection can be made, as between networks that refuse it, nothing is noticed."""

    def __init__(self, store: dist.Store, rank: int, size: int, lost: Callable[[int], None]):
        self.store, self.rank, self.size, self.lost = store, rank, size, lost
        self.token = secrets.token_hex(16)
        self.connections: dict[socket.socket, int] = {}  # and the rank at the other end
        self.lock, self.closed, self.orderly = threading.Lock(), False, False
        self.waking, self.wake = socket.socketpair()
        threading.Thread(target=self._run, name="neighbours", daemon=True).start()

    def close(self, orderly: bool) -> None:
        """Ends the watch. orderly: the neighbours are told that this rank ends; otherwise they find it lost."""
        with self.lock:
            self.closed, self.orderly = True, orderly
            for connection in self.connections:
                self._part(connection)
        self.wake.close()

    def _part(self, connection: socket.socket) -> None:
        """Closes a connection, after a goodbye if this rank ends in order."""
        if self.orderly:
            with contextlib.suppress(OSError):
                connection.sendall(GOODBYE)
        connection.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, ValueError), socket.create_server(("", 0)) as server:
            self._meet(server)
            self._listen()

    def _meet(self, server: socket.socket) -> None:
        """Connects to the next rank, and waits for the one before."""
        mine = {"hosts": own_addresses(), "port": server.getsockname()[1], "token": self.token}
        self.store.set(f"address/{self.rank}", json.dumps(mine))
        following = (self.rank + 1) % self.size
        address = parse_json(self.store.get(f"address/{following}"))
        if find_mismatch(address, {"hosts": [str], "port": int, "token": str}):
            raise ValueError("another program writes to the store of this run")
        for host in address["hosts"]:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, address["port"]), CONNECT)
                connection.sendall(address["token"].encode())
                self._add(connection, following)
                break
        server.settimeout(CONNECT)
        with contextlib.suppress(OSError):
            while True:  # the token tells the rank before from other programs that connect to the port
                connection, _ = server.accept()
                connection.settimeout(CONNECT)
                with contextlib.suppress(OSError):
                    if connection.recv(len(self.token), socket.MSG_WAITALL) == self.token.encode():
                        return self._add(connection, (self.rank - 1) % self.size)
                connection.close()

    def _add(self, connection: socket.socket, rank: int) -> None:
        connection.settimeout(None)
        with self.lock:
            if self.closed:
                self._part(connection)
            else:
                self.connections[connection] = rank

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.waking, selectors.EVENT_READ)
            for connection in self.connections:
                selector.register(connection, selectors.EVENT_READ)
            while not self.closed:
                for key, _ in selector.select():
                    if key.fileobj is self.waking:
                        return
                    if (lost := self._hear(key.fileobj)) is not None:
                        self._tell(lost, key.fileobj)
                        return self.lost(lost)
                    if key.fileobj not in self.connections:
                        selector.unregister(key.fileobj)

    def _hear(self, connection: socket.socket) -> int | None:
        """The rank that is lost, by what a neighbour says or by its silence; None after a goodbye."""
        try:
            said = connection.recv(64)
        except OSError:
            said = b""
        with self.lock:
            rank = self.connections.pop(connection, None)
        if self.closed or rank is None or said.startswith(GOODBYE):
            return None
        number = said.partition(b"\n")[0]
        return int(number) if number.isdigit() else rank

    def _tell(self, lost: int, heard: socket.socket) -> None:
        with self.lock:
            for connection in self.connections:
                if connection is not heard:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % lost)


def own_addresses() -> list[str]:
    """Addresses by which other ranks may reach this machine: that of its route to the master, then its name."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        found.append(probe.getsockname()[0])
    return [*found, socket.gethostname()]
