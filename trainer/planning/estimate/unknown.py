"""What a prediction depends on and does not know, and configurations at both ends of it."""

from __future__ import annotations

from trainer.config import Config
from trainer.planning.documents import USUAL, Documents, are_unknown, with_documents
from trainer.planning.estimate.coding import candidates
from trainer.planning.gradient_comm import auto_hops
from trainer.planning.plan import Plan

SHORTEST = 128.0
"""Tokens of documents at the lower end."""


def assumptions(config: Config, plan: Plan, node: int) -> list[str]:
    """What is taken where something is not known, in sentences."""
    found = []
    if are_unknown(config.data):
        found.append(
            f"how long documents are, which are masked: {USUAL.mean:,.0f} tokens are taken in the mean, and the band "
            f"goes from {SHORTEST:.0f} to one document a sequence; set data.documents.mean"
        )
    if hops := auto_hops(config.parallel.grad_comm, plan, node):
        names = " and ".join(f"parallel.grad_comm.{hop}.codec" for hop in hops)
        found.append(f"what {names}=auto measures: its rule is applied to predicted steps; the band has what is near")
    return found


def ends(config: Config, plan: Plan, node: int) -> list[list[Config]]:
    """Configurations between whose steps the step lies, as far as it is not known; none where all is. Of each list it
    is one that codec=auto takes."""
    settings = [config]
    if are_unknown(config.data):
        length = float(config.batch.sequence_length)
        lengths = (min(SHORTEST, length), length)
        settings = [with_documents(config, Documents(one, one)) for one in lengths]
    found = [candidates(one, plan, node) for one in settings]
    return found if len(found) > 1 or len(found[0]) > 1 else []
