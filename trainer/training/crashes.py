"""What a process that crashes leaves to torchrun."""

from __future__ import annotations

import json
import os
import time
import traceback

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from trainer.util.reading import write_atomic


class WholeErrorFile(ErrorHandler):
    """Writes torchrun's error file whole or not at all. A rank may be killed while it writes, because another rank has
    died. torchrun would crash on the part that is there, and restart nothing."""

    def record_exception(self, e: BaseException) -> None:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # As torch's own: PyTorch documentation, torch.distributed.elastic, Error Propagation.
            more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            message = {"message": f"{type(e).__name__}: {e}", "extraInfo": more}
            write_atomic(path, json.dumps({"message": message}))
