"""Tokenizer folders of transformers. No code that comes with a folder is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LIMIT = 256 << 20
"""Bytes of a file that belongs to a tokenizer; the largest that are published have some 40 MiB."""

SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Files of a folder that transformers reads to make a tokenizer."""


def open_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in `folder`. Raises `ValueError` for whatever keeps it from being opened."""
    from transformers import AutoTokenizer

    for path in folder.iterdir():
        if path.suffix in SUFFIXES and (not path.is_file() or os.path.getsize(path) > LIMIT):
            raise ValueError(f"{path.name} is no file of at most {LIMIT} bytes")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # whatever the tokenizer's own class raises; a panic in Rust is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(
                "it brings code of its own (auto_map), which is never run; save it as a tokenizer of transformers' "
                "own classes"
            ) from error
        raise ValueError(str(error)) from error
