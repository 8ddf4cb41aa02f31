"""Progress on a terminal, silence elsewhere, and Ctrl-C that is heard at once."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


Report = Callable[[float], None]


def errors() -> Console:
    """The console for everything that is not the result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def progress(label: str) -> Iterator[Report | None]:
    """A bar that fills as its function is called with fractions; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors(), transient=True) as bars:
        task = bars.add_task(label, total=1.0)

        def report(done: float) -> None:
            bars.update(task, completed=done)
            if done >= 1:
                bars.stop()

        yield report


@contextmanager
def interruptible(abort: Callable[[], None]) -> Iterator[None]:
    """Calls `abort` as soon as Ctrl-C is pressed, even while native code runs.

    Python's own handler, and with it KeyboardInterrupt, waits until native code returns.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno())

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGINT:
                abort()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        watcher.join()
        reader.close()
