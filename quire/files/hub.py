"""Model folders from the Hugging Face hub, through its own client and cache."""

import re
from pathlib import Path

from quire.errors import ModelUnavailable

# What Quire reads, and no more: repositories also hold the weights in formats nobody here opens.
_WANTED = [
    "config.json",
    "generation_config.json",
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
    "*.safetensors",
    "model.safetensors.index.json",
]
_UNWANTED = ["consolidated*.safetensors", "original/*", "onnx/*", "*/*.safetensors"]

_REPOSITORY = re.compile(r"(?P<repository>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[^@\s]+))?")


def parse_repository(text: str) -> tuple[str, str | None] | None:
    """`org/name[@revision]` as its two parts; None where the text is no such thing."""
    found = _REPOSITORY.fullmatch(text)
    return None if found is None else (found["repository"], found["revision"])


def fetch_repository(
    repository: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
    show_progress: bool = False,
) -> Path:
    """The folder of a repository in the client's cache, complete, or ModelUnavailable with what to do about it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    wanted = f"{repository}@{revision}" if revision else repository
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            token=token,
            local_files_only=offline,
            cache_dir=cache_dir,
            endpoint=endpoint,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            tqdm_class=None if show_progress else Hidden,
        )
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{wanted} is gated: accept its terms on the hub, then pass a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"{wanted} is neither a local path nor a repository on the hub; a private one needs a token"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelUnavailable(f"{repository} has no revision {revision!r}") from error
    except HFValidationError as error:
        raise ModelUnavailable(f"{wanted} is neither a local path nor a repository id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(_unreachable(wanted, offline)) from error
    except (HTTPError, OSError) as error:
        raise ModelUnavailable(f"{wanted} could not be fetched: {type(error).__name__}: {error}") from error
    return Path(folder)


def _unreachable(wanted: str, offline: bool) -> str:
    if offline:
        return f"{wanted} is not complete in the local cache and fetching is off; start once with a network"
    return (
        f"{wanted} is no local path, not in the local cache, and the hub cannot be reached; "
        "check the network, or name a local folder or .gguf file"
    )
