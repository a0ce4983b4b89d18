"""Settings of Python's garbage collector."""

import gc

# New objects before a young collection, young before a middle one, middle before a full one. A step of 256 rows makes
# thousands of objects and frees them itself, and a start makes hundreds of thousands that stay. Python's default of 700
# would search them for cycles all the time.
THRESHOLDS = (20_000, 20, 20)


def relax_gc() -> None:
    """Collect less often. Called at the start of a process."""
    gc.set_threshold(*THRESHOLDS)


def freeze_gc() -> None:
    """Exclude the objects that exist now from later collections. Called when an engine or a front end is ready."""
    gc.collect()  # garbage would stay too
    gc.freeze()
