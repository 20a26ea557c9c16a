"""Objects in stores such as S3 (`s3://bucket/key`), through fsspec: listed up to a limit, fetched, and written.

fsspec's packages repeat requests that fail for a moment. What still fails ends in `StoreError`, which names the
setting and the URL. Credentials are those of the environment; no message shows them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from trainer.config import ConfigError
from trainer.util.reading import on_one_line, replace_file

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "memory": None}
"""Schemes of URLs, and what `pip install` they need. Objects of `memory` live as long as the process, for tests."""

MOST = 200_000
"""Objects that one listing may have: 200 requests, and 100 MB of host memory."""

THREADS = 8
"""Objects that are transferred at a time."""

TIMEOUTS: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}
"""Of S3's client, in seconds. The defaults wait for minutes for a host that does not answer."""

MAGIC = re.compile(r"[*?\[]")
MD5 = re.compile("[0-9a-f]{32}")

T = TypeVar("T")


class StoreError(ConfigError):
    """A store refuses, or does not have, what a setting names."""


class StoreDown(StoreError):
    """A store cannot be reached, or fails. The same request may succeed later."""


class StoredObject(NamedTuple):
    """An object of a listing. name: bucket and key. size: in bytes. version: changes with the content; S3's ETag."""

    name: str
    size: int
    version: str


def is_url(path: str | None) -> bool:
    """Whether a setting names something in a store rather than a file."""
    return path is not None and "://" in path


def check_url(setting: str, url: str) -> Iterator[str]:
    """What is wrong with a URL of objects before any store is asked."""
    scheme, _, rest = url.partition("://")
    named = f"{setting}={hide_secrets(url)}"
    if scheme not in PACKAGES:
        what = f"{scheme}:// is no object store that is supported" if "://" in url else "this is no URL"
        yield f"{named}: {what}; use s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
    elif hide_secrets(url) != url:
        yield f"{named} holds credentials; set them in the environment instead (AWS_PROFILE, AWS_ACCESS_KEY_ID)"
    elif not (bucket := rest.partition("/")[0]) or MAGIC.search(bucket) or "::" in rest:
        yield f"{named} names no bucket; write {scheme}://BUCKET/PREFIX"


def hide_secrets(text: str) -> str:
    """A text without what may be a password: user names in URLs, query strings, and keys of the environment."""
    text = re.sub(r"(?<=://)[^/\s]*@", "", text)
    text = re.sub(r"\?[\w.%-]+=\S*", "", text)
    for name, value in os.environ.items():
        if len(value) > 7 and any(word in name for word in ("ACCESS_KEY", "SECRET", "TOKEN", "PASSWORD")):
            text = text.replace(value, "...").replace(quote(value, safe=""), "...")
    return text


class ObjectStore:
    """What lies under a URL: that of a prefix (a folder), of an object, or a glob.

    setting: has the URL, for messages. Raises `ConfigError` for a URL that cannot be and for a missing package."""

    def __init__(self, setting: str, url: str):
        if problems := [*check_url(setting, url)]:
            raise ConfigError(problems)
        import fsspec  # few runs use a store

        self.named, self.url = f"{setting}={url}", url
        self.scheme = url.partition("://")[0]
        self.is_s3 = PACKAGES[self.scheme] == "s3fs"
        self.pattern: re.Pattern | None = None
        self.unmatched: list[StoredObject] = []
        try:
            self.fs, self.root = fsspec.url_to_fs(
                url, use_listings_cache=False, **({"config_kwargs": TIMEOUTS} if self.is_s3 else {})
            )
        except ImportError:
            package = PACKAGES[self.scheme]
            raise ConfigError(
                f"{self.named} needs the package {package}, which is not installed; run pip install {package}"
            ) from None
        except Exception as error:  # such as gcsfs without credentials
            raise self._explain(error, "opened") from None
        self.root = self.root.rstrip("/")
        self.prefix = ""
        if found := MAGIC.search(self.root):
            from fsspec.utils import glob_translate

            try:
                self.pattern = re.compile(glob_translate(self.root))
            except (ValueError, re.error) as error:
                raise ConfigError(f"{self.named} is no pattern that can be used: {error}") from None
            self.root, _, self.prefix = self.root[: found.start()].rpartition("/")

    def list(self, most: int = MOST) -> list[StoredObject]:
        """The objects, sorted by name, in one listing, which also sets `unmatched`: what lies beside those that a glob
        matches. Raises `StoreError` for more than `most`, and for a bucket that does not exist; a prefix without
        objects has an empty list."""
        options: dict[str, Any] = {"prefix": self.prefix} if self.prefix and self.is_s3 else {}
        options |= {"max_items": most + 1} if self.is_s3 else {}
        with self.explaining("listed"):
            found = self.fs.find(self.root, detail=True, **options)
        if len(found) > most:
            raise StoreError(f"{self.named} has more than {most} objects; name a longer prefix, or join small objects")
        objects = []
        for name, info in sorted(found.items()):
            if info.get("type") == "file" and not name.endswith("/"):  # a slash: a console's mark of an empty folder
                version = next((str(info[key]) for key in ("ETag", "etag", "created") if info.get(key)), "")
                objects.append(StoredObject(name, int(info["size"]), version.strip('"')))
        matched = {one: self.pattern is None or bool(self.pattern.match(one.name)) for one in objects}
        self.unmatched = [one for one in objects if not matched[one]]
        return [one for one in objects if matched[one]]

    def fetch(self, found: StoredObject, target: Path) -> None:
        """Downloads an object to the file `target`, which then exists whole or not at all. Size and, where the version
        is an MD5, content are compared."""
        sums: set[str] = set()
        with replace_file(target) as part:
            while True:
                with self.explaining(f"read ({on_one_line(found.name)})"):
                    self.fs.get_file(found.name, part)
                if (size := os.path.getsize(part)) != found.size:
                    raise StoreDown(
                        f"{self.named}: {on_one_line(found.name)} has {size} bytes instead of {found.size}: it "
                        "changed, or was cut off; start again"
                    )
                with open(part, "rb") as file:
                    digest = hashlib.file_digest(file, "md5").hexdigest()
                # With some kinds of encryption an ETag only looks like an MD5. A transfer is not damaged twice alike.
                if not MD5.fullmatch(found.version) or digest == found.version or digest in sums:
                    return
                if len(sums) > 2:
                    raise StoreDown(
                        f"{self.named}: {on_one_line(found.name)} is damaged on its way: its MD5 is not "
                        f"{found.version}; start again"
                    )
                sums.add(digest)

    def put(self, source: Path, name: str) -> None:
        """Uploads a file as the object `name`, which then exists whole or not at all."""
        with self.explaining(f"written ({name})"):
            self.fs.put_file(str(source), name)

    def put_bytes(self, content: bytes, name: str) -> None:
        """Writes the object `name`."""
        with self.explaining("written"):
            self.fs.pipe_file(name, content)

    def copy(self, old: str, new: str) -> None:
        """Copies an object inside the store."""
        with self.explaining(f"copied ({on_one_line(old)})"):
            self.fs.cp_file(old, new)

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects."""
        with self.explaining("removed"):
            if names := [*names]:
                self.fs.rm(names)

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Around requests: errors of the store become `StoreError`."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # of fsspec, of the store's package, and of the packages below that
            raise self._explain(error, what) from None

    def _explain(self, error: Exception, what: str) -> StoreError:
        kind, text = type(error).__name__, hide_secrets(on_one_line(str(error)))
        named, detail = f"{self.named} cannot be {what}", f"{kind}: {text}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return StoreError(f"{named}: the local disk cannot take it ({detail}); make room")
        if isinstance(error, FileNotFoundError):
            return StoreError(f"{named}: there is no such bucket or object ({detail}); check the URL")
        if isinstance(error, PermissionError):
            return StoreError(f"{named}: the store refuses access ({detail}); check the credentials and their rights")
        if "Credential" in kind:
            return StoreError(
                f"{named}: there are no valid credentials ({detail}); set them in the environment (AWS_PROFILE, "
                "AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS)"
            )
        return StoreDown(f"{named}: the store does not answer as it should ({detail}); try again when it does")


def transfer_all(action: Callable[[T], None], items: Iterable[T]) -> None:
    """Calls `action` for each item, several at a time. Raises the first error; what has not begun is left out."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        for future in [pool.submit(action, item) for item in items]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
