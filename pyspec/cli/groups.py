"""Commands with many options: grouped help, environment variables, a configuration file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from pyspec.errors import ArgumentError

PREFIX = "PYSPEC_"


class GroupedCommand(click.Command):
    """Lists options under headings, and reads each from the environment, too.

    Args:
        groups: Headings and the names of their options; the others follow under "Other options".
    """

    def __init__(self, *args: Any, groups: dict[str, tuple[str, ...]], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._groups = groups
        for option in self._options():
            option.envvar = option.envvar or PREFIX + flag(option).upper().replace("-", "_")

    def _options(self) -> list[click.Option]:
        return [param for param in self.params if isinstance(param, click.Option)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one section per group."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        left = {flag(param): param for param in options}
        for heading, names in [*self._groups.items(), ("Other options", tuple(left))]:
            rows = [left.pop(name).get_help_record(ctx) for name in names if name in left]
            if shown := [row for row in rows if row is not None]:
                with formatter.section(heading):
                    formatter.write_dl(shown)


def flag(param: click.Parameter) -> str:
    """The long name of an option, without its dashes."""
    return max(param.opts, key=len).lstrip("-")


def _load(ctx: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Takes the defaults of the other options from a TOML file."""
    if file is None:
        return
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise ArgumentError(f"{file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file} is not TOML: {error}") from None
    known = {flag(param): param for param in ctx.command.params if isinstance(param, click.Option)}
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        param = known.get(key.replace("_", "-"))
        if param is None or param.name is None or param.name == "config":
            raise ArgumentError(f"{file} sets {key!r}, which is no option: see --help")
        if isinstance(value, list) is not param.multiple or isinstance(value, dict):
            rule = "a list" if param.multiple else "one value"
            raise ArgumentError(f"{file} sets {key} to {value!r}, must be {rule}")
        defaults[param.name] = value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_load,
    metavar="FILE",
    help="TOML file with options by their names here, such as: draft-depth = 4",
)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType):
    """A number of bytes, such as ``512M``."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Bytes of a text; numbers pass."""
        if isinstance(value, int):
            return value
        text = str(value).strip().upper().removesuffix("IB").removesuffix("B")
        number, unit = (text[:-1], text[-1:]) if text[-1:] in tuple("KMGT") else (text, "")
        try:
            size = int(float(number) * _UNITS[unit])
        except (ValueError, OverflowError):
            size = -1
        if size < 0:
            self.fail(f"{value!r} is no size, must be like 500M or 4G", param, ctx)
        return size


SIZE = Size()


def human(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
