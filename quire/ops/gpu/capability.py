"""The kernels that a GPU runs with this Python and this JAX."""

import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax

HOPPER = 9.0  # the compute capability that the Mosaic kernels are written for
MOSAIC_JAX = (0, 11)  # the version they are written for: parts of Mosaic that they use change
MOSAIC_PYTHON = (3, 12)  # the oldest that this version of JAX supports
E4M3_COMPUTE = 8.9  # older GPUs lack the instructions by which Triton converts e4m3
LATENT_COMPUTE = 8.0  # older GPUs lack the memory for the kernel of latent attention
MUCH_SHARED_MEMORY = (8.0, 8.7, 9.0, 10.0, 10.3)  # compute capabilities where a program has more than 160 KiB
# Modules that a JAX may lack.
TRITON, CUDNN, ABSL = "jax.experimental.pallas.triton", "jax._src.cudnn.fused_attention_stablehlo", "absl"


class Missing(NamedTuple):
    """Kernels that do not run, and why."""

    kernels: str
    reason: str
    has_remedy: bool  # they would with another JAX


@dataclass(frozen=True)
class GpuCapability:
    """The kernels that a GPU runs, why the others do not, and the remedy.

    What depends on the compute capability or on the versions of JAX and Python asks this value. Triton's kernels run
    on every GPU, and where another kernel is missing they or XLA run in its place.
    """

    compute: float | None  # NVIDIA's compute capability; None: unknown
    jax: tuple[int, int]
    python: tuple[int, int]
    absent: frozenset[str] = frozenset()  # modules that this JAX lacks

    @classmethod
    def of(cls, compute: float | None) -> "GpuCapability":
        """With the JAX and the Python of this process."""
        major, minor, *_ = jax.__version__.split(".")
        absent = frozenset(name for name in (TRITON, CUDNN, ABSL) if not _is_there(name))
        return cls(compute, (int(major), int(minor)), sys.version_info[:2], absent)

    @property
    def is_hopper(self) -> bool:
        return self.compute == HOPPER

    @property
    def triton(self) -> bool:
        return TRITON not in self.absent

    @property
    def mosaic(self) -> bool:
        """Attention over pages of eight bits, and products of few rows with quantised weights."""
        return self.is_hopper and self.jax == MOSAIC_JAX

    @property
    def code_product(self) -> bool:
        """Products of few rows in e4m3. JAX 0.12 refuses the way in which their kernel stores; before 0.11 JAX loads
        Mosaic with absl."""
        return self.is_hopper and self.jax < (0, 12) and (self.jax >= MOSAIC_JAX or ABSL not in self.absent)

    @property
    def packed_attention(self) -> bool:
        """cuDNN's attention to several sequences after each other. JAX does not document it, and before 0.11 it reads
        groups of queries wrong."""
        return self.jax >= (0, 11) and CUDNN not in self.absent

    @property
    def prompt_in_codes(self) -> bool:
        """cuDNN's attention in e4m3."""
        return self.is_hopper and self.packed_attention

    @property
    def latent_attention(self) -> bool:
        return self.compute is None or self.compute >= LATENT_COMPUTE

    @property
    def has_much_shared_memory(self) -> bool:
        return self.compute is None or self.compute in MUCH_SHARED_MEMORY

    @property
    def fp8_refusal(self) -> str | None:
        """The reason for which kernels read and write no e4m3; None where they do."""
        if self.compute is None or self.compute >= E4M3_COMPUTE:
            return None
        return f"needs compute capability {E4M3_COMPUTE}; this GPU has {self.compute}"

    def missing(self) -> list[Missing]:
        version = ".".join(map(str, MOSAIC_JAX))
        missing = []
        if not self.is_hopper:
            missing.append(Missing("those written in Mosaic", f"for compute capability {HOPPER}", False))
        if self.is_hopper and not self.mosaic:
            kernels = "attention over pages of eight bits, products of few rows with weights of four and eight bits"
            missing.append(Missing(kernels, f"for JAX {version}", True))
        if self.is_hopper and not self.code_product:
            reason = f"for JAX {version}" if self.jax > MOSAIC_JAX else "needs absl-py"
            missing.append(Missing("products of few rows in e4m3", reason, True))
        if not self.packed_attention:
            kernels = "cuDNN's attention to several new prompts at once"
            kernels += " and in e4m3" if self.is_hopper else ""
            missing.append(Missing(kernels, f"from JAX {version} on", self.jax < MOSAIC_JAX))
        if self.fp8_refusal is not None:
            missing.append(Missing("those for e4m3", f"from compute capability {E4M3_COMPUTE} on", False))
        if not self.latent_attention:
            missing.append(Missing("latent attention", f"from compute capability {LATENT_COMPUTE} on", False))
        return missing

    def remedy(self) -> str | None:
        """The packages with which more kernels run; None where nothing helps."""
        if not any(kernels.has_remedy for kernels in self.missing()):
            return None
        install = "pip install 'quire[cuda]'"
        if self.python >= MOSAIC_PYTHON:
            return install
        python, version = (".".join(map(str, numbers)) for numbers in (MOSAIC_PYTHON, MOSAIC_JAX))
        return f"Python {python} or newer, which JAX {version} needs, and {install}"

    def __str__(self) -> str:
        compute = "unknown compute capability" if self.compute is None else f"compute capability {self.compute}"
        versions = (".".join(map(str, numbers)) for numbers in (self.jax, self.python))
        machine = "{}, JAX {}, Python {}".format(compute, *versions)
        if not (missing := self.missing()):
            return f"all, with {machine}"
        without = "; ".join(f"{kernels} ({reason})" for kernels, reason, _ in missing)
        remedy = "" if self.remedy() is None else f". Remedy: {self.remedy()}"
        return f"with {machine}, all except {without}{remedy}"


@cache
def this_gpu() -> GpuCapability | None:
    """That of the GPU of this process; None where it has none."""
    return GpuCapability.of(compute_capability(jax.local_devices()[0])) if jax.default_backend() == "gpu" else None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def compute_capability(device: jax.Device) -> float | None:
    """The version of an NVIDIA GPU's instructions; None for other devices, which have a name there or nothing."""
    stated = str(getattr(device, "compute_capability", ""))
    return float(stated) if re.fullmatch(r"\d+\.\d+", stated) else None
