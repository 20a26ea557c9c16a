"""An S3 server of this machine (moto), for tests of object stores. They are skipped where s3fs or moto is missing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"
KEY = "AKIAEXAMPLE000000000"
SECRET = "a+secret/of+the/tests"


class LocalStore:
    """A server, in which `fail` can make requests fail. requests: (method, path with query) of all so far."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.requests: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], int | None] = lambda method, path: None
        application = DomainDispatcherApplication(create_backend_app)

        def answer(environ: dict[str, Any], start: Callable) -> Any:
            method = environ["REQUEST_METHOD"]
            path = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}".rstrip("?")
            self.requests.append((method, path))
            if code := self.fail(method, path):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                word = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}[code]
                start(f"{code} {word}", [("Content-Type", "application/xml")])
                return [f"<Error><Code>{word}</Code><Message>as the test asks</Message></Error>".encode()]
            return application(environ, start)

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.server = make_server("127.0.0.1", 0, answer, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def backend(self) -> Any:
        """What the server keeps, without a request for each object."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    def put(self, key: str, content: bytes | str) -> None:
        self.backend.put_object(BUCKET, key, content.encode() if isinstance(content, str) else content)

    def get(self, key: str) -> bytes:
        return self.backend.get_object(BUCKET, key).value

    def remove(self, key: str) -> None:
        self.backend.delete_object(BUCKET, key)

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.backend.buckets[BUCKET].keys.keys() if key.startswith(prefix))

    def put_folder(self, folder: Path, prefix: str) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def clear(self) -> None:
        self.fail = lambda method, path: None
        for key in self.keys():
            self.remove(key)
        self.requests.clear()


@contextmanager
def serve_store() -> Iterator[LocalStore]:
    """A server with one empty bucket, which the environment of this process and of its children names."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package)
    store = LocalStore()
    if BUCKET not in store.backend.buckets:  # what moto keeps outlives a server
        store.backend.create_bucket(BUCKET, "us-east-1")
    given = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    import s3fs

    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # they remember the server before
        yield store
    store.server.shutdown()
    s3fs.S3FileSystem.clear_instance_cache()
