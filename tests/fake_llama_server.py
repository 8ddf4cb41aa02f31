#!/usr/bin/env python3
"""Stands in for llama-server in tests: answers /health and /completion as it does.

Its text is the prompt's last token and those that follow it in number. Prompts of more than 4000
tokens are refused.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ASKED = {"health": 0}


def option(name: str) -> str | None:
    """The value of a flag on the command line."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


class Handler(BaseHTTPRequestHandler):
    """Two routes."""

    def do_GET(self) -> None:
        ASKED["health"] += 1
        if ASKED["health"] < 3:
            self.answer(503, {"error": {"code": 503, "message": "Loading model"}})
        else:
            self.answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = body["prompt"], body["n_predict"]
        if len(prompt) > 4000:
            self.answer(400, {"error": {"code": 400, "message": "exceeds the available context"}})
            return
        wanted = {"ignore_eos": True, "cache_prompt": False, "return_tokens": True}
        assert all(body[key] == value for key, value in wanted.items()), body
        assert body["seed"] == 0 and body["temperature"] == 0, body
        timings = {
            "prompt_n": len(prompt),
            "prompt_ms": 2.0 * len(prompt),
            "predicted_n": count,
            "predicted_ms": 10.0 * (count - 1),
        }
        if option("--spec-type"):
            accepted = (count - 1) // 2
            timings |= {"draft_n": count - 1, "draft_n_accepted": accepted}
        tokens = [prompt[-1] + i for i in range(1, count + 1)]
        self.answer(200, {"content": "", "tokens": tokens, "timings": timings})

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    if option("--spec-type") == "draft-unknown":
        sys.exit("error: unknown speculative type: draft-unknown")
    print(json.dumps(sys.argv[1:]), flush=True)
    ThreadingHTTPServer(
        (option("--host") or "", int(option("--port") or 0)), Handler
    ).serve_forever()
