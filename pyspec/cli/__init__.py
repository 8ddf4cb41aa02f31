"""The command line: one module per command, shared options in `pyspec.cli.options`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from pyspec import __version__
from pyspec.errors import AbortedError, PyspecError

_COMMANDS = ("generate", "bench", "serve", "info", "tune")


class _Commands(click.Group):
    """Turns what pyspec refuses into one line and an exit code; bugs keep their traceback.

    A command's module is imported when it is asked for.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"pyspec.cli.{name}"), name)
        return command

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (KeyboardInterrupt, AbortedError):
            sys.exit(130)
        except PyspecError as error:
            raise click.ClickException(" ".join(str(error).split())) from None
        except BrokenPipeError:  # the reader of our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pyspec")
def main() -> None:
    """Lossless speculative decoding for GatedDeltaNet hybrids.

    MODEL is the path of a GGUF file, or the word "demo" for the small model in the package.
    """
