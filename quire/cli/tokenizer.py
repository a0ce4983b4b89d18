"""`quire tokenizer`: the tokenizer of a model as files."""

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.command import Command
from quire.cli.console import log_to_stderr
from quire.cli.settings import with_settings
from quire.errors import InvalidSetting
from quire.settings.config import Config

tokenizer = typer.Typer(help="Work with the tokenizer of a model.", no_args_is_help=True)


@tokenizer.callback()
def _commands() -> None: ...


@with_settings
def export(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; it is created if missing.")],
    config: Config,
) -> None:
    """Write tokenizer and chat templates as files that transformers' AutoTokenizer loads, also of a GGUF model."""
    log_to_stderr(quiet=True)
    from quire.files.model_files import locate
    from quire.files.progress import progress_bar
    from quire.text.chat import load_chat_templates
    from quire.text.tokenizer import load_tokenizer
    from quire.text.tokenizer_files import write_tokenizer

    files = locate(**config.place_of_model, progress=progress_bar)
    if files.tokenizer is None:
        raise InvalidSetting(f"{files.name} has no tokenizer")
    loaded = load_tokenizer(files.tokenizer)
    templates = load_chat_templates(files.tokenizer, loaded.special_tokens, override=config.chat_template)
    max_tokens = files.config.get("max_position_embeddings")
    for file in write_tokenizer(folder, loaded, templates, max_tokens=max_tokens):
        print(file)


tokenizer.command(cls=Command)(export)
