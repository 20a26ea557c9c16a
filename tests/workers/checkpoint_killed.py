"""Two ranks: completes the checkpoint of step 1, then dies by SIGKILL in the middle of writing that of step 2."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.manifest import HashingFile
from trainer.config import CheckpointConfig


def main():
    dist.init_process_group("gloo")
    checkpointer = Checkpointer(Path(sys.argv[1]), CheckpointConfig())
    tensors = {f"layers.{i}": torch.full((100, 100), float(i)) for i in range(6)}
    checkpointer.save(1, tensors, {"tokens": 10}, wait=True)
    write = HashingFile.write

    def write_and_die(file, data):
        write(file, data)
        if file.size > 50_000:
            os.kill(os.getpid(), signal.SIGKILL)

    HashingFile.write = write_and_die
    checkpointer.save(2, tensors, {"tokens": 20})
    time.sleep(60)


if __name__ == "__main__":
    main()
