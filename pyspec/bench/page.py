"""A `BenchResult` as one self-contained HTML page with plots. Needs matplotlib: ``pyspec[plot]``."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

from pyspec.bench.figures import BenchResult, DraftResult
from pyspec.bench.report import headline, render
from pyspec.errors import ArgumentError

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
pre { overflow-x: auto; font-size: 12px; line-height: 1.25; background: #f6f6f4; padding: 1rem }
figure { margin: 0 } svg { max-width: 100%; height: auto } .note { color: #666 }
"""
_WIDTH = 8.0


def require_plots() -> Any:
    """matplotlib.

    Raises:
        ArgumentError: It is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ArgumentError(
            'the HTML page needs matplotlib, which is not installed: pip install "pyspec[plot]"'
        ) from None
    matplotlib.use("svg")
    return matplotlib


def page(result: BenchResult) -> str:
    """The page: plots of what was measured, the tables, and the JSON.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    require_plots()
    parts = [f"<h1>pyspec bench</h1><p>{html.escape(headline(result))}</p>"]
    if result.interrupted:
        parts.append("<p><strong>Interrupted: not all was measured.</strong></p>")
    for title, note, draw, wanted in _PLOTS:
        if wanted(result):
            parts.append(
                f'<h2>{title}</h2><p class="note">{note}</p><figure>{_svg(draw, result)}</figure>'
            )
    parts.append(f"<h2>Figures</h2><pre>{html.escape(_tables(result))}</pre>")
    data = html.escape(json.dumps(result.as_dict(), indent=1, ensure_ascii=False))
    parts.append(f"<details><summary>JSON</summary><pre>{data}</pre></details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>pyspec bench</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _tables(result: BenchResult) -> str:
    out = io.StringIO()
    render(result, Console(file=out, width=140, highlight=False, color_system=None))
    return out.getvalue()


def _svg(draw: Callable[[BenchResult, Any], None], result: BenchResult) -> str:
    from matplotlib.figure import Figure

    rows = max(len(result.results), 4)
    figure = Figure(figsize=(_WIDTH, 1.2 + 0.32 * rows), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    draw(result, axes)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _speed(result: BenchResult, axes: Any) -> None:
    own = result.results[::-1]
    names = [one.draft for one in own]
    middle = [one.decode_tps.median for one in own]
    reach = [
        [one.decode_tps.median - one.decode_tps.min for one in own],
        [one.decode_tps.max - one.decode_tps.median for one in own],
    ]
    colours = ["C0" if one.kind == "pyspec" else "0.6" for one in own]
    axes.barh(names, middle, xerr=reach, color=colours, error_kw={"lw": 1, "alpha": 0.5})
    for at, one in enumerate(own):
        axes.text(0, at, f" {one.speedup.median:.2f}x", va="center", color="white", weight="bold")
    axes.set_xlabel("tokens per second")


def _acceptance(result: BenchResult, axes: Any) -> None:
    for one in _drafting(result):
        rates = one.acceptance_by_depth
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=one.draft)
    axes.set_xlabel("depth")
    axes.set_ylabel("share accepted")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)


def _cost(result: BenchResult, axes: Any) -> None:
    nodes = [one.nodes for one in result.cost]
    axes.plot(nodes, [one.ms.min for one in result.cost], marker="o", color="C0", label="ms a pass")
    axes.fill_between(
        nodes,
        [one.ms.min for one in result.cost],
        [one.ms.median for one in result.cost],
        alpha=0.2,
        label="to the median",
    )
    axes.set_xlabel("nodes of a tree")
    axes.set_ylabel("milliseconds a pass")
    axes.set_ylim(bottom=0)
    chosen = next((one for one in result.results if one.draft == "auto"), None)
    if chosen is not None and chosen.trees:
        total = sum(chosen.trees.values())
        other = axes.twinx()
        other.bar(
            list(chosen.trees),
            [times / total for times in chosen.trees.values()],
            width=0.6,
            color="C1",
            alpha=0.5,
            label="chosen by the controller",
        )
        other.set_ylabel("share of the steps")
        other.set_ylim(0, 1)
        other.legend(frameon=False, loc="upper right")
    axes.legend(frameon=False, loc="upper left")


def _stages(result: BenchResult, axes: Any) -> None:
    own = [one for one in result.results if one.ms][::-1]
    names = [one.draft for one in own]
    left = [0.0] * len(own)
    for stage in own[0].ms:
        values = [one.ms[stage] for one in own]
        axes.barh(names, values, left=left, label="orchestration" if stage == "other" else stage)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("milliseconds a step")
    axes.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1))


def _layers(result: BenchResult, axes: Any) -> None:
    names = [f"{one.nodes} tokens" for one in result.layers][::-1]
    left = [0.0] * len(names)
    for kind in result.layers[0].ms:
        values = [one.ms[kind] for one in result.layers][::-1]
        axes.barh(names, values, left=left, label=kind)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("milliseconds a pass")
    axes.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1))


def _concurrency(result: BenchResult, axes: Any) -> None:
    for name in dict.fromkeys(one.draft for one in result.concurrency):
        own = [one for one in result.concurrency if one.draft == name]
        axes.plot([one.sequences for one in own], [one.tps.median for one in own], "o-", label=name)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("total tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _drafting(result: BenchResult) -> list[DraftResult]:
    return [one for one in result.results if one.acceptance_by_depth]


_PLOTS: tuple[
    tuple[
        str, str, Callable[[BenchResult, Any], None], Callable[[BenchResult], object]
    ],
    ...,
] = (
    ("Speed", "Median and extremes; in the bars, the ratio to plain decoding of the same prompts. Peers are grey.", _speed, lambda r: r.results),
    ("Acceptance by depth", "Share of the steps with a draft at a depth that accepted one there.", _acceptance, _drafting),
    ("Cost of verification", "Time of a pass against its nodes, and how often the controller chose a tree of that size.", _cost, lambda r: r.cost),
    ("Stages of a step", "Orchestration is what Python takes between the stages.", _stages, lambda r: [one for one in r.results if one.ms]),
    ("Layers", "Time of a pass by kind of layer.", _layers, lambda r: r.layers),
    ("Concurrency", "All requests together, reading their prompts included.", _concurrency, lambda r: r.concurrency),
)  # fmt: skip
