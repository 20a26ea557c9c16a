"""Corpora in object stores: the same documents as on a disk, listed once, fetched once, noticed when they change."""

from __future__ import annotations

import glob
import gzip
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import config
from support.stores import BUCKET, KEY, SECRET, LocalStore

from trainer.config import Config, ConfigError, SourceConfig
from trainer.data.corpus import Corpus, _make_cached, open_corpus
from trainer.data.documents import FetchedObjects
from trainer.planning.resolve import config_problems
from trainer.util import objects
from trainer.util.objects import ObjectStore, check_url, hide_secrets, is_url

SOURCE = "data.sources.corpus.path"


def rows(name: str, count: int = 30) -> list[str]:
    return [f"document {number} of {name}: " + "word " * (number % 7) for number in range(count)]


def write_lines(path: Path, count: int = 30, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({column: row}) + "\n" for row in rows(path.name, count)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_kind(kind: str, folder: Path) -> None:
    """Files of a kind, some in a folder of the folder, and others that the kind leaves out."""
    for place in (folder / "b", folder / "a" / "inner"):
        place.mkdir(parents=True)
        if kind == "text":
            (place / "one.txt").write_text("\n".join(rows("one")) * 9)
        elif kind == "jsonl":
            write_lines(place / "one.jsonl"), write_lines(place / "two.jsonl.gz")
        elif kind == "parquet":
            datasets.Dataset.from_dict({"text": rows("one")}).to_parquet(str(place / "one.parquet"))
        elif kind == "chat":
            talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day to you"}]
            (place / "one.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
            (place / "two.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 20)
        else:
            np.arange(400, dtype=np.uint16).__mod__(250).tofile(place / "one.bin")
            np.arange(300, dtype=np.uint16).__mod__(250).tofile(place / "two.ds")
            np.array([100, 170, 300], np.uint64).tofile(place / "two.ds.index")
    (folder / ".hidden").write_text("{}")
    if kind != "text":
        (folder / "README.md").write_text("# not a document")


def make(folder: Path, kind: str, path: str) -> Config:
    made = config(folder, corpus=SourceConfig(kind, path))
    if kind == "chat":
        (folder / "template.jinja").write_text(
            "{% for m in messages %}{{ m['role'] }}: {% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
        )
        made.data.chat_template = str(folder / "template.jinja")
    return made


def samples(corpus: Corpus) -> list[list[int]]:
    return [list(side.get(index)[0]) for side in (corpus.train, corpus.eval) for index in range(len(side))]


def refusal(made: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        open_corpus(made)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "chat", "tokens"])
def test_a_kind_is_read_as_from_a_disk(kind, tmp_path, store):
    write_kind(kind, tmp_path / "files")
    store.put_folder(tmp_path / "files", "data/corpus")
    store.requests.clear()
    (tmp_path / "disk").mkdir(), (tmp_path / "store").mkdir()
    on_disk = open_corpus(make(tmp_path / "disk", kind, str(tmp_path / "files")))
    made = make(tmp_path / "store", kind, f"s3://{BUCKET}/data/corpus/")
    in_store = open_corpus(made)
    assert samples(in_store) == samples(on_disk) and len(samples(on_disk)) > 5
    assert in_store.fingerprint == on_disk.fingerprint
    listings = [path for _, path in store.requests if "list-type" in path]
    assert len(listings) == 1 and not [one for one in store.requests if one[0] == "HEAD"]
    told, wanted = (
        [note.split("path=")[1].split(": ")[1:] for note in corpus.notes if "path=" in note]
        for corpus in (in_store, on_disk)
    )
    assert told == wanted, "what is left out is named as on a disk"
    assert not any(name in path for _, path in store.requests for name in (".hidden", "README.md"))
    # The second start lists, and fetches nothing.
    store.requests.clear()
    assert open_corpus(made).fingerprint == on_disk.fingerprint
    assert [method for method, _ in store.requests] == ["GET"] and "list-type" in store.requests[0][1]


def test_an_evaluation_set_is_read_from_a_store(tmp_path, store):
    write_kind("jsonl", tmp_path / "files")
    store.put_folder(tmp_path / "files", "held")
    made = make(tmp_path, "jsonl", str(tmp_path / "files"))
    made.eval.every, made.eval.sets = 1, {"held": SourceConfig("jsonl", f"s3://{BUCKET}/held")}
    assert len(open_corpus(made).sets["held"]) > 5


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(st.sampled_from(["a", "ab", "b", "a.jsonl", "x/a", "x/y/b", "x/ab.jsonl"]), min_size=1, unique=True),
    pattern=st.sampled_from(["*", "**", "x/*", "**/*.jsonl", "[ab]*", "x/**", "a?", "**/a*", "*.jsonl", "x/*/b"]),
)
def test_a_glob_finds_what_it_finds_on_a_disk(names, pattern, tmp_path_factory):
    """On fsspec's store in memory: the rules of patterns are the same for all."""
    names = [name for name in names if not any(other.startswith(f"{name}/") for other in names)]
    folder, memory = tmp_path_factory.mktemp("glob"), fsspec.filesystem("memory")
    memory.store.clear()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        memory.pipe(f"/bucket/c/{name}", name.encode())
    paths = glob.glob(str(folder / pattern), recursive=True)
    on_disk = sorted({os.path.relpath(path, folder) for path in paths if os.path.isfile(path)})
    found = ObjectStore(SOURCE, f"memory://bucket/c/{pattern}").list()
    assert [one.name.removeprefix("/bucket/c/") for one in found] == on_disk


def test_a_changed_object_is_noticed_and_others_are_kept(tmp_path, store):
    write_kind("jsonl", tmp_path / "files")
    store.put_folder(tmp_path / "files", "c")
    made = make(tmp_path, "jsonl", f"s3://{BUCKET}/c/**/*.jsonl")
    before = open_corpus(made)
    changed = store.get("c/b/one.jsonl").replace(b"document 3 ", b"Document 3 ")
    store.put("c/b/one.jsonl", changed)  # of the same size
    store.requests.clear()
    after = open_corpus(made)
    assert after.fingerprint != before.fingerprint and samples(after) != samples(before)
    assert [path for _, path in store.requests if "list-type" not in path] == [f"/{BUCKET}/c/b/one.jsonl"]
    store.put("c/b/one.jsonl", changed)  # written again at another time
    assert open_corpus(made).fingerprint == after.fingerprint


def test_files_that_were_removed_from_the_cache_are_fetched_again(tmp_path, store):
    write_kind("tokens", tmp_path / "files")
    store.put_folder(tmp_path / "files", "c")
    made = make(tmp_path, "tokens", f"s3://{BUCKET}/c/")
    before = samples(open_corpus(made))
    cached = sorted((tmp_path / "cache" / "objects").glob("*.bin"))
    cached[0].unlink(), cached[1].write_bytes(b"short")
    assert samples(open_corpus(made)) == before
    shutil.rmtree(tmp_path / "cache" / "objects")
    with pytest.raises(ConfigError, match="objects/.* has not been made"):
        open_corpus(made, prepare=False)
    assert samples(open_corpus(made)) == before


def test_one_process_of_a_node_fetches(tmp_path, store):
    write_kind("tokens", tmp_path / "files")
    store.put_folder(tmp_path / "files", "c")
    made = make(tmp_path, "tokens", f"s3://{BUCKET}/c/")
    once = partial(_make_cached, config=made, prepare=True)
    found = [FetchedObjects("corpus", made.data.sources["corpus"], tmp_path / "cache", 0) for _ in range(4)]
    store.requests.clear()
    store.fail = lambda method, path: time.sleep(0.3)
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda one: one.fetch(once), found)]
    assert len(store.requests) == len(set(store.requests)) == 6


def test_a_transfer_that_is_damaged_is_repeated_and_then_refused(tmp_path, store, monkeypatch):
    write_lines(tmp_path / "one.jsonl")
    store.put_folder(tmp_path, "c")
    made = make(tmp_path / "run", "jsonl", f"s3://{BUCKET}/c/one.jsonl")
    wrong: list[bytes] = []
    files = ObjectStore(SOURCE, f"s3://{BUCKET}/c/one.jsonl").fs  # fsspec keeps one for all
    get_file = files.get_file

    def damage(name, target):
        get_file(name, target)
        if wrong:
            content = Path(target).read_bytes()
            Path(target).write_bytes(wrong.pop(0) + content[1:])

    monkeypatch.setattr(files, "get_file", damage)
    wrong[:] = [b"a", b"b", b"c", b"d", b"e"]
    assert "is damaged on its way" in refusal(made)
    assert not [path for path in (tmp_path / "run" / "cache" / "objects").iterdir() if ".jsonl" in path.name]
    wrong[:] = [b"x"]
    assert len(open_corpus(made).train) > 5 and not wrong
    # An object whose ETag is no MD5, though it looks like one: twice the same content is not damage.
    shutil.rmtree(tmp_path / "run")
    wrong[:] = [b"{", b"{"]
    listed = objects.ObjectStore.list
    monkeypatch.setattr(
        objects.ObjectStore, "list", lambda self: [one._replace(version="0" * 32) for one in listed(self)]
    )
    assert len(open_corpus(made).train) > 5


def test_what_a_store_refuses_is_one_error_with_the_setting(tmp_path, store, monkeypatch):
    monkeypatch.setitem(objects.TIMEOUTS, "retries", {"max_attempts": 1})
    write_lines(tmp_path / "one.jsonl")
    store.put_folder(tmp_path, "c")

    def told(url: str, kind: str = "jsonl") -> str:
        text = refusal(make(tmp_path / "run", kind, url))
        assert text.startswith(f"{SOURCE}={url}") and SECRET not in text and KEY not in text, text
        return text

    assert "no such bucket" in told("s3://nowhere/c/")
    assert "finds no object that ends in .jsonl" in told(f"s3://{BUCKET}/none/")
    assert "finds no object that ends in .parquet" in told(f"s3://{BUCKET}/c/", "parquet")
    assert "finds no object; name" in told(f"s3://{BUCKET}/c/*.txt")
    assert "is no pattern" in told(f"s3://{BUCKET}/c/**.jsonl")
    store.put("empty/a.txt", "")
    assert "is empty: 1 objects" in told(f"s3://{BUCKET}/empty/", "text")
    store.put("c/two.jsonl", "{}")
    store.requests.clear()
    with monkeypatch.context() as patched:
        patched.setattr(objects.ObjectStore.list, "__defaults__", (1,))
        assert "more than 1 objects; name a longer prefix" in told(f"s3://{BUCKET}/c/")
    assert len(store.requests) == 1
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: full)
        assert "0.00 GB free; set data.cache" in told(f"s3://{BUCKET}/c/")
    store.fail = lambda method, path: 403
    assert "the store refuses access" in told(f"s3://{BUCKET}/c/")
    store.fail = lambda method, path: 500 if path.endswith("jsonl") else None
    began = len(store.requests)
    assert "does not answer as it should" in told(f"s3://{BUCKET}/c/one.jsonl")
    assert 1 < len(store.requests) - began < 60, "requests are repeated, and not for ever"


def test_a_store_that_is_not_there_and_a_missing_package(tmp_path, store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    text = refusal(make(tmp_path, "jsonl", f"s3://{BUCKET}/c/"))
    assert text.startswith(f"{SOURCE}=s3://{BUCKET}/c/ cannot be listed") and "does not answer as it should" in text
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    fsspec.filesystem("s3").clear_instance_cache()
    assert "there are no valid credentials" in refusal(make(tmp_path, "jsonl", f"s3://{BUCKET}/c/"))
    fsspec.filesystem("s3").clear_instance_cache()

    def lacking(url: str, **options: object) -> None:
        raise ImportError("Install gcsfs")

    monkeypatch.setattr(fsspec, "url_to_fs", lacking)
    for scheme, package in (("gs", "gcsfs"), ("s3", "s3fs")):
        text = refusal(make(tmp_path, "jsonl", f"{scheme}://{BUCKET}/c/"))
        assert f"needs the package {package}" in text and f"pip install {package}" in text


@pytest.mark.parametrize(
    "url, word",
    [
        ("http://host/file.jsonl", "http:// is no object store"),
        ("file:///etc", "file:// is no object store"),
        ("hdfs://a/b", "hdfs:// is no object store"),
        ("s3://", "names no bucket"),
        ("s3:///c", "names no bucket"),
        ("s3://b*/c", "names no bucket"),
        ("s3://b/c::memory://d/e", "names no bucket"),
        ("s3://user:hunter22@bucket/c", "holds credentials"),
        ("s3://bucket/c?X-Amz-Signature=hunter22&x=1", "holds credentials"),
    ],
)
def test_urls_that_cannot_be_are_refused_before_anything_starts(url, word):
    made = Config()
    made.data.sources = {"corpus": SourceConfig("jsonl", url)}
    made.eval.every, made.eval.sets = 1, {"held": SourceConfig("text", url)}
    made.checkpoint.upload = made.checkpoint.resume = url
    problems = [text for text in config_problems(made) if word in text]
    settings = (SOURCE, "eval.sets.held.path", "checkpoint.upload", "checkpoint.resume")
    assert [any(text.startswith(f"{name}=") for text in problems) for name in settings] == [True] * 4, problems
    assert "hunter22" not in " ".join(config_problems(made))
    for name in ("run.dir", "data.cache", "data.tokenizer", "model.from_hf", "checkpoint.peer_folder"):
        made = Config()
        section, key = name.split(".")
        setattr(getattr(made, section), key, url)
        assert [text for text in config_problems(made) if text.startswith(f"{name}=") and "on a disk" in text], name


@given(
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.sampled_from(["s3://a:{}@b/c", "s3://b/c?X-Amz-Signature={}", "https://h/?a=1&token={}"]),
)
def test_secrets_of_urls_are_hidden(around, form):
    words = around.replace("@", "").replace("/", "")
    assert "hunter22" not in hide_secrets(f"{words} {form.format('hunter22')} {words}")
    assert is_url("s3://b") and not is_url("b/c") and not is_url(None) and not [*check_url("a", "s3://b/c/*.jsonl")]


@pytest.mark.parametrize("value", [KEY, SECRET])
def test_keys_of_the_environment_are_hidden(value, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY), monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert hide_secrets(f"the key {value} is wrong") == "the key ... is wrong"


def test_a_listing_of_thousands_of_objects(tmp_path, store: LocalStore):
    """More than two pages; the files of a text source are cut to its limit before any is fetched."""
    for number in range(2100):
        store.put(f"many/{number:05d}.txt", f"text of {number}")
    assert len(ObjectStore(SOURCE, f"s3://{BUCKET}/many").list()) == 2100
    made = make(tmp_path, "text", f"s3://{BUCKET}/many")
    made.data.sources["corpus"].limit = 40
    store.requests.clear()
    assert len(open_corpus(made).train) > 5
    assert len([path for _, path in store.requests if "list-type" not in path]) == 40
