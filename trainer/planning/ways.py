"""How the ranks of a plan communicate, and which settings of that have no effect, for people."""

from __future__ import annotations

from trainer.config import Config
from trainer.planning.plan import Plan


def communication_table(config: Config, plan: Plan) -> list[tuple[str, str]]:
    """Rows of a table: what tensor-parallel products and shared states go by where a setting says it, and settings that
    a recipe has for more ranks than there are."""
    parallel, alone = config.parallel, plan.shard == 1
    copied = parallel.zero.transport != "collectives"
    rows = []
    if plan.tp > 1:
        rows.append(("tensor products", f"parallel.fusion={parallel.fusion}"))
    if copied and not alone:
        rows.append(("shared states", f"parallel.zero.transport={parallel.zero.transport}"))
    unused = {
        f"parallel.zero.transport={parallel.zero.transport}": copied,
        "precision.float8.gather=true": config.precision.float8.gather,
    }
    rows += [("without effect", f"{name}: no ranks share states") for name, given in unused.items() if given and alone]
    return rows


def communication_summary(config: Config, plan: Plan) -> str:
    """What is not by collectives alone, to stand behind a plan."""
    products = plan.tp > 1 and config.parallel.fusion != "off"
    states = plan.shard > 1 and config.parallel.zero.transport != "collectives"
    return f", products: {config.parallel.fusion}" * products + f", states: {config.parallel.zero.transport}" * states
