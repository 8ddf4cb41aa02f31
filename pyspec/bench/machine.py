"""What figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyspec._version


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, system, and the versions of what was measured."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory": _memory(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "pyspec": pyspec._version.__version__,
        "llama_cpp_python": _version_of("llama-cpp-python"),
        "load": _load(),
    }


def peak_rss(pid: int) -> int | None:
    """Bytes of resident memory that a running process had at its highest; None where unknown.

    macOS tells the present figure alone.
    """
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    found = _output("ps", "-o", "rss=", "-p", str(pid))
    return int(found) * 1024 if found.isdigit() else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return (
        _output("sysctl", "-n", "machdep.cpu.brand_string")
        or platform.processor()
        or platform.machine()
    )


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _load() -> float | None:
    """Processes that were running or waiting during the last minute: above 0, figures suffer."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
