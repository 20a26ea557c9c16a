"""Compares plans of every type of transformers' causal language models that has a small copy with one process of
transformers, and prints which types are exact. `trainer/hf/accepted.py` lists these.

    python tests/code_sweep.py OUT [TYPE ...]

OUT: a JSON file with the errors of each type. Without types, all are compared, which takes an hour on two cores. The
exit code is 1 where a type that is accepted is not exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from support.code_models import guess_values  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from trainer.hf.accepted import ACCEPTED, plain_values  # noqa: E402
from trainer.hf.proof import EXACT, guess_facts  # noqa: E402

PLANS: dict[str, dict[str, Any]] = {
    "data": {"stage": 3, "recompute": "full"},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "schedule": "zb_v"},
    "compiled": {"stage": 3, "recompute": "selective", "compile": True},
    "ep": {"ep": 2, "stage": 3, "recompute": "full"},
}
TOGETHER = 8
"""Types in one launch."""

SECONDS = 240
"""That the plans of a few types may take."""


def compare(names: list[str]) -> dict[str, dict[str, Any]]:
    """Type -> plan -> errors, or what prevented the comparison."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    cases = []
    for name in names:
        try:
            values = plain_values(guess_values(name))
            facts = vars(ACCEPTED.get(name) or guess_facts(values))
        except Exception as error:  # whatever a configuration raises for sizes that are not its own
            found[name] = {"data": {"error": f"no small copy: {str(error)[:150]}"}}
            continue
        facts = facts | {"tp": True, "pp": True}
        cases += [{"model": name, "plan": key, "values": values, "facts": facts, **plan} for key, plan in PLANS.items()]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cases").write_text(json.dumps(cases))
        command = [sys.executable, ROOT / "tests/workers/code_plans.py", f"{folder}/out", f"{folder}/cases"]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
        environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
        )
        try:
            text, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
    for line in text.splitlines():
        if line.startswith('{"case"'):
            result = json.loads(line)
            found[result["case"]["model"]][result["case"]["plan"]] = result
    return found


def verdict(result: dict[str, Any]) -> str:
    """The word for a result; "eager" where the results are exact and layers could not be compiled."""
    if "gradient" not in result:
        return "-" if not result else "refused" if result["error"].startswith(("ConfigError", "no small")) else "error"
    exact = result["gradient"] < EXACT and result["loss"] < EXACT and not result["problems"]
    return "wrong" if not exact else "eager" if result.get("uncompiled") else "exact"


def main(out: str, *names: str) -> int:
    results: dict[str, dict[str, Any]] = {}
    failed = []
    chosen = list(names) or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for some in (chosen[first : first + TOGETHER] for first in range(0, len(chosen), TOGETHER)):
        found = compare(some)
        missing = [name for name in some if "data" not in found[name] or len(found[name]) == 1 and len(some) > 1]
        for name in missing:  # a type that hangs or ends its process must not take others with it
            found |= compare([name])
        for name, plans in found.items():
            verdicts = {plan: verdict(plans.get(plan, {})) for plan in PLANS}
            details = (one.get("error") or f"{one['gradient']:.0e} {one['worst']}" for one in plans.values())
            words = " ".join(f"{text:8}" for text in verdicts.values())
            print(f"{name:24} {words}", " | ".join(text[:110] for text in details), flush=True)
            if facts := ACCEPTED.get(name):
                # Types without experts, or with experts that ranks cannot share, are refused.
                needed = ["data", "compiled", *["tp"] * facts.tp, *["pp"] * facts.pp]
                needed += ["ep"] * (verdicts["ep"] != "refused")
                failed += [f"{name} ({plan})" for plan in needed if verdicts[plan] not in ("exact", "eager")]
        results |= found
        Path(out).write_text(json.dumps(results))
    eager = [name for name, plans in results.items() if verdict(plans.get("compiled", {})) == "eager"]
    print(f"not compiled: {len(eager)} {' '.join(eager)}")
    print(f"accepted, but not exact: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
