"""A learning-rate schedule that falls with the root of the number of updates (Vaswani et al., arXiv 1706.03762):

trainer train +config=debug run.steps=50 imports=[examples.inverse_root] lr.schedule=inverse_root lr.final=0
"""

from dataclasses import dataclass

from trainer import option, register


@dataclass
class Settings:
    power: float = option(0.5, "the rate falls as the number of updates to minus this", range="(0, inf)")


@register.schedule("inverse_root", Settings)
def inverse_root(settings, progress):
    start = max(progress.warmup, 1)
    return (start / progress.update.clamp(min=start)) ** settings.power
