"""Python's garbage collector in processes that run an engine."""

import gc

# Collections by count of new objects that live, of young collections, and of middle ones. A step of 256 rows makes
# thousands of objects and frees them itself, and a start makes hundreds of thousands that stay; Python's own 700 would
# look for cycles among them all the time.
THRESHOLDS = (20_000, 20, 20)


def collect_seldom() -> None:
    """Called where a process begins."""
    gc.set_threshold(*THRESHOLDS)


def keep_what_is_there() -> None:
    """Called when an engine or a front end is ready: what is there stays, and need not be looked at again."""
    gc.collect()  # what nobody reaches would stay too
    gc.freeze()
