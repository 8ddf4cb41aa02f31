"""Layers on remote devices (RPC): two servers on this machine, over which a model is split.

Runs where the libraries were built with ``-DGGML_RPC=ON`` (docs/build.md). A server may be of any
build, so none is taken to have the ops of the recurrent layers: hybrids with such layers there are
decoded plainly, and say so. Attention needs no op of its own, so trees are verified there.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pyspec
from pyspec import Engine
from pyspec.config import EngineConfig, SamplingConfig
from pyspec.errors import ModelError
from pyspec.native import NativeEngine
from tests.bench.llama_tree import llama_cpp
from tests.synthetic_models import Synthetic, synthetic  # noqa: F401

LIB = Path(pyspec.__file__).parent / "lib"
RPC = next(LIB.glob("libggml-rpc.*"), None)
pytestmark = pytest.mark.skipif(RPC is None, reason="the libraries are built without GGML_RPC")

SERVER = """
import ctypes, sys
from pathlib import Path
ggml, rpc = (ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in sys.argv[1:3])
ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_get(0))
rpc.ggml_backend_rpc_start_server(sys.argv[3].encode(), None, ctypes.c_size_t(1), ctypes.c_size_t(1), devices)
"""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def remote() -> Iterator[None]:
    """Two servers, registered as devices of this process."""
    assert RPC is not None
    ggml = ctypes.CDLL(str(LIB / RPC.name.replace("-rpc", "")))
    rpc = ctypes.CDLL(str(RPC))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    servers = []
    try:
        for port in (_free_port(), _free_port()):
            endpoint = f"127.0.0.1:{port}"
            arguments = [sys.executable, "-c", SERVER, ggml._name, rpc._name, endpoint]
            servers.append(subprocess.Popen(arguments, stdout=subprocess.DEVNULL))
            _await(port)
            ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))
        yield
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _await(port: int) -> None:
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"no server on port {port}")


@pytest.mark.parametrize("layers", [-1, 1, 0])
def test_a_hybrid_decodes_as_on_the_cpu(
    remote: None, model: Path, plain: Engine, layers: int
) -> None:
    """All layers remote: plainly, with the reason; none or the head alone: speculating."""
    expected = plain.complete("def main(", max_tokens=30, temperature=0).tokens
    with Engine(model, "mtp", n_ctx=256, n_threads=1, n_gpu_layers=layers) as engine:
        assert (engine.drafter.name == "none") == (layers < 0)
        assert (engine.plain_because is not None) == (layers < 0)
        assert engine.complete("def main(", max_tokens=30, temperature=0).tokens == expected


@pytest.mark.parametrize(
    "placed",
    [{"tensor_split": (1.0, 3.0)}, {"tensor_split": (0.0, 1.0)}, {"split_mode": "none", "main_gpu": 1}],
    ids=["shares", "second", "one"],
)  # fmt: skip
def test_devices_share_as_told(
    remote: None, model: Path, plain: Engine, placed: dict[str, object]
) -> None:
    expected = plain.complete("def main(", max_tokens=8, temperature=0).tokens
    with Engine(model, "none", n_ctx=256, n_threads=1, n_gpu_layers=-1, **placed) as engine:
        assert engine.complete("def main(", max_tokens=8, temperature=0).tokens == expected


def test_an_unknown_device_is_refused(remote: None, model: Path) -> None:
    with pytest.raises(ModelError, match="main_gpu: 9"):
        Engine(model, "none", n_ctx=256, n_gpu_layers=-1, split_mode="none", main_gpu=9)


@pytest.mark.parametrize("layers", [-1, 2])
def test_attention_verifies_trees(
    remote: None,
    synthetic: Synthetic,  # noqa: F811
    layers: int,
) -> None:
    """Committed paths and their logits, against the CPU; the servers run the same kernels here."""
    path = synthetic("gemma3")
    rng = np.random.default_rng(1)
    options = {"n_ctx": 512, "max_nodes": 16}
    with (
        NativeEngine.open(path, EngineConfig(n_threads=1, n_gpu_layers=layers), **options) as far,
        NativeEngine.open(path, EngineConfig(n_threads=1, n_gpu_layers=0), **options) as near,
    ):
        assert far.info.tree
        prompt = rng.integers(256, size=30).tolist()
        for engine in (far, near):
            engine.prefill(0, prompt)
        for size in rng.integers(2, 16, 12).tolist():
            tokens = rng.integers(near.info.n_vocab, size=size).tolist()
            parents = [-1, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, size))]
            far.verify([(0, tokens, parents)])
            accepted = [size - 1]
            while parents[accepted[0]] >= 0:
                accepted.insert(0, parents[accepted[0]])
            rows = [far.logits(0, node) for node in accepted]
            far.commit(0, accepted)
            for node, row in zip(accepted, rows, strict=True):
                near.verify([(0, [tokens[node]], [-1])])
                np.testing.assert_array_equal(row, near.logits(0, 0))
                near.commit(0, [0])


def test_rows_cross_one_by_one(
    remote: None,
    synthetic: Synthetic,  # noqa: F811
) -> None:
    """Logits stay on the device: single rows, all of them, and tokens chosen there, agree."""
    rng = np.random.default_rng(2)
    config = EngineConfig(n_ctx=256, n_threads=1, n_gpu_layers=-1, n_slots=2, graph_argmax=True)
    with NativeEngine.open(synthetic("gemma3"), config, max_nodes=8) as far:
        sampler = far.sampler(SamplingConfig(temperature=0))
        for _ in range(8):
            trees = []
            for slot, size in enumerate(rng.integers(1, 8, 2).tolist()):
                tokens = rng.integers(far.info.n_vocab, size=size).tolist()
                trees.append((slot, tokens, [-1, *(int(rng.integers(i)) for i in range(1, size))]))
            nodes = [(slot, node) for slot, tokens, _ in trees for node in range(len(tokens))]
            far.verify(trees)
            pointer = llama_cpp.llama_get_logits(far.context_address)
            shape = len(nodes), far.info.n_vocab
            whole = dict(zip(nodes, np.ctypeslib.as_array(pointer, shape).copy(), strict=True))
            far.verify(trees, greedy=True)
            for slot, node in rng.permutation(nodes).tolist():
                row = whole[slot, node]
                assert far.sample(sampler, slot, node) == row.argmax()
                np.testing.assert_array_equal(far.logits(slot, node), row)
            for slot in range(2):
                far.commit(slot, [0])
        sampler.close()
