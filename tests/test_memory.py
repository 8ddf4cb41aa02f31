"""What a process keeps in memory: weights once, and no more packages than it uses."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pyspec.bench import BenchPrompt, run
from pyspec.config import EngineConfig, SamplingConfig

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OPEN_AND_LOOK = """
import json, re, sys
import pyspec
with pyspec.Engine(sys.argv[1], "none", n_ctx=256, n_threads=1, use_mmap=sys.argv[2] == "True") as engine:
    maps = re.split(r"^(?=[0-9a-f]+-)", open("/proc/self/smaps").read(), flags=re.MULTILINE)
    ours = [part for part in maps if sys.argv[1] in part.partition(chr(10))[0]]
    held = sum(int(re.search(r"Rss: +(\\d+)", part)[1]) * 1024 for part in ours)
    found = engine.complete("def main(", max_tokens=32, temperature=0, ignore_end=True)
print(json.dumps({"mapped": len(ours), "held": held, "tokens": found.tokens}))
"""


def child(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@linux
def test_the_file_leaves_memory_when_its_weights_were_copied(model: Path) -> None:
    mapped, read = (
        json.loads(child(OPEN_AND_LOOK, str(model), str(use_mmap))) for use_mmap in (True, False)
    )
    assert mapped["mapped"] and not read["mapped"]
    # Where nothing is repacked nothing was read yet either, but for the small tensors of a pass.
    assert mapped["held"] < model.stat().st_size / 2
    assert mapped["tokens"] == read["tokens"]


HUGE = """
import sys
import pyspec
with pyspec.Engine(sys.argv[1], "none", n_ctx=256, n_threads=1):
    maps = open("/proc/self/smaps").read()
print(sum(line.startswith("VmFlags:") and " hg" in line for line in maps.splitlines()))
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages here"
)
def test_buffers_ask_for_huge_pages(model: Path) -> None:
    assert int(child(HUGE, str(model))) >= 1


FREED = """
import sys
import psutil
from pyspec.server.memory import return_freed_memory
if sys.argv[1] == "told":
    assert return_freed_memory()
blocks, small = [], []
for size in (3 << 20, 5 << 20, 9 << 20, 15 << 20, 25 << 20):
    for _ in range(8):
        blocks.append(bytearray(size))
        blocks[-1][::4096] = bytes(len(blocks[-1][::4096]))
        if len(blocks) > 4:
            blocks.pop(0)
        small.append(bytearray(100_000))  # lies behind what was freed
blocks.clear()
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has to be told")
def test_a_server_returns_what_it_freed() -> None:
    kept, returned = (int(child(FREED, how)) for how in ("as it is", "told"))
    assert returned < kept - 10e6


def test_generate_imports_what_it_needs() -> None:
    loaded = set(json.loads(child("import json, sys, pyspec.cli.generate; print(json.dumps(list(sys.modules)))")))  # fmt: skip
    assert "numpy" in loaded
    heavy = {"fastapi", "uvicorn", "jinja2", "rich", "gguf", "asyncio", "ssl", "_hashlib", "psutil"}
    assert not heavy & loaded


@linux
def test_peaks_are_of_the_child_alone(model: Path) -> None:
    ballast = np.ones(300 << 20, np.uint8)
    result = run(
        str(model),
        [],
        [BenchPrompt("def main(", "")],
        config=EngineConfig(n_ctx=256, n_threads=1),
        sampling=SamplingConfig(temperature=0),
        scenario=["memory"],
    )
    (plain,) = result.memory
    assert plain.weights < plain.peak_rss < ballast.nbytes
