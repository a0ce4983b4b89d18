"""Settings of adapters: their names and places, and the room for them: a number, and the highest rank."""

import re
from collections.abc import Sequence

from quire.errors import InvalidSetting, shown
from quire.settings.choice import Choice, chosen
from quire.settings.config import Config

DEFAULT_LORAS = 8
DEFAULT_LORA_RANK = 16
MAX_ADAPTER_NAME = 256  # characters

_WITH_REVISION = re.compile(r"\w[\w.-]*/[\w.-]+@\S+")  # on the hub


def adapter_places(config: Config) -> dict[str, str]:
    """The folder, or the repository on the hub, of each adapter given at the start, by name."""
    places: dict[str, str] = {}
    for given in (part.strip() for parts in config.lora_adapters for part in parts.split(",")):
        name, separator, place = given.partition("=")
        if not separator and _WITH_REVISION.fullmatch(given):
            name, place = given.partition("@")[0], given
        check_adapter_name(name)
        if name in places:
            raise InvalidSetting(f"lora_adapters has {name!r} twice")
        if separator and not place:
            raise InvalidSetting(f"lora_adapters has {given!r}; it must be name=FOLDER")
        places[name] = place or name
    return places


def check_adapter_name(name: str) -> None:
    if not name or len(name) > MAX_ADAPTER_NAME or not name.isprintable() or "," in name:
        rule = f"a name has 1 to {MAX_ADAPTER_NAME} characters, all of them printable and none a comma"
        raise InvalidSetting(f"an adapter is called {shown(name)}; {rule}")


def resolve_max_loras(config: Config, num_adapters: int) -> Choice[int]:
    """Adapters on the device together; 0 where there can be none."""
    if not num_adapters and config.adapter_folder is None:
        return Choice("max_loras", 0, "there are no adapters")
    if config.adapter_folder is None and num_adapters < (config.max_loras or DEFAULT_LORAS):
        return Choice("max_loras", num_adapters, "as many as there are")
    return chosen("max_loras", config.max_loras, DEFAULT_LORAS, "default; more adapters wait in host memory")


def resolve_max_lora_rank(config: Config, ranks: Sequence[int]) -> Choice[int]:
    """The rank that there is room for, by the ranks of the adapters given at the start."""
    asked, highest = config.max_lora_rank, max(ranks, default=0)
    if config.adapter_folder is not None and highest < DEFAULT_LORA_RANK:
        return chosen("max_lora_rank", asked, DEFAULT_LORA_RANK, "default for adapters that are loaded while serving")
    return chosen("max_lora_rank", asked, highest, "the highest rank of the adapters")
