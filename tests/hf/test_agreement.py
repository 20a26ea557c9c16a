"""Every field of the spec and every option of transformers' configurations, varied: what is exported or imported has
transformers' own logits, and what is not is refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.variations import FIELDS, other_options, small, variations
from torch import Tensor

from trainer.config import ConfigError
from trainer.config.model import ModelSpec, RopeSpec
from trainer.config.typed import flatten_values
from trainer.hf import HFWeights, export_model, spec_from_hf
from trainer.hf.agreement import find_disagreement
from trainer.hf.config import ROPE_NAMES, config_from_spec, first_difference, spec_from_config
from trainer.hf.families import ACTIVATIONS, FAMILIES
from trainer.model.initial import fill_parameters, name_seed
from trainer.model.transformer import Transformer
from trainer.planning.parameters import ParameterInfo

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 24, (2, 48), generator=torch.Generator().manual_seed(0))
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA3 = {
    "attention__rope__scaling": "llama3",
    "attention__rope__theta": 500.0,
    "attention__rope__factor": 8.0,
    "attention__rope__original_length": 32,
}
YARN = {
    "attention__rope__scaling": "yarn",
    "attention__rope__theta": 500.0,
    "attention__rope__factor": 8.0,
    "attention__rope__original_length": 64,
    "attention__rope__beta_fast": 2.0,
    "attention__rope__beta_slow": 0.2,
    "attention__rope__truncate": False,
    "attention__rope__mscale": 1.0,
    "attention__rope__mscale_all_dim": 0.5,
}
LONGROPE = {
    "attention__rope__scaling": "longrope",
    "attention__rope__factor": 4.0,
    "attention__rope__short_factor": [1.0, 1.1, 1.5, 2.0],
    "attention__rope__long_factor": [1.0, 2.0, 3.0, 4.0],
}
STARTS: tuple[dict[str, Any], ...] = (
    {},
    {"attention__rope__scaling": "linear", "attention__rope__factor": 4.0},
    LLAMA3,
    YARN,
    LONGROPE | {"attention__rope__original_length": 32},
    LONGROPE | {"attention__rope__original_length": 64},
    {"feed_forward__experts__count": 8, "feed_forward__experts__groups": 2, "feed_forward__experts__shared_width": 40},
    {"attention__kind": "latent", "attention__latent__q_rank": 12},
)
"""Changes of a spec, one of which makes each field count."""
INERT = {"name", "family", "max_length", "init.std", "init.truncate", "init.embedding_std", "init.residual"}
INERT |= {f"feed_forward.experts.{name}" for name in ("bias_rate", "bias_rule", "balance", "balance_over", "z_loss")}
"""Fields that change no logits of given weights. Biases of experts are no parameters, and begin with zeros."""


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Thousands of warnings of transformers, about what is varied here."""
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    yield
    logging.disable(logging.NOTSET)
    transformers.utils.logging.enable_progress_bar()


def weight(name: str, info: ParameterInfo) -> Tensor:
    """Large enough for every part to count; norms around one, less what Gemma adds."""
    value = torch.randn(info.shape, generator=torch.Generator().manual_seed(name_seed(1, name)))
    return value * (0.02 if info.role in ("embedding", "head") else 0.3) + (0.5 if info.role == "norm" else 0)


@torch.no_grad()
def our_logits(spec: ModelSpec, weights: Callable[[str, ParameterInfo], Tensor] = weight) -> Tensor:
    model = Transformer(spec).eval()
    fill_parameters(model, weights)
    return model(TOKENS)


@torch.no_grad()
def their_logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(TOKENS, use_cache=False, return_dict=True).logits


def opened(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    )


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and ((a - b).abs().max() <= 1e-5 * b.abs().max()).item()


def exported(spec: ModelSpec, folder: Path) -> torch.nn.Module:
    """What transformers makes of an export. Weights are made when the first is read, which is after every refusal."""

    @cache
    def tensors() -> dict[str, Tensor]:
        model = Transformer(spec)
        fill_parameters(model, weight)
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    export_model(spec, lambda name: tensors()[name], folder, torch.float32)
    return opened(folder)


def test_every_field_of_the_spec_has_a_start_in_which_it_counts() -> None:
    """A field that none shows needs one: add what makes it count to STARTS."""
    unseen = {path for path in FIELDS.keys() - starts().keys() if choices(path) != 1}
    # A spec with adapters is exported merged or as a PEFT folder, see tests/hf/test_peft_folders.py.
    assert unseen - {f"adapter.{name}" for name in ("alpha", "scale", "targets", "trained", "weights")} == INERT


def choices(path: str) -> int:
    """How many values are legal, where they are counted."""
    return len(FIELDS[path].choices or ())


@cache
def starts() -> dict[str, dict[str, Any]]:
    """Field -> the first of STARTS in which varying it changes the logits or their shape."""
    found: dict[str, dict[str, Any]] = {}
    for start in STARTS:
        spec = small("llama", **start)
        before = our_logits(spec)
        for path in FIELDS.keys() - found.keys() - INERT:
            if any(not close(our_logits(other), before) for other in variations(spec, path)):
                found[path] = start
    return found


EXPORTED = ("vocab_size", "depth", "width", "max_length", "attention.heads", "feed_forward.width", "tied", "norm.eps")
"""Fields that every family exports."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_exported_with_its_logits_or_refused_by_name(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out otherwise when transformers is not asked beforehand must be refused when it is. To ask takes
    longer than the rest: of what comes out as it should, one model in which all of `EXPORTED` differ is asked about."""
    faithful, wrong = set(), []
    for path in FIELDS.keys() - {"family"}:
        start = starts().get(path, {})
        base = small(family, **start)
        for number, spec in enumerate(variations(base, path)):
            if path in ("pattern", "overrides") and path != way_to_vary(family, number):
                continue
            biased = path == "feed_forward.experts.bias_rate" and not FAMILIES[family].balance
            if path in INERT and not biased and config_from_spec(spec) == config_from_spec(base):
                continue
            try:
                with monkeypatch.context() as patch:
                    patch.setattr("trainer.hf.folder.check_export", lambda *_: None)
                    if agrees(spec, tmp_path / f"{path}-{number}"):
                        faithful.add(path)
                        continue
                exported(spec, tmp_path / f"{path}-{number}-asked")
                wrong.append((path, "other logits"))
            except ConfigError as error:
                names = [*together(family, path), *(key.replace("__", ".") for key in start), *changed_fields(spec)]
                if not any(f"model.{name}=" in str(error) for name in names):
                    wrong.append((path, str(error)))
    assert not wrong
    assert {*EXPORTED, "init.std"} | {"feed_forward.activation"} - FAMILIES[family].fixed.keys() <= faithful
    spec = small(family)
    for path in EXPORTED:
        spec = next(variations(spec, path))
    exported(spec, tmp_path / "all")


def way_to_vary(family: str, number: int) -> str:
    """How a layer's field is varied in the family: by `pattern` or by `overrides`, by the other in the next family. A
    family without experts or windows in some layers has no option by layer, and refuses every such change by the code
    that all families share: it is asked about half of the fields."""
    turn, rules = number + list(FAMILIES).index(family), FAMILIES[family]
    own = rules.windows == "layers" or any("experts" in rule.theirs for rule in rules.layer_rules)
    return ("pattern", "overrides")[turn % 2] if own or turn // 2 % 2 else ""


def agrees(spec: ModelSpec, folder: Path) -> bool:
    """Whether a model is the same in transformers. Raises `ConfigError` where it cannot be written."""
    try:
        return close(their_logits(exported(spec, folder)), our_logits(spec))
    except ConfigError:
        raise
    except Exception:  # of whatever class transformers refuses it with
        return False


def together(family: str, path: str) -> tuple[str, ...]:
    """The fields that one option of config.json holds, `path` among them."""
    pairs = [paths for paths in FAMILIES[family].fields.values() if not isinstance(paths, str)]
    return next((paths for paths in pairs if path in paths), (path,))


def changed_fields(spec: ModelSpec) -> list[str]:
    """What the overrides and the pattern's entries change."""
    return [path for change in (*spec.overrides.values(), *spec.pattern) for path in flatten_values(change)]


WITH_GROUPS = ("feed_forward.experts.top_groups", "feed_forward.experts.group_score")
"""Fields that count with several groups of experts, which no family has."""


def test_no_field_is_invisible_to_the_question() -> None:
    """Where a spec is another one than the configuration is of, in any field, the answer is no."""
    for path, start in starts().items():
        if path in WITH_GROUPS:
            continue
        families = {".experts.": "qwen2_moe", ".latent.": "deepseek_v2"}
        family = next((name for part, name in families.items() if part in path), None)
        base = small(family) if family else small("llama", **start)
        config = {**config_from_spec(base), **NO_TOKENS}
        others = (other for other in variations(base, path) if not close(our_logits(other), our_logits(base)))
        other = next(others)
        assert find_disagreement(other, config), path
    assert find_disagreement(base, config) is None


@pytest.mark.parametrize(
    "family, changes",
    [
        ("gpt_neox", {"attention__rope__fraction": 1.0}),
        ("gpt_neox", {"attention__rope__scaling": "linear", "attention__rope__theta": 500.0}),
        ("gemma2", {"attention__window": 0}),
        ("gemma2", {"pattern": [{"attention": {"window": 9}}, {}]}),
    ],
)
def test_no_option_is_left_to_a_default(family: str, changes: dict, tmp_path: Path) -> None:
    """Whole heads rotated in GPT-NeoX, whose default is a quarter, and Gemma 2 with and without windows; again after
    having been read."""
    spec = small(family, **changes)
    assert close(their_logits(exported(spec, tmp_path / "first")), our_logits(spec))
    again = spec_from_hf(tmp_path / "first")
    assert first_difference(spec, again) is None
    assert close(their_logits(exported(again, tmp_path / "second")), our_logits(spec))


WHOLE = [name for name, family in FAMILIES.items() if "theta" in family.rope.values() and len(family.rope) == 1]
"""Families that rotate whole heads whatever config.json says."""


@pytest.mark.parametrize("family", WHOLE)
def test_partial_rotation_is_ignored_where_transformers_ignores_it(family: str, tmp_path: Path) -> None:
    config = small_config(family)
    compare(family, config, {"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.5}}, tmp_path)
    assert spec_from_hf(tmp_path).attention.rope.fraction == 1.0
    with pytest.raises(ConfigError, match=r"model.attention.rope.fraction=0.5 .*model.family="):
        exported(small(family, attention__rope__fraction=0.5), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layer_types_are_ignored_where_transformers_ignores_them(tmp_path: Path) -> None:
    compare("phi3", small_config("phi3"), {"layer_types": ["full_attention"] * 3}, tmp_path)
    assert spec_from_hf(tmp_path).attention.window == 5


@pytest.mark.parametrize("scaling", [LLAMA3, {"attention__rope__scaling": "linear", "attention__rope__factor": 2.0}])
def test_what_transformers_refuses_is_not_written(scaling: dict, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        exported(small("phi3", **scaling), tmp_path / "out")
    field = "model.attention.rope.scaling="
    for word in (field + scaling["attention__rope__scaling"], "transformers", "longrope", field + "none can"):
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "family, changes, word",
    [
        ("llama", {"is_causal": False}, "is_causal=False"),
        ("gemma2", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, "sliding_window=None"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("phi3", {"pad_token_id": 1000}, "pad_token_id=1000"),
    ],
)
def test_what_transformers_does_otherwise_is_refused_by_name(family, changes, word, tmp_path: Path) -> None:
    """None of these is known to our reader as such: transformers was asked."""
    (tmp_path / "config.json").write_text(json.dumps({**small_config(family), **changes}))
    with pytest.raises(ConfigError, match=f"model.from_hf=.*{word}"):
        spec_from_hf(tmp_path)


COMMON = set(transformers.PretrainedConfig().to_dict())
"""Options of every class, which one family stands for."""
NAMES = {"hidden_act": [*ACTIVATIONS, "mish"], "dtype": ["bfloat16"]}
"""Options whose values are names -> some of them; names of activations are those of every class too."""
ACTIVATION_OPTIONS = ("hidden_act", "hidden_activation", "activation_function")
ROPE = {
    ROPE_NAMES[name]: value
    for name, value in asdict(
        RopeSpec(500.0, 0.5, factor=4.0, original_length=32, short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    ).items()
    if name != "scaling"
}


def small_config(family: str) -> dict[str, Any]:
    """A complete config.json of the family, with every kind of layer."""
    changes = {} if FAMILIES[family].windows == "none" else {"attention__window": 5}
    if FAMILIES[family].windows == "layers":
        changes["overrides"] = {"0": {"attention": {"window": 0}}}
    config = {**config_from_spec(small(family, depth=3, **changes)), **NO_TOKENS}
    whole = {**transformers.AutoConfig.for_model(**config).to_dict(), "architectures": config["architectures"]}
    # What follows from other options would contradict these where they are varied.
    derived = ("head_dim", "qk_head_dim") if "qk_rope_head_dim" in config else ()
    return {key: value for key, value in whole.items() if key not in derived}


def other_configs(family: str) -> Iterator[tuple[str, Any]]:
    """Every option with other values; of rope_parameters, other values of its parts, and every type of positions."""
    config = small_config(family)
    names = NAMES if family == "llama" else dict.fromkeys(ACTIVATION_OPTIONS, ["relu", "mish"])
    for key in config.keys() - (COMMON if family != "llama" else {"model_type"}):
        yield from ((key, value) for value in other_options(key, config[key], names))
    if rope := config.get("rope_parameters"):
        for part in rope.keys() - {"rope_type"}:
            yield from (("rope_parameters", {**rope, part: value}) for value in other_options(part, rope[part], names))
        for kind in ("default", *transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS):
            yield "rope_parameters", {**ROPE, **rope, "rope_type": kind}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_is_read_as_transformers_reads_it_or_refused_by_name(family: str, tmp_path: Path) -> None:
    config = small_config(family)
    base = spec_from_config(config)
    others = [small_config(other) for other in FAMILIES if other != family]
    alike = [{key: value for other in others for key, value in other.items() if key not in config}]
    for key, value in other_configs(family):
        try:
            opened = transformers.AutoConfig.for_model(**{**config, key: value})
            same = first_difference(base, spec_from_config(opened.to_dict())) is None
        except Exception:
            same = False
        if not same:
            compare(family, config, {key: value}, tmp_path)
            continue
        if all(key in group for group in alike):
            alike.append({})
        next(group for group in alike if key not in group)[key] = value
    for group in alike:  # what is read as the same is also the same there, all together
        compare(family, config, group, tmp_path)


def compare(family: str, config: dict[str, Any], changes: dict[str, Any], folder: Path) -> None:
    """Asserts that the changed configuration is read as the model that transformers makes of it, less the changes that
    are refused by name."""
    while changes:
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        try:
            spec = spec_from_hf(folder)
        except ConfigError as error:
            refused = {key for key in changes if names(family, key, str(error))}
            assert refused, (changes, str(error))
            for key in refused if len(changes) > 1 else ():  # an error that names several may speak of one alone
                compare(family, config, {key: changes[key]}, folder)
            changes = {key: value for key, value in changes.items() if key not in refused}
        else:
            torch.manual_seed(0)
            opened = transformers.AutoConfig.from_pretrained(folder)
            reference = transformers.AutoModelForCausalLM.from_config(
                opened, attn_implementation="eager", dtype=torch.float32
            )
            for parameter in reference.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.15)
            reference.save_pretrained(folder / "weights")
            assert close(our_logits(spec, HFWeights(folder / "weights", spec)), their_logits(reference)), changes
            return


def names(family: str, key: str, error: str) -> bool:
    """Whether an error names an option, by its name or by the field that it becomes."""
    paths = FAMILIES[family].fields.get(key, ())
    words = [key, *(f"model.{path}=" for path in ([paths] if isinstance(paths, str) else paths))]
    return any(word in error for word in words) or key == "rope_parameters" and "rope" in error


SIZES_OF_ROUNDING = [  # in which fp32 rounds the logits by more than the tolerance: narrow norms, large scores
    ("Gemma2", 2, 1, 512, 1, {"query_pre_attn_scalar": 1, "num_hidden_layers": 3}),
    ("Gemma2", 4, 2, 8, 2, {"query_pre_attn_scalar": 7, "rms_norm_eps": 1e-8, "attn_logit_softcapping": None}),
    ("Gemma2", 96, 3, 32, 1, {"query_pre_attn_scalar": 1, "attn_logit_softcapping": None}),
    ("Gemma2", 24, 4, 128, 1, {"query_pre_attn_scalar": 1, "num_hidden_layers": 3, "attn_logit_softcapping": None}),
    ("Gemma2", 32, 16, 128, 1, {"query_pre_attn_scalar": 256}),
    ("Gemma2", 56, 7, 256, 7, {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None}),
    ("Qwen3", 4, 2, 2, 1, {"num_hidden_layers": 3}),
]


def complete_config(
    architecture: str, width: int, heads: int, head_dim: int, kv_heads: int, others: dict[str, Any]
) -> dict:
    """A complete config.json as transformers' class makes it."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    usual = {"vocab_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 300}
    config = getattr(transformers, f"{architecture}Config")(hidden_size=width, **shape, **NO_TOKENS, **usual | others)
    return {**config.to_dict(), "architectures": [f"{architecture}ForCausalLM"]}


@pytest.mark.parametrize("case", SIZES_OF_ROUNDING, ids=str)
def test_right_configurations_are_accepted_where_rounding_is_large(case):
    config = complete_config(*case)
    assert find_disagreement(spec_from_config(config), config) is None


def test_a_token_that_rounding_sends_to_another_expert_is_no_disagreement():
    """Of the first sequence's tokens one has two experts whose scores differ by 3e-9. Another scale of the chosen
    experts shows in every sequence."""
    spec = small("deepseek_v3", depth=3, feed_forward__experts__shared_width=40)
    config = {**config_from_spec(spec), **NO_TOKENS}
    assert find_disagreement(spec, config) is None
    spec.feed_forward.experts.scale = 1.01
    assert find_disagreement(spec, config)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_right_gemma_2_configurations_of_any_size_are_accepted(data):
    heads, head_dim = data.draw(st.sampled_from([1, 2, 3, 8, 16])), data.draw(st.sampled_from([2, 8, 64, 256]))
    width = heads * data.draw(st.sampled_from([2, 8, 24, 144, 256]))
    others = {
        "query_pre_attn_scalar": data.draw(st.sampled_from([1, 7, head_dim, 144, 256, 10_000])),
        "attn_logit_softcapping": data.draw(st.sampled_from([None, 5.0, 50.0])),
        "final_logit_softcapping": data.draw(st.sampled_from([None, 3.0, 30.0])),
        "rms_norm_eps": data.draw(st.sampled_from([1e-8, 1e-6, 1e-3])),
        "sliding_window": data.draw(st.sampled_from([4, 100, 4096])),
        "num_hidden_layers": data.draw(st.sampled_from([1, 2, 26])),
        "intermediate_size": data.draw(st.sampled_from([16, 9216])),
    }
    kv_heads = data.draw(st.sampled_from([count for count in range(1, heads + 1) if heads % count == 0]))
    config = complete_config("Gemma2", width, heads, head_dim, kv_heads, others)
    spec = spec_from_config(config)
    assert find_disagreement(spec, config) is None
    spec.attention.scale *= 1.1  # rounding explains no other model
    assert find_disagreement(spec, config) is not None
