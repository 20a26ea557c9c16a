"""Memory of tensors, on any device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of the tensors that are made meanwhile and still live, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.gone, storage._cdata)
        return result

    def gone(self, key: int) -> None:
        self.bytes -= self.known.pop(key, 0)
