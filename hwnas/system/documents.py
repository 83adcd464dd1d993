"""Versioned JSON documents: what every stored format checks before it reads its own fields."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from hwnas.errors import ConfigError, TableError


def read_document(path: Path, form: str, version: int, name: str, remedy: str) -> dict[str, Any]:
    """The content of a JSON file (also .gz) of format `form` up to `version`.

    TableError names file and fault, says what a file of this kind is called (`name`) and what to do (`remedy`).
    """
    try:
        content = path.read_bytes()
        data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except gzip.BadGzipFile as error:
        raise TableError(f"{path}: not gzip ({error}). {remedy}") from None
    except (EOFError, zlib.error) as error:
        raise TableError(f"{path}: torn ({error}). {remedy}") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}. {remedy}") from None
    except ValueError as error:
        raise TableError(f"{path}: not whole JSON ({error}). {remedy}") from None
    if not isinstance(data, dict) or data.get("format") != form:
        raise TableError(f"{path}: not {name} of hwnas. {remedy}")
    found = data.get("version")
    if not isinstance(found, int) or found > version:
        raise TableError(f"{path}: format version {found!r}; this hwnas reads up to {version}. Update hwnas.")
    return data


def content_of(path: Path) -> str:
    """Twelve hexadecimal digits that name a file's content; ConfigError when it cannot be read."""
    import hashlib

    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
