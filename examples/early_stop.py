"""A callback that ends a run when the evaluation loss no longer falls:

trainer train +config=debug run.steps=40 eval.every=5 imports=[examples.early_stop] callbacks.early_stop.patience=2
"""

import math
from dataclasses import dataclass

from trainer import option, register


@dataclass
class Settings:
    patience: int = option(3, "evaluations in a row without a lower loss", unit="evaluations", range="[1, inf)")
    least: float = option(0.0, "by how much a loss has to be lower to count", unit="nats", range="[0, inf)")


@register.callback("early_stop", Settings)
class EarlyStop:
    def __init__(self, settings):
        self.settings, self.best, self.without = settings, math.inf, 0

    def evaluation(self, run):
        loss = run.metrics["eval_loss"]
        better = loss < self.best - self.settings.least
        self.best, self.without = (loss, 0) if better else (self.best, self.without + 1)
        if self.without >= self.settings.patience:
            run.say(f"no lower evaluation loss than {self.best:.4f} in {self.without} evaluations")
            run.finish()

    def state_dict(self):  # goes into checkpoints, as JSON
        return {"best": self.best if self.without or self.best < math.inf else None, "without": self.without}

    def load_state_dict(self, state):
        self.best, self.without = math.inf if state["best"] is None else state["best"], state["without"]
