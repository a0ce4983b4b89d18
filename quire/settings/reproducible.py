"""Answers whose bits depend on nothing else that runs: what that takes on a platform, and what does not go with it."""

from typing import NamedTuple

from quire.errors import InvalidSetting
from quire.settings.choice import Choice
from quire.settings.config import Config

LEAST_ROWS = 8  # of every product: the library's gave a row the same bits from there on, where they were compared
LEAST_ROWS_OF_CODES = 64  # up to half of that, codes of eight bits are widened in place of rounding the rows
LEAST_ROWS_OF_CHECKPOINTS = 128  # that are quantised: up to half of that, codes of four bits have a kernel
LEAST_PAGE = 32  # tokens: a tile of a prompt, which the check of programs has in one page


class ModelKinds(NamedTuple):
    """The kinds of layers of a model whose kernels are cut by the number of rows."""

    experts: bool = False
    latent: bool = False  # attention
    recurrent: bool = False


def resolve_reproducible(config: Config, platform: str, is_native: bool) -> Choice[bool]:
    """Raises InvalidSetting where it cannot be kept. `is_native`: all products and norms are the native library's."""
    if platform == "cpu":
        if not is_native:
            raise InvalidSetting(
                "reproducible on a CPU needs dtype float32, tensor_parallel 1 and the native library with all its "
                f"parts, which a C++ compiler makes at the first start; {_lack(config)}. Remedy: change that, or leave "
                "--reproducible out"
            )
        return Choice("reproducible", True, "nothing changes: on this CPU no row depends on others in any case")
    if platform != "gpu":
        raise InvalidSetting(f"reproducible is for CPUs and GPUs; this is a {platform}. Remedy: leave it out")
    for name, reason in _refused(config).items():
        raise InvalidSetting(
            f"{name} is {getattr(config, name)}, which does not go with reproducible on a GPU: {reason}. Remedy: leave "
            "one of them out"
        )
    return Choice(
        "reproducible", True, "one order of sums in every step, by other kernels, and a check of every program"
    )


def _lack(config: Config) -> str:
    if config.dtype not in (None, "float32"):
        return f"dtype is {config.dtype}"
    if config.tensor_parallel > 1:
        return f"tensor_parallel is {config.tensor_parallel}"
    return "the library, or a part of it, is not there: the log says why"


def _refused(config: Config) -> dict[str, str]:
    """The settings that are given and do not go with it on a GPU, each with its reason."""
    found: dict[str, str] = {}
    if config.speculate:
        found["speculate"] = "guesses are computed by the kernel of prompts, and other tokens by that of decodes"
    if config.tensor_parallel > 1:
        found["tensor_parallel"] = "devices add their parts in an order that depends on the number of rows"
    for name in ("lora_adapters", "adapter_folder", "max_loras"):
        if getattr(config, name):
            found[name] = "products with adapters are cut by the number of rows"
    if (config.max_burst or 1) > 1:
        found["max_burst"] = "tokens of a burst have a program of their own"
    if config.page_size is not None and config.page_size < LEAST_PAGE:
        found["page_size"] = f"the check of programs needs pages of {LEAST_PAGE} tokens"
    return found


def refuse_kinds(kinds: ModelKinds, name: str) -> None:
    """Raise for a model that has no kernels with one order on a GPU."""
    for kind, has_some in kinds._asdict().items():
        if has_some:
            what = "latent attention" if kind == "latent" else "experts" if kind == "experts" else "recurrent layers"
            raise InvalidSetting(
                f"reproducible: {name} has {what}, whose kernels for GPUs are cut by the number of rows. Remedy: leave "
                "--reproducible out"
            )


def least_rows(quantize: str, quantization: str | None) -> int:
    """Rows that every step of a reproducible engine on a GPU is padded to. `quantization`: that of its checkpoint."""
    if quantization:
        return LEAST_ROWS_OF_CHECKPOINTS
    return LEAST_ROWS if quantize == "none" else LEAST_ROWS_OF_CODES
