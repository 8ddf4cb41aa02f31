"""Eight clients at once, a few seconds here and minutes with ``--full``: no error, no leak."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.bench.soak import drift, options_of, soak
from tests.servers import running


@pytest.mark.parametrize("seconds", [10, pytest.param(300, marks=pytest.mark.full, id="5-minutes")])
def test_eight_clients_at_once(tmp_path: Path, seconds: int) -> None:
    options = ("--draft", "mtp", "--slots", "4", "--cache-ram", "32M")
    cache = ("--cache-dir", str(tmp_path / "cache"), "--cache-disk", "64M")
    with running(tmp_path, *options, *cache) as server:
        report = asyncio.run(soak(server.url, server.process.pid, seconds, clients=8))
        assert server.stop() == 0
        log = server.log.read_text()
    assert report.errors == []
    assert report.requests >= 8 and report.cancelled >= 1
    assert "Traceback" not in log and "ignored" not in log
    if seconds > 60:
        assert drift(report.rss[len(report.rss) // 3 :]) < 0.05, report.rss


def test_drift_is_growth_after_the_warm_up() -> None:
    assert drift([100] * 9) == 0
    assert drift([100, 101, 99, 105, 107, 104, 110, 110, 110]) == pytest.approx(0.1)


def test_ways_of_drafting_are_options_of_the_server() -> None:
    assert options_of("auto") == ["--draft", "auto"]
    assert options_of("mtp/depth=2") == ["--draft", "mtp", "--draft-depth", "2"]
