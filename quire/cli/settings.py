"""Settings on the command line: each field of a settings dataclass is an option, a variable and a key of a file."""

import dataclasses
import difflib
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from quire.cli.precedence import Precedence, Source
from quire.cli.tgi_flags import GROUP as TGI_GROUP
from quire.cli.tgi_flags import SAME
from quire.errors import InvalidSetting
from quire.files.regular_file import read_regular_text

# Settings of the engine and the server have variables; those of one answer, like its temperature, do not.
WITHOUT_VARIABLE = {"Sampling"}
# Variables of other programs that mean the same as a setting; tgi_flags has those with the setting's own name.
ALIASES = {"model": "MODEL_ID", "token": "HF_TOKEN", "offline": "HF_HUB_OFFLINE"}
OTHER_VARIABLES = ("QUIRE_GROUP_SECRET", "QUIRE_PEER_SECRET")  # read beside the settings
# Of Kubernetes, for each service of a pod's namespace.
_OF_SERVICE = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_ADDRESS = re.compile("(tcp|udp|sctp)://")
SHORT = {"port": ("--port", "-p")}
SOURCES = (
    "Settings can also be environment variables (QUIRE_MAX_BATCH_SIZE=8) or in a file. Options override variables, and "
    "variables the file. HF_TOKEN, HF_HUB_OFFLINE and the variables of text-generation-inference (MODEL_ID, "
    "MAX_BATCH_SIZE) work too."
)
FILE_TYPES: dict[type, tuple[type, ...]] = {float: (int, float), Path: (str,)}  # types that a file may have for these


def with_settings(command: Callable[..., None], *, is_sourced: bool = True) -> Callable[..., None]:
    """Give a command one option for each field of the dataclasses among its parameters, and `--config`.

    Options override the environment, which overrides the file, which overrides the defaults. The command is called with
    the dataclasses, and with the Precedence of their fields if it has a parameter for it. Where `is_sourced` is false
    there is no file.
    """
    kinds: dict[str, type] = {}
    told = [name for name, one in inspect.signature(command).parameters.items() if one.annotation is Precedence]
    parameters: list[inspect.Parameter] = []
    known: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
            kinds[parameter.name] = parameter.annotation
        elif parameter.annotation is not Precedence:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    for kind in kinds.values():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            assert field.name not in known, f"two settings are called {field.name}"
            known[field.name] = hints[field.name]
            parameters.append(_option(field, hints[field.name]))
    if is_sourced:
        parameters.append(_file_option(known))
    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def run(context: typer.Context, **given: Any) -> None:
        given.pop("config_file", None)  # its values have arrived as defaults
        for name, kind in kinds.items():
            values = {field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
            given[name] = kind(**{key: _value(value) for key, value in values.items()})
        fields = [field for kind in kinds.values() for field in dataclasses.fields(kind)]
        command(**given, **{name: _precedence(context, fields) for name in told})

    run.__name__, run.__doc__ = command.__name__, f"{command.__doc__}\n\n{SOURCES if is_sourced else ''}"
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _value(given: Any) -> Any:
    """The value of a setting as its dataclass has it. A shell leaves the ~ of --cache-folder=~/pages as it is."""
    if isinstance(given, Path):
        return Path(os.path.expanduser(given))  # Path's own raises where there is no such home
    return tuple(given) if isinstance(given, list) else given


def variables_of(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """The environment variables that a setting is read from; the first that is set counts."""
    group, own = field.metadata["group"], field.name.upper()
    if group in WITHOUT_VARIABLE or field.metadata.get("variable", own) is None:
        return ()
    if group == TGI_GROUP:
        return (own,)
    aliases = [own] if field.name in SAME else [ALIASES[field.name]] if field.name in ALIASES else []
    return (f"QUIRE_{own}", *aliases)


def _precedence(context: typer.Context, fields: "list[dataclasses.Field[Any]]") -> Precedence:
    sources: dict[str, Source] = {}
    for field in fields:
        given = context.get_parameter_source(field.name)
        kind = "DEFAULT" if given is None else given.name
        if kind == "ENVIRONMENT":
            variable = next(name for name in variables_of(field) if os.environ.get(name))
            sources[field.name] = Source.VARIABLE if variable.startswith("QUIRE_") else Source.ALIAS
        elif kind != "DEFAULT":
            sources[field.name] = Source.FILE if kind == "DEFAULT_MAP" else Source.OPTION
    return Precedence(sources)


def forget_service_links(environment: MutableMapping[str, str]) -> None:
    """Remove the addresses that Kubernetes puts into variables that settings have: beside a service that is called
    quire, QUIRE_PORT is tcp://10.0.0.1:8000, and beside one that is called prometheus, so is PROMETHEUS_PORT."""
    for name in [name for name, value in environment.items() if name.endswith("_PORT") and _ADDRESS.match(value)]:
        del environment[name]


def refuse_misspelt(kinds: Iterable[type], environment: Mapping[str, str]) -> list[str]:
    """Raise where a variable is almost that of a setting: a server must not run without the keys of QUIRE_API_KEYS.
    Returns the others that begin with QUIRE_ and do nothing, without those that Kubernetes makes of a service's name.
    """
    unknown = []
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    known = [name for field in fields for name in variables_of(field) if name.startswith("QUIRE_")]
    for name in sorted(environment):
        if not name.startswith("QUIRE_") or name in known or name in OTHER_VARIABLES or _OF_SERVICE.fullmatch(name):
            continue
        close = difflib.get_close_matches(name[6:], [one[6:] for one in known], n=1, cutoff=0.8)
        if close:
            raise InvalidSetting(f"there is no variable {name}; did you mean QUIRE_{close[0]}?")
        unknown.append(name)
    return unknown


def _option(field: "dataclasses.Field[Any]", hint: Any) -> inspect.Parameter:
    group = field.metadata["group"]
    default: Any = field.default
    if get_origin(hint) is tuple:  # an option that can be given several times
        hint, default = list[get_args(hint)[0]], list(default)  # type: ignore[misc]
    option = typer.Option(
        *SHORT.get(field.name, ()),
        help=field.metadata["help"],
        rich_help_panel=group,
        envvar=list(variables_of(field)),
        show_envvar=False,  # described once, below
        show_default=field.default not in (None, (), ""),
        min=field.metadata.get("min"),
        hidden=field.metadata.get("hidden", False),
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
    )


def _file_option(known: dict[str, Any]) -> inspect.Parameter:
    def take_file(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None:
            context.default_map = {**(context.default_map or {}), **read_settings(file, known)}
        return file

    option = typer.Option(
        "--config",
        metavar="FILE",
        help="A TOML file of settings, as in max_batch_size = 8.",
        callback=take_file,
        is_eager=True,  # parsed before the options that it gives defaults to
        exists=True,
        dir_okay=False,
    )
    return inspect.Parameter(
        "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def read_settings(file: Path, known: dict[str, Any]) -> dict[str, Any]:
    """The settings in a TOML file; `known` has the type of each setting."""
    try:
        found = tomllib.loads(read_regular_text(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSetting(f"{file} cannot be read as TOML: {error}") from error
    for name, value in found.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
            raise InvalidSetting(f"{file}: there is no setting {name!r}{hint}")
        wanted = _plain_type(known[name])
        if type(value) not in FILE_TYPES.get(wanted, (wanted,)):
            raise InvalidSetting(f"{file}: {name} is {value!r}; it must be of type {wanted.__name__}")
    return found


def _plain_type(hint: Any) -> type:
    """`int` of `int | None`, and `list` of `tuple[str, ...]`."""
    if get_origin(hint) is tuple:
        return list
    options = [option for option in getattr(hint, "__args__", (hint,)) if option is not type(None)]
    kind: type = options[0]
    return kind
