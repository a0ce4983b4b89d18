"""Progress of long work on files."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from quire.files.standard_error import standard_error

log = logging.getLogger(__name__)

Report = Callable[[int, int], None]  # done, in all
Progress = Callable[[str], AbstractContextManager[Report]]  # opened with a label, for one piece of work


@contextmanager
def progress_bar(label: str) -> Iterator[Report]:
    """A bar of bytes on standard error; where that is no terminal, one line at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeElapsedColumn(), console=Console(file=standard_error(), stderr=True)) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def share_bar(label: str) -> Iterator[Report]:
    """The same for work that is not counted in bytes: how much of it is done, in percent."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(file=standard_error(), stderr=True)) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def logged(label: str) -> Iterator[Report]:
    """Lines of the log at the beginning and the end in place of a bar, where programs read them."""
    begun_s = time.monotonic()
    log.info("%s", label)
    yield lambda done, total: None
    log.info("%s is done", label, extra={"seconds": round(time.monotonic() - begun_s, 1)})


def silent(label: str) -> AbstractContextManager[Report]:
    """Show nothing: for tests, and for callers that report progress themselves."""
    del label
    return nullcontext(lambda done, total: None)
