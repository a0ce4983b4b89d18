"""Errors about a neutral request, in the words of the API that the client used."""

import contextlib
import re
from collections.abc import Callable, Iterator

from quire.errors import InvalidRequest

OwnName = Callable[[str], str]  # the API's own name of a field of the neutral request


@contextlib.contextmanager
def named_by(own_name: OwnName) -> Iterator[None]:
    """Errors that leave the block name the API's own fields."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            own = own_name(error.param)
            # The message has the name once, mostly at its beginning.
            error.message = re.sub(rf"(?<!\w){re.escape(error.param)}(?!\w)", lambda _: own, error.message, count=1)
            error.args = (error.message,)
            error.param = own
        raise
