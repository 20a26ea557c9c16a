"""An optimizer, AdaMax (Kingma and Ba, arXiv 1412.6980), with decoupled weight decay:

trainer train +config=debug imports=[examples.adamax] optimizer.name=adamax optimizer.settings.adamax.beta2=0.99
"""

from dataclasses import dataclass

from trainer import option, register


@dataclass
class Settings:
    beta1: float = option(0.9, "decay of the first moment", range="[0, 1)")
    beta2: float = option(0.999, "decay of the largest gradient", range="[0, 1)")
    eps: float = option(1e-8, "added to the largest gradient", range="(0, inf)")


@register.optimizer("adamax", Settings, moments=("exp_avg", "exp_inf"), elementwise=True)
def adamax(settings, update):
    mean = update.moments["exp_avg"].lerp(update.gradient, 1 - settings.beta1)
    largest = (update.moments["exp_inf"] * settings.beta2).maximum(update.gradient.abs() + settings.eps)
    rate = update.rate / (1 - settings.beta1**update.number)
    weight = update.weight * (1 - update.rate * update.weight_decay) - rate * mean / largest
    return weight, {"exp_avg": mean, "exp_inf": largest}
