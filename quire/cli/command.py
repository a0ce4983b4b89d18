"""Typer's commands, with help for narrow terminals, and with advice about vLLM's flags."""

import shutil
from typing import Any

from typer.core import TyperCommand

from quire.cli.vllm_flags import advice
from quire.errors import InvalidSetting

WIDE = 110  # columns; in fewer, typer's tables cut the names of options off


class Command(TyperCommand):
    """Help with whole names of options, in tables where they fit."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if shutil.get_terminal_size().columns >= WIDE:
            super().format_help(ctx, formatter)
        else:
            super(TyperCommand, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Plain text, in the groups of the tables. The help of a long name begins below it."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            described = one.get_help_record(ctx)
            if described is not None:
                other = "Arguments" if one.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(one, "rich_help_panel", None) or other, []).append(described)
        for group, options in groups.items():
            with formatter.section(group):
                formatter.write_dl(options)


class ServeCommand(Command):
    """`quire serve`, with errors that name the option that is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # parsing empties it
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption of click, or of the copy of it that newer versions of typer have
            hint = advice(given) if hasattr(error, "possibilities") else None
            if hint is None:
                raise
            raise InvalidSetting(hint) from error
