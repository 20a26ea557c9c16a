"""The command line `python -m trainer`.

`planning.resolve.compose` turns groups, recipes and overrides into a checked configuration. Nothing here imports torch
before the configuration is known to be right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence

from omegaconf import OmegaConf

from trainer.config import Config, ConfigError, typed
from trainer.config.compose import gather_values, groups_of, hydra_over
from trainer.config.fields import suggest_nearest
from trainer.config.json_schema import json_schema
from trainer.config.options import escape_unprintable
from trainer.planning.resolve import check_values, compose
from trainer.util.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED, STOPPED, process_rank, refuse_config
from trainer.util.signals import STOPPED_VARIABLE, SignalHandlers

USAGE = """\
usage: trainer train [--gpus N | --processes N] +config=RECIPE [GROUP=OPTION ...] [SETTING=VALUE ...]
       trainer sweep ...                 each combination of values such as lr.peak=1e-3,3e-4 or parallel=glob(zero*)
                                         is a trial, a run with processes of its own; its settings: --help sweep
       trainer estimate | probe | tune | diagnose | plot | report | watch | sample | export | merge | eval | parity |
               preflight ...
       python -m trainer ...             the same without installation
       torchrun --nproc-per-node N -m trainer +config=RECIPE ...  a run whose processes torchrun starts

  --config-dir DIR   folder of your own groups and recipes (DIR/config/NAME.yaml); they win over the shipped ones
  --cfg job          print the composed configuration and stop; with --resolve, as the run will see it
  --schema [SECTION] JSON schema of recipes, or of the files of a section's group (such as model), for editors
  --help [SECTION]   this page, or the settings of a section (such as lr, or model.attention) with their meaning

  imports=[MODULE]   imports modules of your own, which add to the project (docs/extending.md), also behind --help

  +config=[a,b]      several recipes, the later wins; single settings win over every recipe
  ~data.sources.NAME removes an entry of a mapping
"""


def help_text(section: str, config_dir: str | os.PathLike | None = None) -> str:
    """The page of `--help`, or the settings of one section."""
    from trainer.sweep.plan import SweepConfig

    everything = []
    for setting in (*typed.list_settings(), *typed.list_settings(SweepConfig(), "sweep")):
        everything.append(setting)
        everything += typed.entry_settings(setting.path) if setting.path in typed.ENTRIES else []
    sections = list(dict.fromkeys(setting.path.split(".")[0] for setting in everything))
    if section:
        # An entry that is named, such as data.sources.stdlib, has the settings of any.
        section = next((path for path in typed.ENTRIES if section.startswith(f"{path}.")), section)
        found = [setting for setting in everything if f"{setting.path}.".startswith(f"{section}.")]
        if not found:
            raise ConfigError(f"--help {section}: there is no such section; {suggest_nearest(section, sections)}")
        return "\n".join(_described(setting) for setting in found)
    with hydra_over(config_dir) as loader:
        groups = {group: loader.names(group) for group in groups_of(loader)}
    recipes = groups.pop("config", [])
    lines = [_wrapped(f"  {group + '=':<14}{', '.join(options)}", 16) for group, options in groups.items()]
    return "\n".join(
        [
            USAGE,
            "recipes",
            f"  +config=      {', '.join(recipes)}",
            "",
            "groups",
            *lines,
            "",
            "sections of settings",
            _wrapped(f"  {', '.join(sections)}", 2),
        ]
    )


def _described(setting: typed.Setting) -> str:
    extra = [f"in {setting.unit}"] if setting.unit else []
    extra += ["one of " + ", ".join(map(str, setting.choices))] if setting.choices else []
    extra += [f"range {setting.range}"] if setting.range else []
    meaning = "; ".join([setting.doc, *extra])
    return _wrapped(f"{setting.path}={json.dumps(setting.default)}", 2) + "\n" + _wrapped(f"    {meaning}", 4)


def _wrapped(text: str, indent: int) -> str:
    """The text in lines that fit the terminal, all but the first indented."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


class ArgumentParser(argparse.ArgumentParser):
    """Wrong options are a `ConfigError`."""

    def error(self, message: str):
        raise ConfigError(f"{message}; see python -m trainer --help")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m trainer", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--help", "-h", nargs="?", const="", metavar="SECTION")
    parser.add_argument("--schema", nargs="?", const="", metavar="SECTION")
    parser.add_argument("--multirun", "-m", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    if options.multirun and options.cfg:
        raise ConfigError(
            "--cfg shows the settings of one run; leave --multirun out, and give one value to each setting"
        )
    return options


def main(arguments: Sequence[str], own: bool = False) -> int:
    """Runs the command line. The exit code: what `trainer.training.run.main` returns, 2 for a wrong configuration, 1
    for a crash. own: this process ends with it, so that a run may handle its signals from here to the end."""
    escape_unprintable()
    try:
        if not set(arguments) - {"--multirun", "-m"}:
            if process_rank() == 0:
                print(USAGE + "\n--help has recipes, groups and sections of settings", file=sys.stderr, flush=True)
            return REFUSED
        options = _parse(arguments)
        if options.help is not None or options.schema is not None:
            return _print(_page(options))
        if options.cfg:
            return _print(_format_default(options))
        if options.multirun:
            from trainer import sweep

            return sweep.main(options.overrides, options.config_dir)
        if STOPPED_VARIABLE in os.environ:  # before this rank was started again
            return STOPPED
        if own:
            SignalHandlers(leave_before_start, leave=lambda _: None, own=True).handle()
        return _train(compose(options.overrides, options.config_dir))
    except ConfigError as error:
        return refuse_config(error)
    except KeyboardInterrupt:
        if process_rank() == 0:
            print("interrupted before a run had started", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return FAILED


def leave_before_start(what: str) -> None:
    """Ends a run that has not begun to train, from any thread. It has nothing to save, and the folder says what an
    earlier start left there."""
    if process_rank() == 0:
        with contextlib.suppress(OSError):
            os.write(2, f"stopped by {what} before the first step: nothing was trained, nothing is lost\n".encode())
    os._exit(STOPPED)


def _page(options: argparse.Namespace) -> str:
    """The page of `--help` or `--schema`, with what is registered by the imports that stand beside it."""
    section = options.schema if options.help is None else options.help
    if "=" in section:  # an override behind the option, and no section
        options.overrides, section = [section, *options.overrides], ""
    if options.overrides:
        gather_values(options.overrides, options.config_dir)
    if options.help is not None:
        return help_text(section, options.config_dir)
    return json.dumps(json_schema(section), indent=1)


def _format_default(options: argparse.Namespace) -> str:
    """The composed configuration as YAML, once it is checked: with its plan where WORLD_SIZE says for how many
    processes."""
    values, problems = gather_values(options.overrides, options.config_dir)
    config = check_values(values, problems, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    return (typed.to_yaml(config) if options.resolve else OmegaConf.to_yaml(OmegaConf.create(values))).rstrip()


def _train(config: Config) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.training import run

    @record  # hands the traceback of a crash to torchrun; a refused configuration is no crash
    def recorded() -> int:
        try:
            return run.main(config)
        except ConfigError as error:
            return refuse_config(error)

    return recorded()


def _print(text: str) -> int:
    if process_rank() == 0:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `--help | head`
            sys.stdout = open(os.devnull, "w")
    return DONE
