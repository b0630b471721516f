"""The page: one HTML file that needs no network, with plotly and the data inside. Needs the extra ``report``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from rollout_spec import __version__
from rollout_spec.metrics import METRICS, Bonus
from rollout_spec.report.panels import panels
from rollout_spec.report.runs import Run
from rollout_spec.report.samples import TextOf, samples_of
from rollout_spec.report.verdict import sentences

_MEND = "the report needs plotly and jinja2: pip install 'rollout-spec[report]'"


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the page draws, but for the samples; what the live page sends again and again."""
    said = sentences(runs)
    return {
        "runs": [
            {
                "name": run.name,
                "rounds": run.num_rounds,
                "drafters": sorted(run.drafters),
                "verifiers": sorted(run.verifiers),
                "budget": run.settings.get("budget", ""),
                "model": run.settings.get("model", ""),
                "notes": run.notes,
                "verdict": [{"level": sentence.level.value, "text": sentence.text} for sentence in told],
                "binWidth": run.bins.width,
            }
            for run, told in zip(runs, said, strict=True)
        ],
        "panels": [panel.record() for panel in panels(runs)],
        "table": metrics_table(runs),
    }


def metrics_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every metric that is one number, with its definition and its value in each run; null where there is none."""
    totals = [run.bins.total().totals for run in runs]
    rows = []
    for metric in METRICS:
        if metric.by:
            continue
        values = [metric.compute(total) for total in totals]
        rows.append(
            {
                "name": metric.name,
                "unit": metric.unit,
                "formula": metric.formula,
                "pooling": metric.pooling.value,
                "bonus": "" if metric.bonus is Bonus.NONE else metric.bonus.value,
                "values": [float(f"{value:.5g}") if value == value else None for value in values if isinstance(value, int | float)],
            }
        )
    return rows


def report_page(runs: Sequence[Run], *, text_of: Sequence[TextOf | None] = ()) -> str:
    """The report of these runs. ``text_of``: for each run the texts of its tokens (left out: ids). Raises ValueError without the extra."""
    of = [*text_of, *[None] * (len(runs) - len(text_of))]
    samples = [{"run": run.name, "samples": samples_of(run, texts)} for run, texts in zip(runs, of, strict=True)]
    data = {**page_data(runs), "samples": [group for group in samples if group["samples"]]}
    return _render(data, live=False)


def live_page(data: dict[str, Any]) -> str:
    """The same page, which asks its server for events."""
    return _render({**data, "samples": []}, live=True)


def _render(data: dict[str, Any], *, live: bool) -> str:
    try:
        import jinja2
    except ImportError:
        raise ValueError(_MEND) from None
    environment = jinja2.Environment(loader=jinja2.PackageLoader("rollout_spec.report"), autoescape=True, undefined=jinja2.StrictUndefined)
    folder = resources.files("rollout_spec.report") / "templates"
    return environment.get_template("page.html.j2").render(
        live=live,
        version=__version__,
        runs=data["runs"],
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        plotly=_plotly(),
        data=_json_in_html(data),
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(_MEND) from None
    return str(get_plotlyjs())


def _json_in_html(data: object) -> str:
    """JSON that cannot end the script element it stands in, whatever a sample's text says."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
