"""`quire health`: whether a server would answer."""

from typing import Annotated

import typer


def health(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[ADDRESS]", help="As in http://127.0.0.1:8000; by default the server of this user on this machine."
        ),
    ] = None,
) -> None:
    """Ask a running server whether it would answer requests; exit with 1 and the reason if not."""
    from quire.server.health_check import check_health

    print(check_health(address))
