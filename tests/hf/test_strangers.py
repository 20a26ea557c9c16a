"""Folders of models, tokenizers and data sets that strangers wrote: nothing in them names a file elsewhere."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from support.kinds import SPEC
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from trainer.config import ConfigError
from trainer.config.schema import CorpusConfig
from trainer.data.documents import find_files, load_hub
from trainer.data.tokenizer import byte_tokenizer, load_tokenizer
from trainer.hf import HFWeights, export_model, spec_from_hf
from trainer.hf.tokenizer import FILE, NEVER_OPENED
from trainer.planning.parameters import declare_parameters

SECRET = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nroot:x:0:0:secret\n"


def tokenizer_classes() -> Iterator[type]:
    """The classes of tokenizers of the installed transformers; some need packages that are not installed."""
    for name in sorted({name for name in TOKENIZER_MAPPING_NAMES.values() if name}):
        try:
            found = tokenizer_class_from_name(name)
            _ = found.vocab_files_names
            yield found
        except (ImportError, AttributeError):
            continue


def file_keys(tokenizer: type) -> set[str]:
    """The keys under which a class takes the name of a file: files that it declares, arguments that are a text or
    else the content of a file, and options that its own module, or its base, takes for files."""
    keys = {*tokenizer.vocab_files_names}
    for name, parameter in inspect.signature(tokenizer.__init__).parameters.items():
        kinds = str(parameter.annotation)
        if "str" in kinds and ("dict" in kinds or "list" in kinds) and "token" not in name:
            keys.add(name)
    for base in inspect.getmro(tokenizer)[:-1]:
        if base.__module__.startswith("transformers"):
            source = Path(inspect.getfile(base)).read_text()
            keys.update(re.findall(r"kwargs\.(?:pop|get)\(\"(\w+_file)\"", source))
            keys.update(re.findall(r"def __init__\([^)]*?\b(\w+_file)\b", source))
    return keys


CLASSES = {tokenizer.__name__: sorted(file_keys(tokenizer)) for tokenizer in tokenizer_classes()}
WAYS = ("absolute", "parent", "current folder", "link")


def test_classes_that_take_files_are_found():
    assert len(CLASSES) > 40 and {"vocab", "vocab_file", "merges", "merges_file"} <= {*sum(CLASSES.values(), [])}
    assert {"vocab", "vocab_file", "tokenizer_file", "gguf_file"} <= {*CLASSES["BertTokenizer"]}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A good tokenizer folder; in the folder above, the current one, lies a file that is nobody else's business."""
    (tmp_path / "secret.txt").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save(tmp_path / "folder")
    return tmp_path / "folder"


def leading_out(folder: Path, way: str) -> str:
    """A value that names the file `secret.txt` beside the folder."""
    if way == "link":
        (folder / "vocabulary").symlink_to("../secret.txt")
        return "vocabulary"
    return {"absolute": str(folder.parent / "secret.txt"), "parent": "../secret.txt"}.get(way, "secret.txt")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("way", WAYS)
def test_no_class_of_tokenizers_opens_a_file_elsewhere(way, file, folder):
    value = leading_out(folder, way)
    for tokenizer, keys in CLASSES.items():
        for key in keys:
            described = {"tokenizer_class": tokenizer, "eos_token": "</s>"}
            (folder / "tokenizer_config.json").write_text(json.dumps(described))
            (folder / file).write_text(json.dumps({**described, key: value}))
            with pytest.raises(ConfigError) as caught:
                load_tokenizer(folder)
            told = str(caught.value)
            assert ("vocabulary" if way == "link" else f"{file} has {key}=") in told, (tokenizer, told)
            assert "secret:" not in told and "root:" not in told


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_inputs", ["secret.txt"]),
        ("init_inputs", ["/etc/passwd"]),
        ("vocab_file", 0),
        ("sp_model_kwargs", {"model_file": "secret.txt"}),
        ("fast_tokenizer_files", ["../tokenizer.1.json"]),
        ("fast_tokenizer_files", ["tokenizer.json", "/tmp/tokenizer.1.json"]),
        ("a_key_of_a_later_version", "/etc/passwd"),
        ("a_key_of_a_later_version", {"deep": ["../secret.txt"]}),
    ],
)
def test_other_ways_to_name_a_file_are_refused(key, value, folder):
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**described, key: value}))
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json has {key}"):
        load_tokenizer(folder)


def test_what_is_no_file_and_what_is_in_the_folder_is_taken(folder):
    described = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {"name_or_path": "/home/somebody/model", "special_tokens_map_file": "/home/x.json", "tokenizer_file": None}
    kept |= {"slash_token": "/", "extra_special_tokens": ["//", "/etc", "../up"], "chat_template": "/{{ messages }}"}
    kept |= {"vocab_file": "tokenizer.json", "fast_tokenizer_files": ["tokenizer.json"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**described, **kept}))
    assert load_tokenizer(folder).encode("text") == list(b"text")


def test_a_vocabulary_in_the_folder_is_that_of_the_folder(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "words.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")
    (folder.parent / "words.txt").write_text(SECRET)
    described = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", "vocab": "words.txt"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    assert "word" in load_tokenizer(folder).backend.get_vocab()


def hub(tmp_path: Path, folder: Path) -> Path:
    """The folder as the hub's cache has it: links into a folder of contents beside the snapshots."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abcd"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


@pytest.fixture
def model(tmp_path, folder) -> Path:
    """A tiny model and its tokenizer in one folder."""
    tensors = {name: torch.ones(info.shape) for name, info in declare_parameters(SPEC).items()}
    export_model(SPEC, tensors, tmp_path / "model", torch.float32, tokenizer=folder, shard_size=40_000)
    return tmp_path / "model"


def test_the_cache_of_the_hub_is_opened(model, tmp_path):
    snapshot = hub(tmp_path, model)
    assert load_tokenizer(snapshot).encode("text") == list(b"text")
    spec = spec_from_hf(snapshot)
    weights = HFWeights(snapshot, spec)
    assert all(weights(name, info).shape == info.shape for name, info in declare_parameters(spec).items())
    (tmp_path / "link").symlink_to(snapshot)
    load_tokenizer(tmp_path / "link")
    HFWeights(tmp_path / "link", spec)
    # A cache that a stranger packed: the content itself leads out.
    blob = (snapshot / "tokenizer_config.json").resolve()
    blob.rename(tmp_path / "elsewhere.json")
    blob.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is a link out of its folder"):
        load_tokenizer(snapshot)


def test_another_model_of_the_cache_is_out_of_the_folder(model, tmp_path):
    snapshot = hub(tmp_path, model)
    other = tmp_path / "hub" / "models--org--other" / "blobs" / "1"
    other.parent.mkdir(parents=True)
    shutil.copy(snapshot / "config.json", other)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other)
    with pytest.raises(ConfigError, match=r"config\.json is a link out of its folder"):
        spec_from_hf(snapshot)


def test_every_file_of_a_model_that_leads_out_is_refused(model, tmp_path):
    spec = spec_from_hf(model)
    for path in sorted(model.iterdir()):
        outside = tmp_path / path.name
        path.rename(outside)
        path.symlink_to(outside)
        for read in (load_tokenizer, spec_from_hf, lambda folder: HFWeights(folder, spec)):
            with pytest.raises(ConfigError, match=rf"{re.escape(path.name)} is a link out of its folder"):
                read(model)
        with pytest.raises(ConfigError, match="is a link out of its folder"):
            export_model(spec, {}, tmp_path / "out", tokenizer=model)
        path.unlink()
        outside.rename(path)
    templates = model / "additional_chat_templates"
    templates.mkdir()
    (templates / "more.jinja").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ConfigError, match=r"more\.jinja is a link out of its folder"):
        load_tokenizer(model)


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.safetensors", "linked/model.safetensors"])
def test_weights_elsewhere_are_refused(name, model, tmp_path):
    spec, index = spec_from_hf(model), model / "model.safetensors.index.json"
    (model / "sub").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"")
    (model / "linked").symlink_to("sub")
    (model / "sub" / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "weight_map": dict.fromkeys(content["weight_map"], name)}))
    with pytest.raises(ConfigError, match="is no name of a file in its folder|is a link out of its folder"):
        HFWeights(model, spec)


@pytest.mark.parametrize("name", ["config.1/../../config.json", "/config.1.json", "config.4.0.json"])
def test_a_configuration_elsewhere_is_refused(name, model):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "configuration_files": [name]}))
    with pytest.raises(ConfigError, match=r"configuration_files\[0\]"):
        spec_from_hf(model)
    with pytest.raises(ConfigError, match=r"configuration_files\[0\]"):
        load_tokenizer(model)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_folder_is_refused(file, model):
    (model / "code.py").write_text("raise SystemExit('it ran')")
    path = model / file
    auto = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Slow", "code.Fast"]}
    changed = {"auto_map": auto, "model_type": "a_type_of_its_own", "tokenizer_class": "Fast"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ConfigError):
        spec_from_hf(model) if file == "config.json" else load_tokenizer(model)


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_link_out_of_a_folder_of_data_is_refused(kind, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "b.jsonl").symlink_to("a.jsonl")
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    source = CorpusConfig(kind, str(folder))
    assert len(find_files("data.sources.x", source)[0]) == 2
    (folder / "c.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(ConfigError, match=r"data\.sources\.x\.path=.*c\.jsonl is a link out of the folder"):
        find_files("data.sources.x", source)
    assert len(find_files("data.sources.x", CorpusConfig(kind, str(folder / "**")))[0]) == 3  # the way out


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("files", ["OUTSIDE/secret.txt", "../secret.txt", "link.txt", "file://OUTSIDE/secret.txt"])
def test_a_data_set_that_names_files_elsewhere_is_refused(files, streaming, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("text\n")
    (tmp_path / "secret.txt").write_text(SECRET)
    (folder / "link.txt").symlink_to("../secret.txt")
    source = CorpusConfig("hub", str(folder), streaming=streaming)

    def described(files: str) -> None:
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n")

    described("a.txt")
    assert [row["text"] for row in load_hub("data.sources.x", source, tmp_path / "cache", streaming)] == ["text"]
    described(files.replace("OUTSIDE", str(tmp_path)))
    with pytest.raises(ConfigError, match="names .*, which is not in it"):
        load_hub("data.sources.x", source, tmp_path / "cache", streaming)


def test_names_of_files_and_their_classes_are_those_of_the_installed_transformers():
    missed = {key for keys in CLASSES.values() for key in keys if not FILE.search(key) or NEVER_OPENED.search(key)}
    assert not missed, f"transformers {transformers.__version__} takes files by {missed}; extend FILE"
