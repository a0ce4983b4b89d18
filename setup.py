"""Wheels that have the native library in them, for installations without a compiler: see `make dist`.

Any other installation, an editable one or one from the source package, builds the library on first use.
"""

import os
import platform
import re
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

IS_AHEAD = os.environ.get("QUIRE_BUILD_AHEAD") == "1"  # needs jax and a compiler here
OLDEST_GLIBC = 17  # that tags of wheels know
BUILT = Path("quire", "ops", "native", "built")


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        """True for wheels with the native library: they are for one architecture."""
        return IS_AHEAD


class Build(build_py):
    def run(self) -> None:
        super().run()
        if IS_AHEAD and not self.editable_mode:
            from quire.ops.native.ahead import build_all

            build_all(Path(self.build_lib) / BUILT)


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Any Python, since JAX's C interface and ctypes are all that is used; the C library that the files need."""
        if not IS_AHEAD:
            return super().get_tag()
        files = Path(self.get_finalized_command("build_py").build_lib, BUILT).glob("*.so")
        needed = [int(minor) for path in files for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
        return "py3", "none", f"manylinux_2_{max([OLDEST_GLIBC, *needed])}_{platform.machine()}"


setup(distclass=Package, cmdclass={"build_py": Build, "bdist_wheel": Wheel})
