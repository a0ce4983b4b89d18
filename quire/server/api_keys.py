"""The API keys that requests may carry: their names, which logs and metrics show, and their limits."""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidSetting, shown
from quire.files.regular_file import read_regular_text
from quire.request import MAX_PRIORITY

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_ENTRIES = ("key", "sha256", *_LIMITS, "min_priority")


@dataclass(frozen=True)
class ApiKey:
    """One key. The secret itself is not kept."""

    name: str
    digest: bytes  # SHA-256 of the secret
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    min_priority: int = 0  # the least that its requests may have; lower runs first


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def key_of(name: str, secret: str, limits: Mapping[str, int | None]) -> ApiKey:
    return _key(name, digest_of(secret.encode()), limits)


def _key(name: str, digest: bytes, limits: Mapping[str, int | None], min_priority: int = 0) -> ApiKey:
    return ApiKey(name, digest, limits.get("requests_per_minute"), limits.get("tokens_per_minute"), min_priority)


def read_keys(file: Path, limits: Mapping[str, int | None]) -> list[ApiKey]:
    """The keys of a TOML file: a table for each, by its name. `limits` are those of keys that state none."""
    try:
        tables = tomllib.loads(read_regular_text(file))
    except OSError as error:
        raise InvalidSetting(f"api_keys_file is {file}: it cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"api_keys_file is {file}: not TOML: {error}") from error
    if not tables:
        raise InvalidSetting(f"api_keys_file is {file}: it has no keys")
    return [_read_key(f"{file}: {shown(name)}", name, table, limits) for name, table in tables.items()]


def _read_key(where: str, name: str, table: Any, limits: Mapping[str, int | None]) -> ApiKey:
    if not _NAME.fullmatch(name):
        raise InvalidSetting(f"{where}: names have up to 64 letters, digits, - and _")
    if not isinstance(table, dict) or ("key" in table) == ("sha256" in table):
        raise InvalidSetting(f"{where}: a key is a table with either key, the secret, or sha256, its digest")
    for entry, value in table.items():
        if entry not in _ENTRIES:
            raise InvalidSetting(f"{where}: {shown(entry)} is not known; it can have {', '.join(_ENTRIES)}")
        if entry in _LIMITS and (type(value) is not int or value < 1):
            raise InvalidSetting(f"{where}: {entry} is {shown(value)}; it must be a whole number of at least 1")
    min_priority = table.get("min_priority", 0)
    if type(min_priority) is not int or abs(min_priority) > MAX_PRIORITY:
        raise InvalidSetting(
            f"{where}: min_priority is {shown(min_priority)}; it must be a whole number between {-MAX_PRIORITY} and "
            f"{MAX_PRIORITY}"
        )
    own = {limit: table.get(limit, limits[limit]) for limit in _LIMITS}
    if "sha256" in table:
        digest = str(table["sha256"]).lower()
        if not _DIGEST.fullmatch(digest):
            raise InvalidSetting(f"{where}: sha256 must be 64 hexadecimal digits")
        return _key(name, bytes.fromhex(digest), own, min_priority)
    secret = table["key"]
    if not isinstance(secret, str) or not secret.isprintable() or not secret or " " in secret:
        raise InvalidSetting(f"{where}: key must be a string without whitespace")
    return _key(name, digest_of(secret.encode()), own, min_priority)


def check_distinct(keys: tuple[ApiKey, ...]) -> None:
    """Refuse two keys with one name or one secret."""
    names: set[str] = set()
    digests: set[bytes] = set()
    for key in keys:
        if key.name in names or key.digest in digests:
            raise InvalidSetting(f"the API key {key.name!r} has the name or the secret of another")
        names.add(key.name)
        digests.add(key.digest)
