"""A loss term that keeps the model from being too sure (the confidence penalty of Pereyra et al., arXiv 1701.06548):

    trainer train +config=debug imports=[examples.confidence] loss.terms.confidence.weight=0.1

Its mean stands in metrics.jsonl as `term/confidence`.
"""

from dataclasses import dataclass

from trainer import option, register


@dataclass
class Settings:
    weight: float = option(0.1, "factor of the negative entropy of each token's prediction", range="[0, inf)")


@register.loss_term("confidence", Settings)
def confidence(settings, scores, targets):
    logs = scores.log_softmax(-1)
    return settings.weight * (logs.exp() * logs).sum(-1)
