"""`quire serve`: a model over HTTP."""

import logging
import os
import signal
from dataclasses import replace
from typing import Annotated

import typer

from quire.cli import exit_code
from quire.cli.precedence import Precedence, Source
from quire.cli.settings import refuse_misspelt, with_settings
from quire.cli.tgi_flags import TgiFlags
from quire.errors import InvalidSetting, QuireError
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings

log = logging.getLogger(__name__)


@with_settings
def serve(
    config: Config,
    folder: FolderSettings,
    settings: ServerSettings,
    group: GroupSettings,
    peers: PeerSettings,
    flags: TgiFlags,
    precedence: Precedence,
    served: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, as with --model.", show_default=False)
    ] = None,
) -> None:
    """Serve a model over HTTP: the OpenAI API and that of text-generation-inference."""
    unknown = refuse_misspelt((Config, FolderSettings, ServerSettings, GroupSettings, PeerSettings), os.environ)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the supervisor handles it; nothing has begun that must end
    if served is not None:
        for other, name in ((config.model, "model"), (flags.model_id, "model_id")):
            if precedence[name] is Source.OPTION and other != served:
                raise InvalidSetting(f"MODEL is {served} and {name} is {other}; they mean the same")
    config, settings = flags.applied(config, settings, precedence, os.environ)
    if served is not None:
        config = replace(config, model=served)
    from quire.server.observe.logs import configure_logs
    from quire.server.processes.serve import serve as run

    configure_logs(settings.log_format, settings.logging_level)
    for warning in flags.warnings():
        log.warning("%s", warning)
    for name in unknown:
        log.warning("%s does nothing: no setting is read from it", name)
    try:
        run(config, settings, group, peers, folder)
    except QuireError as error:
        if settings.log_format != "json":
            raise
        log.critical("%s", error.message)
        raise typer.Exit(exit_code(error)) from error
