"""``pyspec serve``: an OpenAI-compatible server."""

from __future__ import annotations

import errno
import socket
from typing import Any

import click

from pyspec.cli import console, options
from pyspec.errors import ArgumentError
from pyspec.generate import Engine
from pyspec.model_file import DEMO
from pyspec.server.app import create_app
from pyspec.server.shutdown import SECONDS, GracefulServer


@click.command()
@options.model_argument
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
    default=1,
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
@options.draft_options
@options.engine_options
def serve(
    model: str,
    host: str,
    port: int,
    timeout: float | None,
    shutdown_seconds: float,
    **values: Any,
) -> None:
    """Serve a model over the OpenAI and Anthropic APIs."""
    config, draft = options.take_engine(values), options.take_draft(values)
    with _bind(host, port) as listener:  # before the model is loaded: a taken port shows at once
        with console.progress("Loading") as report:
            engine = Engine(model, draft, config, progress=report)
        with engine:
            name = DEMO if model == DEMO else engine.file.path.stem
            server = GracefulServer(
                create_app(engine, name, timeout=timeout),
                shutdown_seconds,
                log_level="info" if config.verbose else "warning",
            )
            address = listener.getsockname()
            click.echo(
                f"Serving {name} on http://{_url_host(address[0])}:{address[1]} "
                f"(draft {engine.drafter.name}, {config.n_slots} slots of {engine.n_ctx} tokens)"
            )
            server.run(sockets=[listener])


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
