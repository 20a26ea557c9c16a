"""The command line, and the composition of a configuration from YAML groups, recipes and overrides.

Hydra composes plain values (`configs/`, the user's folder, its override grammar); `typed.py` gives them their types;
`checks.py` refuses what cannot work. Nothing here imports torch before the configuration is known to be right.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import typed
from trainer.planning.checks import check
from trainer.config import Config, ConfigError
from trainer.config.fields import nearest

HERE = Path(__file__).parent
CONFIGS = HERE / "configs" if (HERE / "configs").is_dir() else HERE.parent / "configs"
"""The shipped groups and recipes: inside the package in a wheel, beside it in a checkout."""

# Hydra re-reads its search path, which holds the user's folder by then, when this setting is there.
SEARCH = "hydra.searchpath=[]"

USAGE = """\
usage: torchrun --nproc-per-node N -m trainer +config=RECIPE [GROUP=OPTION ...] [SETTING=VALUE ...]
       python -m trainer ...             the same on one process
       python -m trainer --multirun ...  a sweep: each combination of values such as lr.peak=1e-3,3e-4 or parallel=glob(zero*) is a
                                         trial, a run with processes of its own; its settings: --help sweep

  --config-dir DIR   folder of your own groups and recipes (DIR/config/NAME.yaml); they win over the shipped ones
  --cfg job          print the composed configuration and stop; with --resolve, as the run will see it
  --help [SECTION]   this page, or the settings of a section (such as lr, or model.attention) with their meaning

  +config=[a,b]      several recipes, the later wins; single settings win over every recipe
  ~data.sources.NAME removes an entry of a mapping
"""

SWEEP = "several values are a sweep, which --multirun runs, a trial each"


def compose(overrides: Sequence[str] = (), config_dir: str | os.PathLike | None = None,
            world_size: int | None = None) -> Config:
    """The checked configuration of a run on `world_size` processes (default: WORLD_SIZE of the environment, else 1).

    `overrides` is what stands on the command line: `["+config=debug", "lr.peak=1e-3"]`. Leaves no Hydra state behind.
    Raises `ConfigError` with everything that is wrong.
    """
    values, problems = gather(overrides, config_dir)
    world = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    config = to_config(values, problems, world)
    contradictions = check(config, world)
    if problems:
        # A setting that was refused stands at its default: what contradicts only that default is no news.
        refused = re.compile(r"\b(" + "|".join(map(re.escape, problems)) + r")\b")
        recipe = "config" not in problems
        raise ConfigError([*problems.values(), *(text for text in contradictions if recipe and not refused.search(text))])
    if contradictions:
        raise ConfigError(contradictions)
    return config


def gather(overrides: Sequence[str], config_dir: str | os.PathLike | None = None) -> tuple[dict, typed.Problems]:
    """Plain values of all settings, interpolations unresolved, and the overrides that had to be left out.

    Raises `ConfigError` where Hydra cannot compose what is left.
    """
    problems: typed.Problems = {}
    with hydra_over(config_dir) as loader:
        groups = _groups(loader)
        accepted = [text for override in overrides if (text := _accept(override, loader, groups, problems))]
        try:
            composed = hydra.compose("config", [*accepted, SEARCH])
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
            raise ConfigError([*problems.values(), _sentence(error)]) from None
    return typed.complete(Config(), OmegaConf.to_container(composed)), problems


@contextmanager
def hydra_over(config_dir: str | os.PathLike | None) -> Iterator[ConfigLoader]:
    """Hydra over the user's folder, then the shipped one; whatever Hydra held before is put back."""
    holder = GlobalHydra.instance()
    before, base = holder.hydra, hydra.version.getbase()
    holder.clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            if config_dir is not None:
                folder = Path(config_dir).expanduser().resolve()
                if not folder.is_dir():
                    raise ConfigError(f"--config-dir {config_dir}: there is no folder {folder}")
                loader.get_search_path().prepend("user", f"file://{folder}")
            yield loader
    finally:
        GlobalHydra.instance().hydra = before
        if before is not None:
            hydra.version.VersionBase.instance().setbase(base)


def _options(loader: ConfigLoader, group: str) -> list[str]:
    return loader.get_group_options(group, config_name="config", overrides=[SEARCH])


def _groups(loader: ConfigLoader) -> list[str]:
    groups = loader.get_group_options("", ObjectType.GROUP, config_name="config", overrides=[SEARCH])
    return [group for group in groups if group != "hydra"]


def _accept(override: str, loader: ConfigLoader, groups: list[str], problems: typed.Problems) -> str | None:
    """The override as Hydra shall see it; None, and a problem, if it can mean nothing."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        problems[override] = (f"'{override}' is not SETTING=VALUE, GROUP=OPTION or +config=RECIPE "
                              f"({_sentence(error)}); quote values with special characters ('run.name=\"a=b\"'), but not keys within braces, "
                              "where a colon is written as \\:")
        return None
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        problems[key] = f"{override}: {SWEEP}; for a list write {key}=[...]"
    elif key.startswith("sweep."):
        problems[key] = f"{override}: the settings of a sweep need --multirun"
    elif re.match(r"hydra\b", key):
        problems[key] = (f"{override}: Hydra only composes here, its own settings have no effect; "
                         "a folder of groups and recipes is named by --config-dir DIR")
    elif parsed.is_delete():
        if typed.is_entry(key):
            return override
        problems[key] = f"{override}: only entries of mappings can be removed, such as ~data.sources.NAME"
        if not typed.is_setting(key):
            known = [setting.path for setting in typed.settings()] + groups
            problems[key] += "; " + typed.unknown("", key, known)
    elif key in groups:
        return _choose(key, parsed.value(), override, loader, problems)
    elif "/" in key or "@" in override.split("=")[0]:  # a group in a group, or a package: Hydra's own answer is exact
        return override
    else:  # the schema decides which settings exist, not the YAML files that happen to name them
        return "++" + override.lstrip("+")
    return None


def _choose(group: str, chosen: Any, override: str, loader: ConfigLoader, problems: typed.Problems) -> str | None:
    """The override that chooses options of a group, with the + that Hydra asks for where the group has no default."""
    options = _options(loader, group)
    for option in chosen if isinstance(chosen, list) else [chosen]:
        if option is not None and "/" not in str(option) and str(option) not in options:
            kind = "recipe" if group == "config" else "option"
            single = f" (one setting: {group}.NAME=VALUE)" if typed.is_setting(group) else ""
            problems[group] = f"{group}={option}: there is no such {kind}; {nearest(str(option), options)}{single}"
        elif group == "config" and str(option).endswith((".yaml", ".yml")):
            problems[group] = (f"config={option}: a recipe is named, not given as a path; for a recipe of your own put it in FOLDER/config/ and "
                               f"say --config-dir FOLDER +config={Path(str(option)).stem}")
    if group in problems:
        return None
    defaults = OmegaConf.load(CONFIGS / "config.yaml").defaults
    return ("" if any(group in default for default in defaults if default != "_self_") else "+") + override.lstrip("+")


def quoted(text: str) -> str:
    """A value as Hydra's grammar reads it back."""
    return QuotedString(text, Quote.double).with_quotes()


def to_config(values: dict, problems: typed.Problems, world: int = 1) -> Config:
    """The values with interpolations resolved and types checked; what is wrong is added to `problems`.

    Besides OmegaConf's own interpolations there is `${from_processes:4,2}`: 2 where at least 4 processes run, else 1.
    """
    OmegaConf.register_new_resolver("from_processes", lambda least, degree: degree if world >= least else 1, replace=True)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems.values(), f"{error.full_key}: {str(error).splitlines()[0]}"]) from None
    return typed.build(resolved, problems)


def _sentence(error: BaseException) -> str:
    """An error, or its cause where it says nothing itself, on one line."""
    return " ".join((str(error) or str(error.__cause__)).split())


def help_text(section: str, config_dir: str | os.PathLike | None = None) -> str:
    """The page of `--help`, or the settings of one section."""
    from trainer.sweep.plan import SweepConfig
    everything = [*typed.settings(), *typed.settings(SweepConfig(), "sweep")]
    sections = list(dict.fromkeys(setting.path.split(".")[0] for setting in everything))
    if section:
        found = [setting for setting in everything if f"{setting.path}.".startswith(f"{section}.")]
        if not found:
            raise ConfigError(f"--help {section}: there is no such section; {nearest(section, sections)}")
        return "\n".join(_described(setting) for setting in found)
    with hydra_over(config_dir) as loader:
        groups = {group: _options(loader, group) for group in _groups(loader)}
    recipes = groups.pop("config", [])
    lines = [f"  {group + '=':<14}{', '.join(options)}" for group, options in groups.items()]
    return "\n".join([USAGE, "recipes", f"  +config=      {', '.join(recipes)}", "", "groups", *lines, "",
                      "sections of settings", f"  {', '.join(sections)}"])


def _described(setting: typed.Setting) -> str:
    extra = [f"in {setting.unit}"] if setting.unit else []
    extra += ["one of " + ", ".join(map(str, setting.choices))] if setting.choices else []
    return f"{setting.path}={json.dumps(setting.default)}\n    {'; '.join([setting.doc, *extra])}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message}; see python -m trainer --help")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m trainer", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--help", "-h", nargs="?", const="", metavar="SECTION")
    parser.add_argument("--multirun", "-m", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    if options.multirun and options.cfg:
        raise ConfigError("--cfg shows the settings of one run; leave --multirun out, and give one value to each setting")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command line. The exit code: what `trainer.training.run.main` returns, 2 for a wrong configuration, 1 for a crash."""
    try:
        options = _parse(arguments)
        if options.help is not None:
            return _print(help_text(options.help, options.config_dir))
        if options.cfg:
            return _print(_shown(options))
        if options.multirun:
            from trainer import sweep
            return sweep.main(options.overrides, options.config_dir)
        return _train(compose(options.overrides, options.config_dir))
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def _shown(options: argparse.Namespace) -> str:
    """The composed configuration as YAML. How many processes will run is not known: only settings are checked."""
    values, problems = gather(options.overrides, options.config_dir)
    config = to_config(values, problems, int(os.environ.get("WORLD_SIZE", 1)))
    if problems:
        raise ConfigError(list(problems.values()))
    return (typed.to_yaml(config) if options.resolve else OmegaConf.to_yaml(OmegaConf.create(values))).rstrip()


def _train(config: Config) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.training import run as train

    @record  # hands the traceback of a crash to torchrun; a refused configuration is no crash
    def recorded() -> int:
        try:
            return train.main(config)
        except ConfigError as error:
            return refuse(error)

    return recorded()


def _print(text: str) -> int:
    if _rank() == 0:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `--help | head`
            sys.stdout = open(os.devnull, "w")
    return 0


def refuse(error: ConfigError) -> int:
    """Prints what is wrong, once, and returns the exit code.

    Rank 0 speaks; torchrun then ends the other ranks. One that lives on was refused something of its own, and says so.
    """
    if _rank() != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
    count = len(error.problems)
    heading = "configuration error:" if count == 1 else f"configuration error, {count} problems:"
    print("\n  - ".join([heading, *error.problems]) if count > 1 else f"{heading} {error}", file=sys.stderr, flush=True)
    return 2


def _rank() -> int:
    return int(os.environ.get("RANK", 0))
