"""``pyspec serve``: an OpenAI-compatible server."""

from __future__ import annotations

import errno
import signal
import socket
from typing import Any

import click

from pyspec.cli import console, options
from pyspec.cli.groups import SIZE, GroupedCommand, config_option, human
from pyspec.errors import ArgumentError
from pyspec.generate import Engine
from pyspec.info import report as report_of
from pyspec.model_file import DEMO
from pyspec.server.app import create_app
from pyspec.server.memory import return_freed_memory
from pyspec.server.security import SecurityConfig
from pyspec.server.shutdown import SECONDS, GracefulServer

SECURITY = SecurityConfig()


GROUPS = {
    "Model": ("ctx", "threads", "gpu-layers", "cache-type-k", "cache-type-v"),
    "Speculation": (
        "draft",
        "draft-model",
        "draft-depth",
        "draft-top-k",
        "draft-width",
        "draft-nodes",
        "draft-head-rows",
        "draft-cache-type-k",
        "draft-cache-type-v",
    ),
    "Serving": ("host", "port", "slots", "queue", "timeout", "shutdown-seconds"),
    "Prompts that begin alike": ("cache-ram", "cache-dir", "cache-disk"),
    "Safety": ("api-key", "cors", "max-body", "max-json-depth", "max-stops", "max-choices"),
    "General": ("config", "verbose", "help"),
}

EPILOG = """Every option can also be set by an environment variable, --draft-top-k by
PYSPEC_DRAFT_TOP_K, and by --config. The command line comes first, then the environment, then the
file."""


@click.command(cls=GroupedCommand, groups=GROUPS, epilog=EPILOG)
@options.model_argument
@config_option
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="H", help="Address to bind."
)
@click.option(
    "--port",
    default=8080,
    show_default=True,
    metavar="P",
    type=click.IntRange(0, 65535),
    help="Port to bind; 0 takes a free one.",
)
@click.option(
    "--slots",
    "n_slots",
    type=int,
    default=4,
    show_default=True,
    metavar="N",
    help="Requests decoded at the same time; more wait in line.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    metavar="S",
    help="Seconds that a request may take when it does not say.  [default: no limit]",
)
@click.option(
    "--shutdown-seconds",
    type=click.FloatRange(min=0),
    default=SECONDS,
    show_default=True,
    metavar="S",
    help="Seconds that running answers may take to end when the server is stopped.",
)
@click.option(
    "--queue",
    "max_waiting",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    metavar="N",
    help="Requests that may wait in line; more are refused.",
)
@click.option(
    "--cache-ram",
    type=SIZE,
    default=None,
    metavar="SIZE",
    help="Memory for states that later prompts go on from, as 2G; 0 keeps none.  "
    "[default: a quarter of the free memory]",
)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False),
    default=None,
    metavar="DIR",
    help="Keep these states in DIR, too, so that they survive a restart.",
)
@click.option(
    "--cache-disk",
    type=SIZE,
    default=None,
    metavar="SIZE",
    help="Most bytes in DIR.  [default: a quarter of the free disk]",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="Ask clients for this key; may be given several times.",
)
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this origin use the server, as https://example.org; * lets all.",
)
@click.option(
    "--max-body",
    type=SIZE,
    default=SECURITY.max_body,
    metavar="SIZE",
    help=f"Longest request body.  [default: {SECURITY.max_body >> 20}M]",
)
@click.option(
    "--max-json-depth",
    "max_depth",
    type=int,
    default=SECURITY.max_depth,
    show_default=True,
    metavar="N",
    help="Deepest JSON of a request, schemas included.",
)
@click.option(
    "--max-stops",
    type=int,
    default=SECURITY.max_stops,
    show_default=True,
    metavar="N",
    help="Most stop strings of a request.",
)
@click.option(
    "--max-choices",
    type=int,
    default=SECURITY.max_choices,
    show_default=True,
    metavar="N",
    help="Most choices or prompts of a request.",
)
@options.draft_options
@options.engine_options
def serve(
    model: str,
    host: str,
    port: int,
    max_waiting: int,
    timeout: float | None,
    shutdown_seconds: float,
    **values: Any,
) -> None:
    """Serve a model over the OpenAI and Anthropic APIs, with a chat page at /.

    The page also shows live what speculation does. Prompts that begin like an earlier one are not
    read again from their start.
    """
    return_freed_memory()
    security = SecurityConfig(**options.take(SecurityConfig, values))
    config, draft = options.take_engine(values), options.take_draft(values)
    with _bind(host, port) as listener:  # before the model is loaded: a taken port shows at once
        with console.progress("Loading") as report:
            engine = Engine(model, draft, config, progress=report)
        with engine:
            name = DEMO if model == DEMO else engine.file.path.stem
            server = GracefulServer(
                create_app(engine, name, max_waiting, security, timeout),
                shutdown_seconds,
                log_level="info" if config.verbose else "warning",
            )
            click.echo(_greeting(engine, name, listener.getsockname()))
            # uvicorn raises the signal that ended it once more; what is left to save must be saved.
            signal.signal(signal.SIGTERM, lambda *_: None)
            server.run(sockets=[listener])


def _greeting(engine: Engine, name: str, address: tuple[Any, ...]) -> str:
    """One line: address, model, draft sources, slots, memory."""
    memory = report_of(engine).memory
    slots = engine.config.n_slots
    used = memory["weights"] + memory["compute"] + slots * memory["per_slot"]
    cache = (
        f", up to {human(engine.cache.limit)} of checkpoints" if engine.cache is not None else ""
    )
    return (
        f"Serving {name} on http://{_url_host(address[0])}:{address[1]} "
        f"(draft {engine.drafter.name}, {slots} {'slot' if slots == 1 else 'slots'} of "
        f"{engine.n_ctx} tokens, {human(used)}{cache})"
    )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ArgumentError(f"port {port} on {host} is in use") from None
        raise ArgumentError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
