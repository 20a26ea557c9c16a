"""A metric, `user/weight_norm` in metrics.jsonl: the L2 norm of the weights, or of those whose names match:

trainer train +config=debug imports=[examples.weight_norm] logging.metrics.weight_norm.names='*.attention.*'
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainer import option, register


@dataclass
class Settings:
    names: str = option("*", "parameters that count, as a shell pattern on their global names")


@register.metric("weight_norm", "L2 norm of the fp32 weights", Settings)
def weight_norm(settings, run):
    parts = (part for name, part in run.parameters.items() if fnmatchcase(name, settings.names))
    return run.sum(sum((part.double().square().sum() for part in parts), start=0.0)).sqrt()
