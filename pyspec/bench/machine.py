"""What figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyspec._version


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, system, the versions of what was measured, and `busy`: the
    cores that other processes use (`busy_elsewhere`).
    """
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory": _memory(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "pyspec": pyspec._version.__version__,
        "llama_cpp_python": _version_of("llama-cpp-python"),
        "busy": busy_elsewhere(),
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


def busy_elsewhere(seconds: float = 0.25) -> float | None:
    """Cores that other processes keep busy now; above 0, figures suffer. None where unknown.

    It is watched for so many seconds, so that what ran before, such as another benchmark, does not
    count, as it does in the load average of the last minute.
    """
    import psutil

    try:
        began, before = time.perf_counter(), _seconds_elsewhere()
        time.sleep(seconds)
        used = _seconds_elsewhere() - before
    except (OSError, psutil.Error):
        return None
    return round(max(used, 0.0) / (time.perf_counter() - began), 2)


def _seconds_elsewhere() -> float:
    """Processor time of all but this process since the machine started."""
    import psutil

    every, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # What a host took from a virtual machine (steal) counts; guests are part of user and nice.
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(every, kind, 0.0) for kind in kinds) - own.user - own.system)


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
