"""Why a receive must not be posted before its rank has launched what the data depend on: two GPUs and NCCL alone.

Rank 0 sends a tensor to rank 1, which sends back what it makes of it. Rank 0 posts the receive of the answer either
first ("early") or after its send ("late"), and in between does one thing that programs do for the first time in the
middle of a step. What makes the device wait for all its kernels waits for the receive too, which is a running kernel,
and so for the answer to what has not been sent.

    python bench/posted_receive.py [CASE...]

Prints a line for each case and order: that it ended, or that it hung and where. Each runs in processes of its own,
since what matters is what they do first.
"""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.cluster.ports import free_ports

PATIENCE = 20
"""Seconds in which a pair of processes has to end; to start takes most of them."""
AT_ONCE = 14


def wait_for_device() -> None:
    torch.cuda.synchronize()


def give_memory_back() -> None:
    torch.cuda.empty_cache()  # of the 2 GiB that `main` has taken and left


def take_memory() -> None:
    torch.empty(2**32, dtype=torch.uint8, device="cuda")


def pin_memory() -> None:
    torch.empty(2**28, dtype=torch.uint8, pin_memory=True)


def first_use_of_a_kernel() -> None:
    torch.special.erfcx(torch.ones(1000, device="cuda"))


def first_product() -> None:
    torch.mm(*torch.ones(2, 512, 512, device="cuda", dtype=torch.bfloat16))


def first_attention() -> None:
    query = torch.ones(1, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def first_triton_kernel() -> None:
    torch.compile(lambda x: (x.sin() + x).sum())(torch.ones(10000, device="cuda"))


CASES = {
    "nothing": lambda: None,
    "synchronize": wait_for_device,
    "cudaFree": give_memory_back,
    "cudaMalloc": take_memory,
    "cudaHostAlloc": pin_memory,
    "kernel": first_use_of_a_kernel,
    "product": first_product,
    "attention": first_attention,
    "triton": first_triton_kernel,
}


def main(rank: int, port: int, case: str, order: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    there, back = dist.new_group([0, 1]), dist.new_group([0, 1])  # one receive holds up all behind it on a communicator
    data, answer = torch.full((2, 2**20), 3.0, device="cuda")
    for group, sender in ((there, 0), (back, 1)):  # opens them
        if rank == sender:
            dist.send(data, 1 - rank, group=group)
        else:
            dist.recv(answer, sender, group=group)
    if case == "cudaFree":
        torch.empty(2**31, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    if rank == 1:
        dist.recv(answer, 0, group=there)
        dist.send(answer, 0, group=back)
    else:
        receive = dist.irecv(answer, 1, group=back) if order == "early" else None
        CASES[case]()
        dist.send(data, 1, group=there)
        (receive or dist.irecv(answer, 1, group=back)).wait()
    torch.cuda.synchronize()


def run(case: str, order: str, loading: str) -> str:
    """A line on one case and order, of two processes."""
    [port] = free_ports()
    start, environment = time.monotonic(), {**os.environ, "CUDA_MODULE_LOADING": loading}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(rank), str(port), case, order],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate()[1] for rank in ranks]
    line = f"{case:14} {order:5} {loading:5} "
    if not any(rank.returncode for rank in ranks):
        return f"{line} ended after {time.monotonic() - start:.0f} s"
    if not all("Timeout" in text for text in said):
        return f"{line} failed: {said[0][-600:]} {said[1][-600:]}"
    frames = re.findall(r'File "[^"]*?([^"/]+)", line (\d+) in (\w+)', said[0].partition("most recent call first")[2])
    mine = next((f"{name} ({file}:{number})" for file, number, name in frames if file == Path(__file__).name), "?")
    return f"{line} HUNG: rank 0 in {frames[0][2] if frames else '?'}, from {mine}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        main(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
        os._exit(0)
    wanted = [
        (case, order, loading)
        for case in sys.argv[1:] or CASES
        for order in ("early", "late")
        for loading in ("LAZY", "EAGER")
        if order == "early" or loading == "LAZY"
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for text in pool.map(lambda one: run(*one), wanted):
            print(text, flush=True)
