"""Step time over a slow network, by codec of the gradients, beside what was expected. Started on two hosts by
slow_network.sh.

Every case is first trained without a limit on the link: its step then takes as long as computing, quantising and
copying do, and the link's counter says how many bytes cross it. At a limited rate a step is expected to take longer by

    bytes a step x (1 / rate - 1 / rate without a limit)

where rates are those of a measured transfer. (No overlap: on CPUs gradients are reduced while backward waits.) The
expectation is printed before anything is measured at a limited rate. Prints a table and writes a JSON line for each
case and rate.

Cases: gradients of replicas over the outer hop (`none` to `int4`; the plan is data parallelism with one process a host,
HSDP with ZeRO-3 within the hosts with several), and ZeRO-1 over both hosts, whose parameters cross the link as well, in
full. (And gloo's reduce-scatter of what is not quantised is an all-reduce.) The model has 11.5 million parameters in a
few large layers, and a step few tokens: the network is most of it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer

INTERFACE = os.environ["GLOO_SOCKET_IFNAME"]
BURST = 1e-4
"""Seconds of the rate that may pass at full speed after a pause: little beside a layer's message, as each follows a
pause."""
SMALLEST_BURST = 32 << 10
"""Bytes. Less, and the link waits for its timer."""
QUEUE = 16 << 20
"""Bytes that may wait: more than the sockets hold, so that nothing is dropped."""
WARM_UP = 2
"""Steps that are not counted: the first ones allocate."""
CODECS = ("int8", "int4")


def cases(processes: int) -> dict[str, tuple[str, list[str]]]:
    """Name -> (the case that it is a ratio of, overrides), for so many processes on a host."""
    replicas = ["parallel=ddp"] if processes == 1 else ["parallel=hsdp", f"parallel.shard={processes}"]
    table = {"none": ("none", replicas)}
    table |= {codec: ("none", [*replicas, f"parallel.grad_comm.outer.codec={codec}"]) for codec in CODECS}
    sharded = ["parallel=zero1"]
    table["zero1"] = "zero1", sharded
    table["zero1-int8"] = "zero1", [*sharded, "parallel.grad_comm.outer.codec=int8"]
    if processes > 1:
        table["zero1-int8-int4"] = (
            "zero1",
            [*sharded, "parallel.grad_comm.inner.codec=int8", "parallel.grad_comm.outer.codec=int4"],
        )
    return table


def limit(gbit: float | None) -> None:
    """Limits what this host sends; without a rate, not at all. One process of each host does it."""
    if int(os.environ["LOCAL_RANK"]) == 0:
        subprocess.run(["tc", "qdisc", "del", "dev", INTERFACE, "root"], stderr=subprocess.DEVNULL)
        if gbit is not None:
            subprocess.run(
                [
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    INTERFACE,
                    "root",
                    "tbf",
                    "rate",
                    f"{int(gbit * 1e9)}bit",
                    "burst",
                    f"{max(int(BURST * gbit * 1e9 / 8), SMALLEST_BURST)}b",
                    "limit",
                    f"{QUEUE}b",
                ],
                check=True,
            )
    dist.barrier()


def transfer(gbit: float | None) -> float:
    """Gbit/s at which the first processes of the hosts send to each other, both at once: the best of several times."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    here, there = dist.get_rank(), (dist.get_rank() + local) % (2 * local)
    message = torch.zeros(int(min(gbit or 4, 4) * 8e6), dtype=torch.uint8)
    times = []
    for _ in range(6):
        dist.barrier()
        begun = time.perf_counter()
        if here % local == 0:
            for work in (dist.isend(message, there), dist.irecv(torch.empty_like(message), there)):
                work.wait()
        times.append(time.perf_counter() - begun)
    seconds = torch.tensor(times)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return 8e-9 * message.numel() / float(seconds.min())


def sent() -> int:
    """Bytes that this host has sent over the link."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def measure(folder: Path, name: str, gbit: float | None, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Trains a case, and says how long a step takes and what it sends."""
    config = trainer.compose(
        [
            "+config=debug",
            "model=demo",
            "model.width=512",
            "model.depth=3",
            "model.feed_forward.width=1536",
            "lr.peak=1e-4",
            "data.sources.stdlib.limit=40",
            f"batch.global_size={dist.get_world_size()}",
            *overrides,
            f"data.cache={folder}/cache",
            f"run.dir={folder}/{name}-{gbit}",
            "run.device=cpu",
            f"run.steps={WARM_UP + steps}",
            "logging=quiet",
            "logging.every=1",
            "checkpoint=never",
        ]
    )
    dist.barrier()
    before = sent()
    result = trainer.run(config)
    dist.barrier()
    wire = torch.tensor((sent() - before) / config.run.steps)
    dist.all_reduce(wire, dist.ReduceOp.MAX)
    lines = result.metrics
    return {
        "seconds": statistics.median(line["step_seconds"] for line in lines[WARM_UP:]),
        "wire_bytes": int(wire),
        **{name: lines[-1].get(f"comm/{name}") for name in ("bytes_inner", "bytes_outer")},
        "loss": lines[-1]["loss"],
    }


def expect(free: dict[str, dict[str, Any]], name: str, rate: float, unlimited: float) -> float:
    """Seconds that a step should take at a measured rate [Gbit/s], from those without a limit."""
    return free[name]["seconds"] + 8e-9 * free[name]["wire_bytes"] * max(1 / rate - 1 / unlimited, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 10], help="Gbit/s")
    parser.add_argument("--cases", nargs="+", help="all, if none are named")
    parser.add_argument("--steps", type=int, default=10, help="that are timed, after some that are not")
    arguments, overrides = parser.parse_known_args()
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    table = cases(processes)
    wanted = set(arguments.cases or table)
    if unknown := wanted - set(table):
        parser.error(f"--cases {' '.join(sorted(unknown))}: there are {' '.join(table)}")
    wanted |= {table[name][0] for name in wanted}
    table = {name: case for name, case in table.items() if name in wanted}
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    first = dist.get_rank() == 0

    def tell(text: str) -> None:
        if first:
            print(text, flush=True)

    def run(name: str, gbit: float | None) -> dict[str, Any]:
        return measure(arguments.folder, name, gbit, arguments.steps, [*table[name][1], *overrides])

    limit(None)
    unlimited, free = transfer(None), {}
    measure(
        arguments.folder, "none", 0, 1, [*table["none" if "none" in table else "zero1"][1], *overrides]
    )  # prepares the corpus
    tell(
        f"2 hosts of {processes} processes; link without a limit: {unlimited:.3g} Gbit/s measured\n\n"
        f"{'case':<16}{'step':>9}{'over the link':>17}  (without a limit)"
    )
    for name in table:
        free[name] = run(name, None)
        tell(f"{name:<16}{free[name]['seconds']:>7.3f} s{free[name]['wire_bytes'] / 1e6:>9.2f} MB/step")
    measured = {}
    for gbit in arguments.rates:
        limit(gbit)
        measured[gbit] = transfer(gbit)
    expected = {
        (gbit, name): expect(free, name, measured[gbit], unlimited) for gbit in arguments.rates for name in table
    }
    expected_ratio = {
        (gbit, name): seconds / expected[gbit, table[name][0]] for (gbit, name), seconds in expected.items()
    }
    heads = "".join(f"{f'{gbit:g} ({measured[gbit]:.3g}) Gbit/s':>24}" for gbit in arguments.rates)
    tell(f"\n{'expected':<16}{heads}  nominal (measured); step, ratio")
    for name in table:
        tell(
            f"{name:<16}"
            + "".join(f"{expected[gbit, name]:>16.3f} s{expected_ratio[gbit, name]:>6.2f}" for gbit in arguments.rates)
        )

    tell(f"\n{'Gbit/s':<9}{'case':<16}{'step':>9}{'expected':>10}{'ratio':>7}{'expected':>10}{'bytes_outer':>13}")
    rows = [{"rate_gbit": None, "measured_gbit": unlimited, "case": name, **free[name]} for name in table]
    for gbit in arguments.rates:
        limit(gbit)
        taken: dict[str, float] = {}
        for name in table:
            row = run(name, gbit)
            taken[name] = row["seconds"]
            row["ratio"] = taken[name] / taken[table[name][0]]
            row |= {"expected_seconds": expected[gbit, name], "expected_ratio": expected_ratio[gbit, name]}
            rows.append({"rate_gbit": gbit, "measured_gbit": measured[gbit], "case": name, **row})
            tell(
                f"{gbit:<9g}{name:<16}{row['seconds']:>7.3f} s{expected[gbit, name]:>8.3f} "
                f"s{row['ratio']:>7.2f}{expected_ratio[gbit, name]:>10.2f}{row['bytes_outer'] or '':>13}"
            )
    if first:
        with arguments.out.open("a") as file:
            file.writelines(json.dumps({"processes": processes, **row}) + "\n" for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
