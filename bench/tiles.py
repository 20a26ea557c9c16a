"""The product alone of the kernels that multiply while ranks send (`kernels/tensor_parallel.py`), on one GPU: beside
cuBLAS and the roofline, by how it is cut.

    python bench/tiles.py OUT.jsonl [only=8B,70B] [tokens=8192] [ways=before,now,square]

A world of one rank: nothing is sent or waited for. Shapes are those of a layer of Llama-3 8B and 70B on two ranks,
forward; `o` and `down` are what sends, qkv and gate_up what gathers. A line for each shape: milliseconds of each way
(medians, the device's cache flushed, bf16, random numbers), the error beside torch in fp32, and the share of the places
in all waves that the result fills. Then a table: TFLOP/s, that over cuBLAS's, and the share of the roofline, the lower
one of the device's peak and of a copy's rate times products for each byte that is read or written once.

before   128 x 256; 16 multiprocessors are left alone, by what sends as well
now      the cut that `kernels/tiles.py` takes; what sends has the whole device
square   the same by tiles of 128 x 128, four loads ahead

Triton's compilations go before, several at once. On CPUs it runs to be tried, in Triton's interpreter:
TRITON_INTERPRET=1 python bench/tiles.py OUT.jsonl scale=64 tokens=128 repeats=1
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import torch
from elapsed import elapsed
from fusion import LAYERS
from torch import Tensor

from trainer.kernels.exchange import Region
from trainer.kernels.tensor_parallel import gather_matmul, matmul_scatter
from trainer.kernels.tiles import Shape, cut
from trainer.planning.cost.devices import peak_flops

RANKS, RESERVED, AT_ONCE = 2, 16, 8
WAYS = ("before", "now", "square")


class Case(NamedTuple):
    """tokens of all ranks; outputs and inputs of one rank's matrix."""

    name: str
    sends: bool
    tokens: int
    outputs: int
    inputs: int

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.outputs * self.inputs


def cases(models: list[str], tokens: int, scale: int) -> Iterator[Case]:
    for model in models:
        width, qkv, gate_up, down = (size // scale for size in LAYERS[model])
        yield Case(f"{model} qkv", False, tokens, qkv // RANKS, width)
        yield Case(f"{model} gate_up", False, tokens, gate_up // RANKS, width)
        yield Case(f"{model} o", True, tokens, width, width // RANKS)
        yield Case(f"{model} down", True, tokens, width, down // RANKS)


def shape_of(way: str, case: Case, device: torch.device) -> Shape:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 24
    before = Shape(step=64 if device.type == "cuda" else 32, programs=processors - RESERVED, copiers=RESERVED)
    if way == "before":
        return replace(before, copiers=RESERVED * (not case.sends))
    now = cut(before, case.tokens // RANKS, [case.outputs], RANKS, not case.sends)
    return replace(now, rows=128, columns=128, stages=4) if way == "square" else now


class Work:
    """The operands of a case, and its product by each way."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(1)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter has no bf16
        self.x, self.weight = (
            torch.randn(*shape, generator=generator, device=device).to(dtype)
            for shape in ((case.tokens, case.inputs), (case.outputs, case.inputs))
        )
        self.box = self.x.new_empty(2, case.tokens, case.outputs)
        self.flags = torch.zeros(2**17, dtype=torch.int32, device=device)
        self.tables = [torch.tensor([one.data_ptr()], device=device) for one in (self.box, self.flags)]
        self.region = Region(
            *(0, 1, *(table.data_ptr() for table in self.tables), max(self.box[0].numel(), self.x.numel())),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(4, dtype=torch.int32, device=device),
        )

    def torchs(self) -> Tensor:
        return self.x @ self.weight.t()

    def by(self, way: str) -> Tensor:
        shape = shape_of(way, self.case, self.device)
        if not self.case.sends:
            return gather_matmul(self.region, shape, 2, self.x, [self.weight], True, False)[0]
        matmul_scatter(self.region, shape, 2, [self.x], [self.weight], True)
        return self.box[0]


def warm(case: Case, way: str) -> str:
    """Compiles into Triton's cache on disk; an error's words."""
    try:
        Work(case, torch.device("cuda")).by(way)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    flush = torch.empty(256 << 20 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    times = []
    for _ in range(repeats + 5 * (device.type == "cuda")):
        flush.zero_()
        times.append(elapsed(work, device.type == "cuda"))
    return statistics.median(times[-repeats:])


def roofline(case: Case, device: torch.device, bandwidth: float) -> float:
    """TFLOP/s that the device could do of this product. bandwidth: bytes/s of a copy, read and written."""
    moved = 2 * (case.tokens * (case.inputs + case.outputs) + case.outputs * case.inputs)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "NVIDIA H200"
    return min(peak_flops(name, "bf16") or float("inf"), bandwidth * case.flops / moved) / 1e12


def copy_rate(device: torch.device) -> float:
    source = torch.randint(0, 256, (2**30 if device.type == "cuda" else 2**24,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / milliseconds(lambda: target.copy_(source), device, 10) * 1e3


def measure(case: Case, ways: list[str], failed: dict, device: torch.device, repeats: int, bandwidth: float) -> dict:
    work, result = Work(case, device), {"case": case.name, "milliseconds": {}, "errors": {}, "filled": {}}
    expected = work.x.float() @ work.weight.float().t()
    result["milliseconds"]["cuBLAS"] = milliseconds(work.torchs, device, repeats)
    for way in ways:
        if failed.get((case, way)):
            result["errors"][way] = failed[case, way]
            continue
        work.box.fill_(float("nan"))
        result["errors"][way] = ((work.by(way).float() - expected).norm() / expected.norm()).item()
        result["milliseconds"][way] = milliseconds(lambda way=way: work.by(way), device, repeats)
        shape = shape_of(way, case, device)
        result["filled"][way] = shape.filled(case.tokens // RANKS, [case.outputs], RANKS, not case.sends)
    return result | {"roofline": roofline(case, device, bandwidth), "flops": case.flops}


def told(result: dict) -> str:
    own = {way: result["flops"] / 1e9 / taken for way, taken in result["milliseconds"].items()}
    parts = [
        f"{way} {rate:.0f} ({rate / own['cuBLAS']:.2f}, {rate / result['roofline']:.2f})" for way, rate in own.items()
    ]
    wrong = [f"{way}: {error}" for way, error in result["errors"].items() if isinstance(error, str) or not error < 1e-2]
    return f"{result['case']:12} " + "  ".join(parts) + "".join(f"\n    WRONG {one}" for one in wrong)


def main(out: str, *chosen: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"only": "8B,70B", "tokens": "8192", "scale": "1", "repeats": "30"}
    settings["ways"] = ",".join(WAYS)
    settings |= dict(one.split("=", 1) for one in chosen)
    ways, repeats = settings["ways"].split(","), int(settings["repeats"])
    shapes = list(cases(settings["only"].split(","), int(settings["tokens"]), int(settings["scale"])))
    jobs, failed = [(case, way) for case in shapes for way in ways], {}
    if device.type == "cuda":
        with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("spawn")) as pool:
            failed = dict(zip(jobs, pool.map(warm, *zip(*jobs))))
    results, bandwidth = [], copy_rate(device)
    for case in shapes:
        results.append(measure(case, ways, failed, device, repeats, bandwidth))
        with open(out, "a") as file:
            print(json.dumps(results[-1]), file=file)
    print("TFLOP/s (of cuBLAS, of the roofline)")
    print("\n".join(map(told, results)))


if __name__ == "__main__":
    main(*sys.argv[1:])
