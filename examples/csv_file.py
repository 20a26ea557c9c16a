"""A sink that writes some metrics to a CSV file in the run's folder:

trainer train +config=debug imports=[examples.csv_file] 'logging.sinks.csv_file.keys=[step,loss,lr]'
"""

import csv
from dataclasses import dataclass

from trainer import option, register


@dataclass
class Settings:
    file: str = option("metrics.csv", "name of the file in the run's folder")
    keys: list[str] = option(["step", "loss"], "keys of metrics.jsonl that become columns")


@register.sink("csv_file", Settings)
class CsvFile:
    def __init__(self, settings, place):
        self.keys = settings.keys
        self.file = open(place.folder / settings.file, "a" if place.resume_step else "w", newline="")
        self.writer = csv.writer(self.file)
        if not place.resume_step:
            self.writer.writerow(self.keys)

    def write(self, record):
        if "eval_loss" not in record:  # the line of a step, and not of an evaluation
            self.writer.writerow([record.get(key) for key in self.keys])
            self.file.flush()

    def close(self, status):
        self.file.close()
