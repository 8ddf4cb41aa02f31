"""Anything that the OpenAPI document allows, and much that it does not: no crash, no 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.conftest import OpenEngine
from tests.servers import serve

schemathesis = pytest.importorskip("schemathesis")

PATHS = {
    "/detokenize",
    "/health",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{wanted}",
    "/v1/responses",
}

#: Streams that end when their client leaves.
ENDLESS = {"/v1/speculation/stream"}


@pytest.fixture(scope="module")
def url(open_engine: OpenEngine) -> Iterator[str]:
    with serve(open_engine("mtp", n_slots=8, n_ctx=64), max_waiting=10**6) as found:
        yield found
        assert httpx.get(f"{found}/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def fuzz(url: str, cases: int) -> None:
    """`cases` requests over all operations, valid ones and broken ones."""
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    operations = [one for one in operations if one.path not in ENDLESS]
    assert {operation.path for operation in operations} >= PATHS
    with httpx.Client(base_url=url, timeout=60) as client:
        for operation in operations:
            good = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
            bad = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
            kinds = [good, bad] if operation.body else [good]
            for kind in kinds:
                _try(client, kind, max(1, cases // len(operations) // len(kinds)))
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


def _try(client: httpx.Client, cases: st.SearchStrategy, count: int) -> None:
    @seed(1)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def one(case: object) -> None:
        answer = case.call()  # type: ignore[attr-defined]
        assert answer.status_code < 500, (case, answer.status_code, answer.text)
        if answer.status_code >= 400:
            assert "error" in answer.json()

    one()


def test_a_sample_of_requests(url: str) -> None:
    fuzz(url, 120)


@pytest.mark.full
def test_two_thousand_requests(url: str) -> None:
    fuzz(url, 2000)


WORDS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\ud800", b"\xff", b"NaN", b"1e999", b"null"]
WORDS += [b'"messages"', b'"role"', b'"user"', b'"content"', b'"prompt"', b'"stream"', b"true"]
WORDS += [b'"max_tokens"', b"1", b"-", b"9" * 400, b'"stop"', b'"input"', b"{" * 300, b"\x00"]


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(sorted(PATHS)), words=st.lists(st.sampled_from(WORDS), max_size=20))
def test_bytes_that_are_nearly_json(url: str, path: str, words: list[bytes]) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}{path}", content=b"".join(words), headers=headers, timeout=30)
    assert answer.status_code < 500, answer.text
