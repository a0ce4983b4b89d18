"""Chooses the model among a repository's GGUF files."""

import re
from collections.abc import Sequence
from fnmatch import fnmatch

from quire.errors import ModelUnavailable, listed

# Taken in this order where the name of the model does not say which: the one closest to the original that is still
# quantised, because that is the one read fastest.
PREFERRED = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "BF16", "F16", "F32",
)  # fmt: skip
# Parts of models and notes about them, which are no language models.
_NO_MODELS = ("*mmproj*", "*imatrix*", "*vocab-only*")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def choose_gguf(repository: str, names: Sequence[str], wanted: str | None) -> list[str]:
    """The files of one model among those of a repository; several where it is split, the first part first.

    `wanted` is the name of a file or a type such as Q8_0, and None takes the preferred type.
    """
    models = [name for name in names if name.lower().endswith(".gguf") and _is_model(name)]
    if wanted is not None and wanted.endswith(".gguf"):
        if wanted in names and wanted not in models and not _PART.fullmatch(wanted):
            raise ModelUnavailable(f"{repository}: {wanted} is a part for other models, not a language model")
        if wanted not in names:
            raise ModelUnavailable(f"{repository} has no file {wanted!r}; it has {listed(models) or 'no GGUF files'}")
        return _all_parts(repository, wanted, names)
    for label in PREFERRED if wanted is None else (wanted,):
        found = [name for name in models if _has_label(name, label)]
        if len(found) > 1:
            raise ModelUnavailable(
                f"{repository} has several files of type {label}; name one of {_choices(repository, found)}"
            )
        if found:
            return _all_parts(repository, found[0], names)
    if wanted is None and len(models) == 1:  # its name gives no type, and there is only one
        return _all_parts(repository, models[0], names)
    kind = f"of type {wanted}" if wanted is not None else f"of a type that is read ({', '.join(PREFERRED)})"
    raise ModelUnavailable(f"{repository} has no GGUF file {kind}; it has {listed(models) or 'none at all'}")


def _is_model(name: str) -> bool:
    """True if it is a model, or the first part of one."""
    part = _PART.fullmatch(name)
    return not any(fnmatch(name.lower(), pattern) for pattern in _NO_MODELS) and (
        part is None or int(part["number"]) == 1
    )


def _has_label(name: str, label: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(label.lower())}(?![a-z0-9_])", name.lower()) is not None


def _all_parts(repository: str, name: str, names: Sequence[str]) -> list[str]:
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    count = int(part["count"])
    parts = [f"{part['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [one for one in parts if one not in names]
    if missing:
        raise ModelUnavailable(f"{repository}: {name} is one of {count} parts, of which are missing: {listed(missing)}")
    return parts


def _choices(repository: str, names: Sequence[str]) -> str:
    return listed([f"{repository}/{name}" for name in names])
