"""Model folders from the Hugging Face hub, through its own client and cache."""

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ModelUnavailable
from quire.files.gguf_choice import choose_gguf

_OF_TOKENIZER = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "chat_templates/*",
    "additional_chat_templates/*",
]
# The files that Quire reads, and no more: repositories also hold the weights in other formats.
_WANTED = [
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    *_OF_TOKENIZER,
    "*.safetensors",
    "model.safetensors.index.json",
]
_UNWANTED = ["consolidated*.safetensors", "original/*", "onnx/*", "*/*.safetensors"]

_REPOSITORY = re.compile(
    r"(?P<id>[\w.-]+(/[\w.-]+)?)"
    r"(:(?P<type>[\w.-]+)|/(?P<file>[\w./-]+\.gguf))?"
    r"(@(?P<revision>[^@\s]+))?"
)


class Repository(NamedTuple):
    id: str
    gguf: str | None  # the file to take, or the type of it
    revision: str | None


def parse_repository(text: str) -> Repository | None:
    """`org/name[:TYPE or /FILE.gguf][@revision]` as its parts; None where the text is no such thing."""
    found = _REPOSITORY.fullmatch(text)
    return None if found is None else Repository(found["id"], found["type"] or found["file"], found["revision"])


def fetch_repository(
    repository: str,
    *,
    gguf: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
    show_progress: bool = False,
) -> Path:
    """A model in the client's cache, complete, or ModelUnavailable with what to do about it.

    It is the folder of the repository, or a GGUF file, the only one that is fetched: where `gguf` says which, or where
    a repository has no other weights.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    where: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir, "endpoint": endpoint}

    def chosen() -> list[str]:
        """The GGUF files to fetch, by what the hub says it has; by what the cache has where it cannot be asked."""
        try:
            names = HfApi(endpoint, token=token).list_repo_files(repository, revision=revision) if not offline else None
        except (HTTPError, OSError):  # the error is raised when files are fetched, unless the cache has them
            names = None
        if names is not None:
            return _chosen(repository, names, gguf)
        try:
            folder = Path(snapshot_download(repository, **where, local_files_only=True, allow_patterns=[]))
        except LocalEntryNotFoundError:
            return []
        cached = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        return _chosen(f"{_wanted(repository, revision)} in the local cache", cached, gguf)

    with _errors_with_remedies(repository, revision, offline):
        files = chosen()
        folder = snapshot_download(
            repository,
            **where,
            local_files_only=offline,
            allow_patterns=[glob.escape(name) for name in files] or _WANTED,
            ignore_patterns=None if files else _UNWANTED,
            tqdm_class=None if show_progress else Hidden,
        )
    return Path(folder, files[0]) if files else Path(folder)


def fetch_adapter(
    repository: str, *, revision: str | None, token: str | None, offline: bool, cache_dir: Path | None
) -> Path:
    """The folder of an adapter in the client's cache, or ModelUnavailable with what to do about it."""
    from huggingface_hub import snapshot_download

    with _errors_with_remedies(repository, revision, offline):
        where: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        names = ["adapter_config.json", "adapter_model.safetensors"]
        return Path(snapshot_download(repository, **where, local_files_only=offline, allow_patterns=names))


def fetch_tokenizer(
    repository: str,
    *,
    revision: str | None,
    token: str | None,
    offline: bool,
    cache_dir: Path | None,
    endpoint: str | None = None,
) -> Path:
    """A folder with the tokenizer and chat templates of a repository, or ModelUnavailable with what to do about it."""
    from huggingface_hub import snapshot_download

    with _errors_with_remedies(repository, revision, offline):
        where: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir, "endpoint": endpoint}
        return Path(snapshot_download(repository, **where, local_files_only=offline, allow_patterns=_OF_TOKENIZER))


def _wanted(repository: str, revision: str | None) -> str:
    return f"{repository}@{revision}" if revision else repository


@contextmanager
def _errors_with_remedies(repository: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Errors of the hub's client become ModelUnavailable with a remedy."""
    from huggingface_hub import errors

    wanted = _wanted(repository, revision)
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelUnavailable(
            f"{wanted} is gated: accept its terms on the hub, then pass a token that may read it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"{wanted} is neither a local path nor a repository on the hub; a private one needs a token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelUnavailable(f"{repository} has no revision {revision!r}") from error
    except errors.HFValidationError as error:
        raise ModelUnavailable(f"{wanted} is neither a local path nor a repository id: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelUnavailable(_unreachable(wanted, offline)) from error
    except (errors.HTTPError, OSError) as error:
        raise ModelUnavailable(f"{wanted} could not be fetched: {type(error).__name__}: {error}") from error


def _chosen(repository: str, names: Sequence[str], gguf: str | None) -> list[str]:
    """The GGUF files to take; none where the repository has other weights and no GGUF file was asked for."""
    tensors = [name for name in names if name.endswith(".safetensors")]
    has_tensors = any(not any(fnmatch(name, pattern) for pattern in _UNWANTED) for name in tensors)
    has_gguf = any(name.endswith(".gguf") for name in names)
    return choose_gguf(repository, names, gguf) if gguf is not None or (has_gguf and not has_tensors) else []


def _unreachable(wanted: str, offline: bool) -> str:
    if offline:
        return f"{wanted} is not complete in the local cache and fetching is off; start once with a network"
    return (
        f"{wanted} is no local path, not in the local cache, and the hub cannot be reached; "
        "check the network, or name a local folder or .gguf file"
    )
