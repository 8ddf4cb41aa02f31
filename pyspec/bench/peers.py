"""Peers: stock llama-server over HTTP, and a plain `llama_cpp.Llama`, measured in the same run."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspec._libs import VARIABLE
from pyspec.bench.contestants import Contestant, Run
from pyspec.bench.machine import peak_rss
from pyspec.config import DraftConfig, EngineConfig, SamplingConfig
from pyspec.drafts.dflash import DflashDrafter
from pyspec.errors import ArgumentError, ComputeError
from pyspec.model_file import ModelFile

SERVER, PYTHON = "llama-server", "llama-cpp-python"
N_MAX = (1, 2, 3, 4)
"""Most drafts a step that are tried of every kind when nothing is said."""

LOAD_SECONDS = 600.0
"""Longest that a peer may take to load its model."""

_LENGTH_FLAGS = {  # what limits the drafts of a step, where it is not --spec-draft-n-max
    "ngram-simple": "--spec-ngram-simple-size-m",
    "ngram-map-k": "--spec-ngram-map-k-size-m",
    "ngram-map-k4v": "--spec-ngram-map-k4v-size-m",
    "ngram-mod": "--spec-ngram-mod-n-max",
}
_MORE_FLAGS = {"ngram-mod": ("--spec-ngram-mod-n-min", "1")}


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Peers to measure beside pyspec.

    Attributes:
        name: ``llama-server`` or ``llama-cpp-python``.
        path: The server's program; the folder of llama.cpp's libraries, or None for those that the
            package brings.
        kinds: Values of the server's ``--spec-type``; empty for those that the file can feed.
        n_max: Most drafts a step; every one is a server of its own.
        threads: Thread counts, every one a server of its own; empty for as many as pyspec uses.
        synthetic: Probability that a draft is taken for right, by the server's own
            ``--spec-synth-rates``; its text then means nothing. None decides by the model.
        options: More options of the server.
    """

    name: str
    path: Path | None = None
    kinds: tuple[str, ...] = ()
    n_max: tuple[int, ...] = N_MAX
    threads: tuple[int, ...] = ()
    synthetic: float | None = None
    options: tuple[str, ...] = ()


def read_peer(text: str, **options: Any) -> PeerConfig:
    """A `PeerConfig` of ``llama-server=PATH`` or ``llama-cpp-python[=LIBRARY_FOLDER]``.

    Raises:
        ArgumentError: It is neither, or the path leads nowhere.
    """
    name, _, path = text.partition("=")
    if name not in (SERVER, PYTHON) or (name == SERVER and not path):
        raise ArgumentError(
            f"peer is {text!r}, must be {SERVER}=PATH or {PYTHON}[=FOLDER of llama.cpp's libraries]"
        )
    found = Path(path).expanduser().absolute() if path else None
    if name == SERVER and found is not None:
        if not found.is_file():
            raise ArgumentError(f"peer {SERVER}: there is no file {found}")
        if not os.access(found, os.X_OK):
            raise ArgumentError(f"peer {SERVER}: {found} is not a program")
    elif found is not None and not found.is_dir():
        raise ArgumentError(f"peer {PYTHON}: there is no folder {found}")
    return PeerConfig(name, found, **options)


@contextlib.contextmanager
def open_peers(
    configs: Sequence[PeerConfig],
    file: ModelFile,
    draft: DraftConfig,
    engine: EngineConfig,
    sampling: SamplingConfig,
    *,
    n_ctx: int,
    threads: int,
) -> Iterator[list[Contestant]]:
    """Starts all peers, and ends them whatever happens."""
    with contextlib.ExitStack() as stack:
        found: list[Contestant] = []
        for config in configs:
            for count in config.threads or (threads,):
                options = {"n_ctx": n_ctx, "threads": count, "gpu_layers": engine.n_gpu_layers}
                if config.name == PYTHON:
                    python = LlamaCppPython(config, file.path, sampling, **options)
                    found.append(stack.enter_context(contextlib.closing(python)))
                    continue
                for kind, n_max in _sweep(config, file, draft):
                    server = LlamaServer(
                        config,
                        file.path,
                        sampling,
                        kind=kind,
                        n_max=n_max,
                        slots=engine.n_slots,
                        drafter=DflashDrafter.file_for(file, draft),
                        **options,
                    )
                    found.append(stack.enter_context(contextlib.closing(server)))
        yield found


def _sweep(config: PeerConfig, file: ModelFile, draft: DraftConfig) -> list[tuple[str | None, int]]:
    """Kinds of speculation with their lengths; plain decoding first."""
    kinds = list(config.kinds)
    if not kinds:
        kinds = ["ngram-simple"]
        if DflashDrafter.file_for(file, draft) is not None:
            kinds.insert(0, "draft-dflash")
        if file.mtp_layers:
            kinds.insert(0, "draft-mtp")
    plain: list[tuple[str | None, int]] = [(None, 0)]
    return plain + [(kind, n) for kind in kinds if kind != "none" for n in config.n_max]


class LlamaServer(Contestant):
    """A llama-server process of its own, on a free port of the loopback interface.

    Raises:
        ArgumentError: The program is no llama-server, or refuses its options.
        ComputeError: It ended, or did not load its model in time.
    """

    kind = SERVER

    def __init__(
        self,
        config: PeerConfig,
        model: Path,
        sampling: SamplingConfig,
        *,
        kind: str | None,
        n_max: int,
        n_ctx: int,
        threads: int,
        slots: int = 1,
        gpu_layers: int = -1,
        drafter: Path | None = None,
    ) -> None:
        assert config.path is not None
        self.name = f"{SERVER} {kind}/{n_max}" if kind else f"{SERVER} none"
        if len(config.threads) > 1:
            self.name += f" t{threads}"
        self.threads = threads
        self.slots = slots
        self._sampling = sampling
        self._path = config.path
        self._port = _free_port()
        command = [
            str(config.path),
            *("--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--threads", str(threads), "--ctx-size", str(n_ctx * slots)),
            *("--parallel", str(slots)),
            *(("--n-gpu-layers", str(gpu_layers)) if gpu_layers >= 0 else ()),
            *_spec_flags(kind, n_max, config.synthetic, drafter),
            *config.options,
        ]
        environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise ArgumentError(f"peer {SERVER}: {config.path}: {error.strerror}") from None
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        """Waits until the model is loaded."""
        end = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ArgumentError(
                    f"peer {SERVER}: {self._path} ended with status {self._process.returncode} "
                    f"before it served: {self._last_words()}"
                )
            try:
                status, found = self._ask("GET", "/health", timeout=5)
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
                continue
            except ValueError:
                raise ArgumentError(
                    f"peer {SERVER}: {self._path} answers /health with something else than JSON: "
                    "it is no llama-server"
                ) from None
            if status == 200 and isinstance(found, dict) and found.get("status") == "ok":
                return
            if status not in (200, 503):
                raise ArgumentError(
                    f"peer {SERVER}: {self._path} answers /health with status {status}: "
                    "it is no llama-server"
                )
            time.sleep(0.05)
        raise ComputeError(f"peer {SERVER}: the model was not loaded in {LOAD_SECONDS:.0f} s")

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        try:
            status, found = self._ask("POST", "/completion", self._body(prompt, max_tokens))
        except (OSError, http.client.HTTPException) as error:
            raise ComputeError(f"peer {self.name}: {error}: {self._last_words()}") from None
        if status != 200:
            raise ComputeError(f"peer {self.name}: status {status}: {json.dumps(found)[:300]}")
        times = found["timings"]
        tokens = [int(token) for token in found.get("tokens", [])]
        return Run(
            tokens,
            max(int(times["predicted_n"]) - 1, 0),
            float(times["predicted_ms"]),
            int(times["prompt_n"]),
            float(times["prompt_ms"]),
            int(times.get("draft_n", 0)),
            int(times.get("draft_n_accepted", 0)),
        )

    def decode_together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float | None:
        if len(prompts) > self.slots:
            return None
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            runs = list(pool.map(lambda prompt: self.decode(prompt, max_tokens), prompts))
        return sum(run.decoded + 1 for run in runs) / (time.perf_counter() - began)

    @property
    def peak_rss(self) -> int | None:
        """Bytes of resident memory at their highest."""
        return peak_rss(self._process.pid)

    def close(self) -> None:
        """Ends the process."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        sampling = self._sampling
        return {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "typical_p": sampling.typical_p,
            "repeat_penalty": sampling.repeat_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repeat_last_n": sampling.penalty_last_n,
            "seed": sampling.seed or 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 3600
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def _last_words(self) -> str:
        if self._log.closed:
            return "it was closed"
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or "it said nothing"


def _spec_flags(
    kind: str | None, n_max: int, synthetic: float | None, drafter: Path | None
) -> list[str]:
    if kind is None:
        return []
    flags = ["--spec-type", kind, "--spec-draft-n-max", str(n_max)]
    if flag := _LENGTH_FLAGS.get(kind):
        flags += [flag, str(n_max)]
    flags += _MORE_FLAGS.get(kind, ())
    if kind in ("draft-dflash", "draft-dspark", "draft-simple") and drafter is not None:
        flags += ["--spec-draft-model", str(drafter)]
    if synthetic is not None:
        rates = ",".join(f"{synthetic ** (depth + 1):.6f}" for depth in range(n_max))
        flags += ["--spec-synth-rates", rates]
    return flags


class LlamaCppPython(Contestant):
    """A plain `llama_cpp.Llama` in a process of its own.

    Raises:
        ArgumentError: It does not start, or cannot load the model.
    """

    kind = PYTHON

    def __init__(
        self,
        config: PeerConfig,
        model: Path,
        sampling: SamplingConfig,
        *,
        n_ctx: int,
        threads: int,
        gpu_layers: int = -1,
    ) -> None:
        self.name = PYTHON if len(config.threads) < 2 else f"{PYTHON} t{threads}"
        self.threads = threads
        self._sampling = sampling
        environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
        if config.path is not None:
            environment[VARIABLE] = str(config.path)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("llama_cpp_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self._ask(
                {
                    "model_path": str(model),
                    "n_ctx": n_ctx,
                    "n_threads": threads,
                    "n_threads_batch": threads,
                    "n_gpu_layers": gpu_layers,
                    "flash_attn": True,
                }
            )
        except BaseException:
            self.close()
            raise

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        sampling = self._sampling
        found = self._ask(
            {
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "seed": sampling.seed or 0,
                "sampling": {
                    "temp": sampling.temperature,
                    "top_k": sampling.top_k,
                    "top_p": sampling.top_p,
                    "min_p": sampling.min_p,
                    "typical_p": sampling.typical_p,
                    "repeat_penalty": sampling.repeat_penalty,
                    "frequency_penalty": sampling.frequency_penalty,
                    "presence_penalty": sampling.presence_penalty,
                },
            }
        )
        tokens = found["tokens"]
        return Run(tokens, len(tokens) - 1, found["decode_ms"], len(prompt), found["prompt_ms"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None and answers is not None
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
            line = answers.readline()
        except OSError:
            line = ""
        found: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in found:
            raise ArgumentError(f"peer {PYTHON}: {found['error']}")
        return found

    @property
    def peak_rss(self) -> int | None:
        """Bytes of resident memory at their highest."""
        return peak_rss(self._process.pid)

    def close(self) -> None:
        """Ends the process."""
        if self._process.poll() is None:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return " / ".join(self._log.read().splitlines()[-2:]) or "it ended and said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
