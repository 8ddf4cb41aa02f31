"""The command line: one module per command, shared options in `pyspec.cli.options`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from pyspec import __version__
from pyspec.cli.bench import bench
from pyspec.cli.generate import generate
from pyspec.cli.info import info
from pyspec.cli.serve import serve
from pyspec.cli.tune import tune
from pyspec.errors import AbortedError, PyspecError


class _Commands(click.Group):
    """Turns what pyspec refuses into one line and an exit code; bugs keep their traceback."""

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


for _command in (generate, bench, serve, info, tune):
    main.add_command(_command)
