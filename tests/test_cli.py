"""The command line: results, formats, and one clear line for everything that is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.cli import main

COMMAND = [sys.executable, "-c", "from pyspec.cli import main; main(prog_name='pyspec')"]


def run(*arguments: str, stdin: bytes = b"") -> Result:
    result = CliRunner().invoke(main, arguments, input=stdin, prog_name="pyspec")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def generate(*arguments: str, stdin: bytes = b"") -> dict:
    result = run("generate", "demo", "--threads", "1", "--json", *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


# ---- generate ----


def test_json_object() -> None:
    found = generate(
        "-p", "import os\n", "-n", "12", "--temp", "0", "--draft", "mtp", "--ignore-end"
    )
    assert list(found) == ["tokens", "text", "finish_reason", "stats"]
    assert len(found["tokens"]) == 12
    assert found["finish_reason"] == "length"
    assert found["stats"]["draft"] == "mtp"
    assert found["stats"]["generated"] == 12
    assert set(found["stats"]["ms"]) == {"draft", "verify", "sample", "commit", "other"}


@pytest.mark.parametrize("options", [("--temp", "0"), ("--temp", "0.8", "--seed", "3")])
@pytest.mark.parametrize("prompt", ["", "a", "class Shape:\n"], ids=["empty", "one-token", "code"])
def test_same_tokens_with_and_without_drafts(options: tuple[str, ...], prompt: str) -> None:
    shared = ("-p", prompt, "-n", "40", "--ignore-end", *options)
    assert (
        generate(*shared, "--draft", "mtp")["tokens"]
        == generate(*shared, "--draft", "none")["tokens"]
    )


def test_prompt_sources_agree(tmp_path: Path) -> None:
    prompt = "# naïve\ndef f("
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    rest = ("-n", "10", "--temp", "0", "--ignore-end")
    found = [
        generate("-p", prompt, *rest)["tokens"],
        generate("-f", str(file), *rest)["tokens"],
        generate("-", *rest, stdin=prompt.encode())["tokens"],
    ]
    assert found[0] == found[1] == found[2]


def test_prompt_may_end_inside_a_character(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("# café".encode()[:-1])
    rest = ("-n", "10", "--temp", "0", "--ignore-end", "-f", str(file))
    assert (
        generate(*rest, "--draft", "mtp")["tokens"] == generate(*rest, "--draft", "none")["tokens"]
    )


def test_text_goes_to_standard_output_alone() -> None:
    result = run("generate", "demo", "-p", "import", "-n", "8", "--temp", "0", "--threads", "1")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.endswith("\n") and len(result.stdout) > 4


def test_stop_and_schema(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "green"]}')
    found = generate("-p", "colour = ", "--json-schema", str(schema))
    assert json.loads(found["text"]) in ("red", "green")
    assert found["finish_reason"] == "stop"
    plain = generate("-p", "import", "-n", "30", "--temp", "0", "--ignore-end")["text"]
    stopped = generate(
        "-p", "import", "-n", "30", "--temp", "0", "--ignore-end", "--stop", plain[3:6]
    )
    assert stopped["text"] == plain[: plain.index(plain[3:6])]


def test_chat() -> None:
    found = generate("--chat", "-p", "Say hello", "-n", "8", "--temp", "0", "--ignore-end")
    bare = generate("-p", "Say hello", "-n", "8", "--temp", "0", "--ignore-end")
    assert found["stats"]["prompt_tokens"] > bare["stats"]["prompt_tokens"]


# ---- info, bench, help ----


def test_info() -> None:
    found = json.loads(run("info", "demo", "--json", "--threads", "1").stdout)
    assert {"path", "arch", "layers", "drafts", "memory"} <= set(found)
    assert found["arch"] == "qwen35"
    assert found["description"] == "qwen35 7.1M Q8_0"
    assert found["layers"]["recurrent"] == 3 * found["layers"]["attention"] > 0
    assert found["layers"]["mtp"] == 1
    assert {"none", "mtp"} <= set(found["drafts"])
    memory = found["memory"]
    parts = ("attention_cache", "state", "rollback", "mtp_cache")
    assert memory["per_slot"] == sum(memory[part] for part in parts)
    assert all(memory[part] > 0 for part in parts)
    text = run("info", "demo", "--threads", "1").stdout
    assert "qwen35" in text and "memory per slot" in text


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for command in ("generate", "bench", "serve", "info"):
        assert command in text
        assert run(command, "--help").exit_code == 0
    assert "[default: 0]" in run("bench", "--help").stdout  # all runs decode one text
    assert "[default: a new one]" in " ".join(run("generate", "--help").stdout.split())


# ---- what is wrong gets one line ----


@pytest.fixture
def truncated(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "truncated.gguf"
    data = model.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def rewritten(model: Path, path: Path, old: bytes, new: bytes) -> Path:
    """A copy of the model with bytes of its header replaced; lengths must agree."""
    data = model.read_bytes()
    assert len(old) == len(new) and old in data
    path.write_bytes(data.replace(old, new))
    return path


@pytest.fixture
def without_mtp(model: Path, tmp_path: Path) -> Path:
    """A model that names no MTP block: the key that announces it is renamed."""
    key = b"nextn_predict_layers"
    return rewritten(model, tmp_path / "plain.gguf", key, b"x" + key[1:])


@pytest.fixture
def unknown_architecture(model: Path, tmp_path: Path) -> Path:
    return rewritten(model, tmp_path / "alien.gguf", b"qwen35", b"alien9")


def assert_one_line(arguments: list[str], *words: str) -> None:
    """The command fails in a process of its own with one line that has all `words`."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: "), line
    for word in words:
        assert word in line, line


def test_missing_file() -> None:
    assert_one_line(["generate", "nowhere.gguf", "-p", "a"], "nowhere.gguf", "No such file")


def test_truncated_file(truncated: Path) -> None:
    assert_one_line(["generate", str(truncated), "-p", "a"], "truncated.gguf")


def test_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("hello, world, this is not a model")
    assert_one_line(["info", str(path)], "notes.gguf", "not a GGUF file")


def test_file_without_mtp(without_mtp: Path) -> None:
    assert_one_line(
        ["generate", str(without_mtp), "-p", "a", "--draft", "mtp"], "plain.gguf", "no MTP block"
    )


def test_unknown_architecture(unknown_architecture: Path) -> None:
    assert_one_line(["generate", str(unknown_architecture), "-p", "a"], "alien9")


def test_context_overflow() -> None:
    assert_one_line(
        ["generate", "demo", "-p", "def f(x): pass\n" * 300, "--ctx", "256", "--threads", "1"],
        "prompt has",
        "context holds 256",
    )


def test_invalid_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    assert_one_line(["generate", "demo", "-f", str(path)], "latin.txt", "0xe9 at position 3")


def test_missing_prompt_file() -> None:
    assert_one_line(["generate", "demo", "-f", "nowhere.txt"], "nowhere.txt", "No such file")


def test_unknown_drafter_and_bad_options() -> None:
    assert_one_line(["generate", "demo", "-p", "a", "--draft", "guess"], "'guess'", "mtp")
    assert_one_line(["generate", "demo", "-p", "a", "--top-p", "2"], "top_p is 2.0")
    assert_one_line(["generate", "demo", "-p", "a", "--draft-nodes", "99"], "draft_nodes is 99")


def test_no_prompt_or_two() -> None:
    for arguments in ((), ("-p", "a", "-"), ("b", "-p", "a")):
        result = CliRunner().invoke(main, ["generate", "demo", *arguments])
        assert result.exit_code == 2
        assert "Error: " in result.stderr


# ---- signals and pipes ----


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """A long generation in a process of its own, after its first text has come."""
    options = ("-n", "4000", "--ignore-end", "--threads", "1")
    process = subprocess.Popen(
        [*COMMAND, "generate", "demo", "-p", "import", *options, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell that runs the tests in the background has them ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)
    return process


def test_interrupt_ends_with_what_there_is() -> None:
    process = start()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert out.endswith(b"\n")


def test_reader_that_goes_away() -> None:
    process = start()
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
