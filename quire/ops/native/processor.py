"""The processor, as code that is compiled for it must know it."""

import platform
from pathlib import Path

# Of the first processor: x86 has the upper five, ARM the lower ones.
_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags")
_ARM_FIELDS = ("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, and the instructions that the system lets programs use."""
    try:
        first, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:  # without the list, code is for this machine only
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    found = (line.partition(":") for line in first.splitlines())
    told = {name.strip(): value.strip() for name, _, value in found}
    parts = [f"{name}={told[name]}" for name in _FIELDS + _ARM_FIELDS if name in told]
    return " ".join((platform.machine(), *parts))
