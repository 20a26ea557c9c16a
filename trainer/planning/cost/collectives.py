"""Which collectives a plan's data-parallel ranks run for the states of a unit (a layer; or embedding, final norm and
head together), and how many bytes they move. Those of tensor-parallel ranks: `planning/estimate/overlap.py`."""

from __future__ import annotations

from typing import NamedTuple

from trainer.planning.plan import Plan


class StateCollective(NamedTuple):
    """Collectives of one kind: how many in each micro-batch and once a step, and bytes of the whole tensor of each."""

    each: int
    once: int
    size: float

    def calls(self, microbatches: int) -> int:
        """In a step."""
        return self.each * microbatches + self.once


def of_states(
    plan: Plan, gathered: float, reduced: float, outer: bool, once: bool = False
) -> dict[str, StateCollective]:
    """By kind: `gather` and `scatter` among the ranks that share states, `reduce`, an all-reduce, among replicas.

    gathered, reduced: bytes of a unit's parameters, and of its gradients, as they travel. outer: whether it is that of
    embedding and head, which ZeRO-3 keeps gathered between the passes of a micro-batch. once: whether gradients are
    reduced once a step whatever the ZeRO stage."""
    every, again = plan.stage >= 2 and not once, plan.stage == 3
    return {
        "gather": StateCollective(again * (1 if outer else 2), plan.stage in (1, 2), gathered),
        "scatter": StateCollective(every, plan.stage >= 1 and not every, reduced),
        "reduce": StateCollective(0, plan.replicate > 1, reduced / plan.shard),
    }
