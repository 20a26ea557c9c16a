"""Text that a model writes while it is trained: where it goes, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.registries import forgotten, package
from test_average import overrides

import trainer
from trainer.config import ConfigError
from trainer.observe.sinks import SAMPLES

NUMBERS = ("loss", "grad_norm", "eval_loss")
SINK = """
    @register.sink("texts")
    class Texts:
        def __init__(self, settings, place):
            self.path = place.folder / "texts"

        def write(self, record):
            pass

        def samples(self, step, samples):
            with open(self.path, "a") as file:
                file.write(f"{step} {len(samples)}\\n")

        def close(self, status):
            pass
"""


def test_training_does_not_notice_and_every_sink_gets_the_text(tmp_path, capsys) -> None:
    """In bf16, with recompute, an average of the weights and random numbers in the step: the same bits."""
    common = ["precision=bf16", "activation=full", "optimizer.ema.decay=0.5", "eval.ema=true", "data.tokenizer=bytes"]
    generate = "{every: 2, tokens: 7, prompts: ['def ', '']}"
    more = [f"+eval.generate={generate}", "logging.tensorboard=true", "imports=[texts]", "+logging.sinks.texts={}"]
    package(tmp_path, "texts", SINK)
    found, folders = [], [tmp_path / "without", tmp_path / "with"]
    with forgotten(tmp_path):
        for folder, extra in zip(folders, ([], more)):
            lines = trainer.run(trainer.compose(overrides(folder, 5, *common, *extra), world_size=1)).metrics
            found.append([[line.get(name) for name in NUMBERS] for line in lines])
    assert found[0] == found[1] and len(found[0]) == 10
    assert not (folders[0] / SAMPLES).exists()
    samples = [json.loads(line) for line in (folders[1] / SAMPLES).read_text().splitlines()]
    assert [(one["step"], one["prompt"]) for one in samples] == [(s, p) for s in (2, 4, 5) for p in ("def ", "")]
    assert len({one["text"] for one in samples}) > 2  # other weights write other texts
    assert (folders[1] / "texts").read_text() == "2 2\n4 2\n5 2\n"
    shown, log = capsys.readouterr().out, (folders[1] / "console.log").read_text()
    assert "step 2/5  sample 1:\n    def " in shown and "step 5/5  sample 2:\n" in shown and "sample 2:\n" in log
    assert "\x1b" not in shown + log  # whatever a model writes, a terminal shows it
    events = b"".join(path.read_bytes() for path in (folders[1] / "tensorboard").iterdir())
    assert b"sample/1" in events and b"sample/2" in events


def test_what_a_terminal_would_obey_is_not_shown(tmp_path, capsys) -> None:
    from trainer.config import LoggingConfig, RunConfig
    from trainer.observe.sinks import Logger

    logger = Logger(tmp_path, LoggingConfig(console="plain"), RunConfig(steps=9), 0, {})
    logger.samples(3, [("a\n", "\x1b[2Jb\r\tc\n€")])
    logger.close()
    assert capsys.readouterr().out == "step 3/9  sample 1:\n    a\n    �[2Jb�\tc\n    €\n"
    assert json.loads((tmp_path / SAMPLES).read_text())["text"] == "\x1b[2Jb\r\tc\n€"


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("{tokens: 5}", "eval.generate.tokens=5 is for samples, and eval.generate.every=0 makes none; set eval"),
        ("{every: 2, prompts: []}", "eval.generate.prompts=[] has nothing to continue; name a text"),
        ("{every: 2, top_p: 0.9}", "eval.generate.top_p'; it was removed: `trainer sample` has it"),
        ("{every: 2, promts: [a]}", "did you mean 'eval.generate.prompts'?"),
    ],
)
def test_what_cannot_be_generated_is_refused(tmp_path: Path, wrong: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer.compose(overrides(tmp_path / "run", 2, f"+eval.generate={wrong}"), world_size=1)
    assert words in str(refused.value)
    assert not (tmp_path / "run").exists()
