"""Writes the tables of the documents that the code knows: metrics, settings, schedules, models, keys of DeepSpeed.

    python docs/generate.py           rewrites the pages of docs/
    python docs/generate.py --check   names the pages that differ from the code, and ends with 1 if there are any

A page marks the place of a table with `<!-- generated: NAME [ARGUMENT] -->` and `<!-- end -->`. What stands between is
the result of the function of that name in `TABLES`. tests/docs/test_documents.py holds the pages to it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer.config import Config, ConfigError, SourceConfig, TypePolicy, typed
from trainer.config.hardware import HardwareConfig
from trainer.config.model import ModelSpec
from trainer.diagnosis.rules import Thresholds
from trainer.diagnosis.time_breakdown import AXES, TERMS
from trainer.observe.metrics import EVALUATION, METRICS, STEP
from trainer.parallel.zero.plan import OWN, DeepSpeedKey
from trainer.planning.decide import describe_measures
from trainer.planning.estimate.step import GIB, StepEstimate, estimate_step
from trainer.planning.hardware import load_hardware
from trainer.planning.layer import parameter_counts
from trainer.planning.neighbours import compose_variant
from trainer.planning.plan import Plan
from trainer.planning.resolve import check_config, resolve_layout
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.simulate import Simulation, simulate_schedule
from trainer.planning.schedules.templates import TEMPLATES, build_greedy, build_schedule
from trainer.sweep.plan import SweepConfig
from trainer.util import exit_codes as codes
from trainer.util import tables

MARKED = re.compile(r"(<!-- generated: (\w+)(?: ([\w.]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> str:
    """A Markdown table; `right` are the columns of numbers."""
    head, right = list(head), set(right)
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, rule, *map(list, rows))
    )


def metrics() -> str:
    """The keys of metrics.jsonl."""
    lines = {name: "step" if name not in EVALUATION else "both" if name in STEP else "evaluation" for name in METRICS}
    return table(
        ("key", "lines", "meaning"), ([f"`{name}`", lines[name], meaning] for name, meaning in METRICS.items())
    )


def accounts() -> str:
    """The terms of an account of a step."""
    axes = "; ".join(f"{name} ({meaning})" for name, meaning in AXES.items())
    rows = [[f"`{name}`", meaning] for name, meaning in TERMS.items()]
    return table(("term", "seconds of"), [*rows, ["`AXIS`", axes]])


def exit_codes() -> str:
    """The exit codes of all commands, with what stands below each in their file."""
    body = ast.parse(Path(codes.__file__).read_text()).body
    rows = []
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
            said = below.value.value if isinstance(below, ast.Expr) else f"{node.targets[0].id.capitalize()}."
            rows.append([str(node.value.value), said])
    return table(("code", "meaning"), rows, right=(0,))


def settings(section: str) -> str:
    """The settings of one section of the schema, `sweep` and `hardware` included."""
    schema = {"sweep": (SweepConfig(), "sweep"), "hardware": (HardwareConfig(), "hardware")}.get(section, (None, ""))
    found = [one for one in typed.list_settings(*schema) if f"{one.path}.".startswith(f"{section}.")]
    assert found, f"there is no section {section}"
    return _described(found)


PARTS = {"source": (SourceConfig, "data.sources.NAME"), "policy": (TypePolicy, "precision.types.ROLE")}
"""Dataclasses inside open mappings."""


def part(name: str) -> str:
    """The fields of what an open mapping holds."""
    schema, path = PARTS[name]
    return _described(typed.list_leaves(schema, path))


def limits() -> str:
    """The numbers of the rules of a diagnosis."""
    rows = ([f"`{one.path}`", f"{one.default:g}", one.doc] for one in typed.list_leaves(Thresholds, ""))
    return table(("limit", "from", "of what"), rows, right=(1,))


def _described(found: Iterable[typed.Setting]) -> str:
    rows = []
    for one in found:
        unit = [f"in {one.unit}"] if one.unit else []
        legal = [f"one of {', '.join(f'`{choice}`' for choice in one.choices)}"] if one.choices else []
        ranges = [f"range {interval}"] if (interval := getattr(one, "range", None)) else []
        meaning = "; ".join([one.doc.replace("*", "\\*"), *unit, *legal, *ranges])
        rows.append([f"`{one.path}`", f"`{json.dumps(one.default)}`", meaning])
    return table(("setting", "default", "meaning"), rows)


def sections() -> str:
    """Links to the sections of the reference."""
    names = list(dict.fromkeys(one.path.split(".")[0] for one in typed.list_settings()))
    return ", ".join(f"[{name}](#{name})" for name in [*names, "sweep"])


def groups() -> str:
    """Every group with its options; what an option is for is the first line of its file."""
    rows = [
        [f"`{folder.name}={path.stem}`", _purpose(path)]
        for folder in sorted(CONFIGS.iterdir())
        if folder.is_dir() and folder.name not in ("config", "hardware", "model")
        for path in sorted(folder.glob("*.yaml"))
    ]
    return table(("override", "what it sets"), rows)


def recipes() -> str:
    """The shipped recipes."""
    return table(
        ("override", "what it is"),
        ([f"`+config={path.stem}`", _purpose(path)] for path in sorted((CONFIGS / "config").glob("*.yaml"))),
    )


RECEIPTS: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt2_124m_h100x1": {"h100": (1, 8)},
    "tinyllama_1b_h100x1": {"h100": (1, 8)},
    "tinyllama_1b_h200x1": {"h200": (1, 8)},
    "llama32_3b_h100x8": {"h100": (8, 64)},
    "llama3_8b_h100x1": {"h100": (1,)},
    "llama3_8b_h100x2": {"h100": (2,)},
    "llama3_8b_h100x4": {"h100": (4,)},
    "llama3_8b_h100x8": {"h100": (8, 64)},
    "llama3_8b_h200x2": {"h200": (2,)},
    "llama3_8b_tp2_h200x2": {"h200": (2,)},
    "llama3_8b_h200x4": {"h200": (4,)},
    "llama3_8b_h200x8": {"h200": (8, 64)},
    "llama3_70b_h100x32": {"h100": (32,)},
    "llama3_70b_h100x64": {"h100": (64,)},
    "llama3_70b_h200x16": {"h200": (16,)},
    "llama3_70b_h200x32": {"h200": (32,)},
    "finetune_8b_h100x8": {"h100": (8,)},
    "finetune_8b_h200x2": {"h200": (2,)},
    "lora_8b_h100x1": {"h100": (1,)},
    "lora_70b_h100x2": {"h100": (2,)},
    "lora_70b_h100x8": {"h100": (8,)},
}
"""Recipes whose plan is for a kind of GPU, and the GPUs for which it is predicted."""

TUNED = {"8b": "llama31_8b", "70b": "llama3_70b"}
"""By size, the models by which recipes for fine-tuning are predicted, which leave it open."""

MEASURED = {
    ("llama3_8b_h200x2", "h200", 2): (
        "10,615 a GPU, [one micro-batch a step](../bench/results/2026-11-h200-h100.md#copy-engines-and-fp8); 13,844 "
        "with `precision=fp8`"
    ),
    ("llama3_8b_tp2_h200x2", "h200", 2): (
        "8,704 a GPU, [one micro-batch a step](../bench/results/2026-11-tensor-parallel-h200-h100.md#measured)"
    ),
}
"""What a page has of the same plan."""


@functools.cache
def predicted() -> dict[tuple[str, str, int], StepEstimate]:
    """Every recipe on its GPUs. Raises `ConfigError` for a plan that is not legal there."""
    found = {}
    for name, kinds in RECEIPTS.items():
        open_model = name.startswith(("finetune", "lora"))
        model = [f"model={TUNED[name.split('_')[1]]}", "model.from_hf=null"] if open_model else []
        config = compose_variant([f"+config={name}", *model], None, 1, corpus=False)
        for kind, counts in kinds.items():
            hardware = load_hardware(kind)
            for count in counts:
                node = min(count, hardware.devices)
                if problems := check_config(config, count, node):
                    raise ConfigError([f"{name} on {count} {kind}: {problem}" for problem in problems])
                found[name, kind, count] = estimate_step(
                    config, resolve_layout(config, count, config.model, node), hardware
                )
    return found


def summarise_communication(config: Config, plan: Plan) -> str:
    """What is not by collectives alone, to stand behind a plan."""
    products = plan.tp > 1 and config.parallel.tp_overlap != "off"
    states = plan.shard > 1 and config.parallel.zero.collectives == "copy_engine"
    return (
        f", products: {config.parallel.tp_overlap}" * products
        + f", states: {config.parallel.zero.collectives}" * states
    )


def receipts() -> str:
    """What the recipes for pre-training are predicted to take, and what was measured of them."""
    rows = []
    for (name, kind, count), one in predicted().items():
        batch, hardware, speed = one.layout.batch, one.hardware, one.tokens_per_second
        low, high = speed / (1 + hardware.band), speed / (1 - hardware.band)
        times = [f"{tables.format_count(speed)} ({tables.format_count(low)} to {tables.format_count(high)})"]
        times.append(tables.format_duration(one.config.run.steps * one.seconds))
        if one.layout.plan.offload:  # copies to host memory and the update there are not in the time
            times = ["not predicted"] * 2
        rows.append(
            [
                f"`+config={name}`",
                f"{count} {kind.upper()}",
                one.layout.plan.describe() + summarise_communication(one.config, one.layout.plan),
                f"{batch.micro_size} x {batch.accumulation}",
                "; ".join(filter(None, [one.config.activation.mode, describe_measures(one.config, one.fullest)])),
                f"{one.memory / GIB:.0f} of {hardware.memory:.0f} GiB",
                *times,
                MEASURED.get((name, kind, count), "-"),
            ]
        )
    head = (
        "recipe",
        "GPUs",
        "plan",
        "micro-batch x number",
        "recompute",
        "memory",
        "tokens/s",
        "whole run",
        "measured",
    )
    return table(head, rows, right=(1, 5, 6, 7))


def _purpose(path: Path) -> str:
    """The comment at the head of a YAML file; its settings where it has none."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    comment = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    return " ".join(comment) or "; ".join(f"`{line}`" for line in lines if line)


def models() -> str:
    """The shipped models."""
    specs = {path.stem: _spec(path) for path in sorted((CONFIGS / "model").glob("*.yaml"))}
    rows = [
        [f"`model={name}`", spec.family, _count(parameter_counts(spec)["total"]), str(spec.depth), str(spec.width)]
        for name, spec in specs.items()
    ]
    return table(("override", "family", "parameters", "layers", "width"), rows, right=(2, 3, 4))


def code_types() -> str:
    """The types that run by transformers' own code."""
    from trainer.hf.accepted import ACCEPTED

    groups: dict[tuple[str, ...], list[str]] = {}
    for name, facts in ACCEPTED.items():
        key = tuple("yes" if proven else "no" for proven in (facts.tp, facts.pp, facts.packed))
        groups.setdefault(key, []).append(f"`{name}`")
    rows = ([", ".join(sorted(names)), str(len(names)), *key] for key, names in groups.items())
    return table(("types", "number", "tensor parallelism", "pipelines", "packed documents"), rows, right=(1,))


def hardware() -> str:
    """The shipped files of hardware."""
    rows = []
    for path in sorted((CONFIGS / "hardware").glob("*.yaml")):
        one = load_hardware(path.stem)
        speeds = [one.memory, one.bandwidth, one.devices, one.node.bandwidth, one.network.bandwidth]
        rows.append([f"`hardware={path.stem}`", one.device, *(f"{speed:g}" for speed in speeds), f"{one.band:.0%}"])
    head = ("file", "device", "GiB", "memory GB/s", "a node", "node GB/s", "network GB/s", "band")
    return table(head, rows, right=range(2, 8))


def _spec(path: Path) -> ModelSpec:
    """A model's YAML over those that it names as its defaults, without Hydra, which takes seconds for all of them."""

    def composed(path: Path) -> dict[str, Any]:
        values = yaml.safe_load(path.read_text())
        order = values.pop("defaults", ["_self_"])
        parts = [values if part == "_self_" else composed(path.with_stem(part)) for part in order]
        return OmegaConf.to_container(OmegaConf.merge(*parts))

    return ModelSpec.from_dict(composed(path))


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


SCHEDULES = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "the default: backwards as soon as they can run",
    "interleaved": "`parallel.pipeline.chunks` stages on each rank; more transfers",
    "zb_h1": "weight gradients fill the gaps",
    "zb_h2": "no gap between a rank's first and last action, for more memory",
    "zb_v": "embedding and head on one rank",
    "v_half": "less memory, more bubble",
    "v_min": "least memory",
    "dualpipe_v": "passes overlap with `parallel.ep_dispatch=alltoall_overlap`",
    "greedy": "planned for the costs of these layers, within `parallel.pipeline.memory_cap`",
}


def schedules() -> str:
    """Every schedule, simulated on 4 ranks where F, I and W of a micro-batch take equally long."""
    assert set(SCHEDULES) == {*TEMPLATES, "greedy"}, "docs/generate.py describes each schedule"
    rows = []
    for name, words in SCHEDULES.items():
        chunks = TEMPLATES[name].chunks if name in TEMPLATES else None
        found = [_simulated(name, chunks[0] if chunks else 2 if name in TEMPLATES else 1, count) for count in (8, 16)]
        stages = ", ".join(map(str, chunks)) if chunks else "2 or more" if name in TEMPLATES else "`chunks`, 1"
        memory = (
            ", ".join(dict.fromkeys(f"{max(one.memory):g}" for one in found)) if name in TEMPLATES else "`memory_cap`"
        )
        rows.append([f"`{name}`", stages, *(f"{one.bubble:.1%}" for one in found), memory, words])
    return table(
        ("schedule", "stages a rank", "bubble, 8 micro-batches", "16", "activations", ""), rows, right=(1, 2, 3, 4)
    )


def _simulated(name: str, chunks: int, microbatches: int, ranks: int = 4) -> Simulation:
    """A step whose activations count in micro-batches of a rank's share of the model."""
    costs = StageCosts.uniform(
        ranks * chunks, f=1 / chunks, i=1 / chunks, w=1 / chunks, activation=1 / chunks, kept=1.0
    )
    if name == "greedy":
        schedule = build_greedy(costs, tuple(range(ranks)), microbatches, cap=ranks)
    else:
        schedule = build_schedule(name, ranks, microbatches, chunks)
    return simulate_schedule(schedule, costs)


def deepspeed() -> str:
    """The keys that `parallel.zero.deepspeed` takes."""
    keys = sorted(_keys(OWN, ""), key=lambda row: row[1])
    groups = itertools.groupby(keys, key=lambda row: row[1])
    return table(("needs", "keys"), ([needs, ", ".join(key for key, _ in rows)] for needs, rows in groups))


def _keys(key: DeepSpeedKey, path: str) -> Iterator[list[str]]:
    for name, inner in key.value.items():
        inner_path = f"{path}.{name}" if path else name
        if isinstance(inner.value, dict):
            yield from (
                [cell, "; ".join(filter(None, [*(f"`{need}`" for need in inner.needs), needs]))]
                for cell, needs in _keys(inner, inner_path)
            )
        else:
            yield [f"`{inner_path}`", "; ".join(f"`{need}`" for need in inner.needs)]


def example(name: str) -> str:
    """A module of examples/, whole."""
    return f"`examples/{name}.py`:\n\n```python\n{(ROOT / 'examples' / f'{name}.py').read_text()}```"


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        metrics,
        accounts,
        exit_codes,
        settings,
        limits,
        part,
        sections,
        groups,
        recipes,
        receipts,
        models,
        code_types,
        hardware,
        schedules,
        deepspeed,
        example,
    )
}


def rendered(text: str) -> str:
    """A page with its tables as the code has them now."""

    def replace(match: re.Match[str]) -> str:
        head, name, argument, end = match.groups()
        return f"{head}{TABLES[name](*([argument] if argument else []))}\n{end}"

    return MARKED.sub(replace, text)


def pages() -> list[Path]:
    """The pages that have generated tables."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if MARKED.search(path.read_text())]


def main(arguments: list[str]) -> int:
    changed = [path for path in pages() if rendered(path.read_text()) != path.read_text()]
    for path in changed:
        print(path.relative_to(ROOT))
        if "--check" not in arguments:
            path.write_text(rendered(path.read_text()))
    return int("--check" in arguments and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
