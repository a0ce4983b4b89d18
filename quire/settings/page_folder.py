"""Settings of the folder with pages."""

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

from quire.errors import InvalidSetting
from quire.settings.config import MEMORY, setting


@dataclass(frozen=True)
class FolderSettings:
    """Settings of one server. Without a folder pages end with the server."""

    cache_folder: Path | None = setting(
        None,
        MEMORY,
        "A folder for pages of the cache that survive the server: prompts that were computed before it restarted are "
        "read from there. Servers may share it. Its files have what clients wrote, in a form that can be read back.",
    )
    cache_folder_gib: float = setting(
        16.0, MEMORY, "Most GiB of files in --cache-folder; those that were not used for longest are removed."
    )
    cache_folder_write_mib_s: float = setting(
        256.0, MEMORY, "Most MiB that are written to --cache-folder in a second; what exceeds that is not kept."
    )

    def __post_init__(self) -> None:
        for name in ("cache_folder_gib", "cache_folder_write_mib_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InvalidSetting(f"{name} is {value}; it must be above 0")
        for field in fields(self):
            value = getattr(self, field.name)
            if self.cache_folder is None and value != field.default:
                raise InvalidSetting(f"{field.name} is {value}, and there is no folder: set cache_folder too")

    @property
    def max_bytes(self) -> int:
        return int(self.cache_folder_gib * 2**30)

    def check(self) -> None:
        """Raises InvalidSetting where the folder cannot be used, before anything starts."""
        folder = self.cache_folder
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSetting(f"cache_folder: {folder} cannot be made: {error.strerror}") from error
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise InvalidSetting(f"cache_folder: {folder} cannot be read and written by this user")
