"""The compute capability of a GPU."""

import re

import jax


def compute_capability(device: jax.Device) -> float | None:
    """The version of an NVIDIA GPU's instructions; None for other devices, which have a name there or nothing."""
    stated = str(getattr(device, "compute_capability", ""))
    return float(stated) if re.fullmatch(r"\d+\.\d+", stated) else None
