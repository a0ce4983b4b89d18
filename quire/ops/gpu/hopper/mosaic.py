"""Mosaic in a process: the kernels of `ops/gpu` that are written for it, and programs that have them."""

import importlib

IN_PROGRAMS = b"mosaic_gpu"  # the name of its operations
LIBRARY = "jax.experimental.mosaic.gpu"
MULTIPROCESSORS = 132  # of the GPUs that these kernels are cut for


def load_library() -> bool:
    """Load what programs with kernels of Mosaic need to be loaded themselves; JAX does so only where one is traced.
    Waits for another thread that does. False if there is no such library."""
    try:
        importlib.import_module(LIBRARY)
    except ImportError:
        return False
    return True
