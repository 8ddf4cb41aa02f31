"""The page in a real browser: headless Chromium, where it is installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pyspec.server import page
from tests.servers import Running, running

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

browser_only = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)


def open_browser(*arguments: str) -> Any:
    """Headless Chromium that resolves no name but this machine's: the page must work offline."""
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1280,860",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        *arguments,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(executable_path=DRIVER)
    return selenium.Chrome(options=options, service=service)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ("--draft", "mtp", "--draft-top-k", "2", "--slots", "2", "--api-key", "secret")
    with running(tmp_path_factory.mktemp("page"), *options) as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(server: Running) -> Iterator[Any]:
    opened = open_browser()
    try:
        yield opened
    finally:
        opened.quit()


def wait(browser: Any, until: Callable[[Any], Any], seconds: float = 20) -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, seconds, poll_frequency=0.05).until(until)


def find(browser: Any, css: str) -> Any:
    return browser.find_element("css selector", css)


def texts(browser: Any, css: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return browser.execute_script(script, css)


def set_value(browser: Any, name: str, value: Any) -> None:
    script = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('change'))"
    )
    browser.execute_script(script, name, str(value))


def enter(browser: Any, server: Running, **settings: Any) -> None:
    """Opens the page with a key and settings."""
    browser.get(server.url)
    set_value(browser, "key", "secret")
    for name, value in {"max-tokens": 60, "temperature": 0, **settings}.items():
        set_value(browser, name.replace("_", "-"), value)
    wait(browser, lambda b: "drafting with" in find(b, "#model").text)


def say(browser: Any, text: str) -> None:
    from selenium.webdriver.common.keys import Keys

    find(browser, "#prompt").send_keys(text, Keys.ENTER)


def done(browser: Any) -> bool:
    return find(browser, "#send").is_enabled() and "complete" in find(browser, "#status").text


# ---- without a browser ----


def test_everything_comes_from_this_server(server: Running) -> None:
    index = httpx.get(server.url)
    assert index.headers["Content-Type"].startswith("text/html")
    assert "default-src 'self'" in index.headers["Content-Security-Policy"]
    links = re.findall(r'(?:src|href)="([^"#]+)"', index.text)
    assert links and all(link.startswith("/page/") for link in links)
    for link in links:
        assert httpx.get(server.url + link).status_code == 200
    elsewhere = r"https?://(?!www\.w3\.org/2000/svg)[^\s\"'`]+"
    for file in page.FILES.rglob("*.*"):
        if file.suffix in (".js", ".css", ".html", ".svg"):
            assert not re.findall(elsewhere, file.read_text()), file
    for path in ("/page/%2e%2e/__init__.py", "/page/%2e%2e/%2e%2e/app.py"):
        assert httpx.get(server.url + path).status_code == 404


# ---- in Chromium ----


@browser_only
def test_a_chat_shows_what_the_api_says_tinted_by_source(browser: Any, server: Running) -> None:
    enter(browser, server)
    say(browser, "def main():")
    wait(browser, done)
    (answer,) = texts(browser, ".assistant .text")
    body = {
        "messages": [{"role": "user", "content": "def main():"}],
        "max_tokens": 60,
        "temperature": 0,
    }
    key = {"Authorization": "Bearer secret"}
    said = httpx.post(server.url + "/v1/chat/completions", json=body, headers=key, timeout=30)
    assert answer == said.json()["choices"][0]["message"]["content"]
    # every token is a span that names its source; those of the drafter are tinted
    tokens = browser.execute_script(
        "return [...document.querySelectorAll('.assistant span')]"
        ".map((e) => [e.textContent, e.dataset.source, getComputedStyle(e).backgroundColor])"
    )
    assert "".join(text for text, _, _ in tokens) == answer
    colours: dict[str, set[str]] = {}
    for _, source, colour in tokens:
        colours.setdefault(source, set()).add(colour)
    assert set(colours) == {"mtp", "target"}
    assert all(len(shades) == 1 for shades in colours.values())
    assert colours["mtp"] != colours["target"] == {"rgba(0, 0, 0, 0)"}
    live = httpx.get(server.url + "/v1/speculation", headers=key).json()["total"]
    wait(browser, lambda b: texts(b, "#legend li") == ["the model itself", "mtp"])
    assert float(find(browser, "#per-step").text) > 1
    assert len(texts(browser, "#depths tr")) == len(live["acceptance_by_depth"])
    assert find(browser, "#plain").text[-1].isdigit()
    # the last tree: a box for every node, and the same in words
    boxes = texts(browser, "#tree svg g")
    caption = find(browser, "#tree-text").text
    assert f"{len(boxes) - 1} drafts after" in caption
    kept = len(texts(browser, "#tree svg g.kept"))
    assert f"{kept - 1} accepted" in caption


@browser_only
def test_a_second_turn_reuses_the_first(browser: Any, server: Running) -> None:
    enter(browser, server, system="Some words that both turns begin with. " * 12)
    for text in ("import os", "import sys"):
        say(browser, text)
        wait(browser, done)
        wait(browser, lambda b, t=text: texts(b, ".user .text")[-1] == t)
    reused, whole = map(int, find(browser, "#cached").text.split(" of "))
    assert whole > reused > whole // 2
    assert len(texts(browser, ".assistant")) == 2


@browser_only
def test_markup_is_text(browser: Any, server: Running) -> None:
    enter(browser, server)
    evil = "<img src=x onerror=document.title=1><b>x</b>"
    say(browser, evil)
    wait(browser, done)
    assert texts(browser, ".user .text") == [evil]
    assert not texts(browser, "#log img") and browser.title == "pyspec"


@browser_only
def test_stop_and_errors(browser: Any, server: Running) -> None:
    enter(browser, server, max_tokens=3000)
    say(browser, "def main():")
    wait(browser, lambda b: len("".join(texts(b, ".assistant .text"))) > 20)
    find(browser, "#stop").click()
    wait(browser, lambda b: find(b, "#status").text in ("Stopped.", "The answer is complete."))
    wait(browser, lambda _: httpx.get(server.url + "/health").json()["running"] == 0)
    wait(browser, lambda b: find(b, "#send").is_enabled())
    find(browser, "#clear").click()
    assert not texts(browser, ".message")
    set_value(browser, "temperature", -1)
    say(browser, "y")
    wait(browser, lambda b: texts(b, ".error .text"))
    assert "temperature" in texts(browser, ".error .text")[0]
    set_value(browser, "key", "wrong")
    wait(browser, lambda b: "key is wrong" in find(b, "#model").text)
    wait(browser, lambda b: find(b, "#send").is_enabled())
    say(browser, "z")
    wait(browser, lambda b: len(texts(b, ".error .text")) == 2)
    assert browser.execute_script("return document.getElementById('settings').open")


@browser_only
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_labels(browser: Any, server: Running, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    enter(browser, server)
    say(browser, "class A:")
    wait(browser, done)
    pairs = browser.execute_script(
        "const seen = (e) => { for (; e; e = e.parentElement) { const c ="
        " getComputedStyle(e).backgroundColor; if (c !== 'rgba(0, 0, 0, 0)') return c; }"
        " return getComputedStyle(document.body).backgroundColor; };"
        "return [...document.querySelectorAll('span,p,dt,dd,li,h1,h2,h3,b,button,figcaption')]"
        ".filter((e) => e.offsetParent && !e.disabled && e.textContent)"
        ".map((e) => [getComputedStyle(e).color, seen(e), e.outerHTML.slice(0, 80)])"
    )
    for text, back, element in pairs:
        assert contrast(text, back) >= 4.5, (element, text, back)  # WCAG AA
    dark = scheme == "dark"
    assert (sum(rgb(pairs[0][1])) < 3 * 128) is dark
    unlabelled = browser.execute_script(
        "return [...document.querySelectorAll('input,textarea,button,meter')].filter((e) =>"
        " !(e.labels?.length || e.textContent || e.getAttribute('aria-label'))).length"
    )
    assert unlabelled == 0
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in severe if not re.search(r" 40[01] ", entry["message"])], severe


def rgb(colour: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


def contrast(one: str, other: str) -> float:
    """Ratio of luminances (WCAG 2.2, 1.4.3)."""

    def luminance(colour: str) -> float:
        parts = [c / 255 for c in rgb(colour)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
