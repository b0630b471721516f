"""The figure of bebop.py: acceptance against entropy, by temperature and by position. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from acceptance_report import MEASURES, NAMES
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS = {"bound": "#888888", "greedy": "#c44e52", "sampled": "#4c72b0"}
_MARKERS = {"bound": "_", "greedy": "s", "sampled": "o"}


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Write the figure in the format that the path's ending names; the same summary gives the same bytes."""
    # Text as text, and no date or random ids: the file is small and only changes with its numbers.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "acceptance", "font.size": 9}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _by_temperature(left, summary)
        _by_position(right, summary)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=150)


def _by_temperature(axes: Axes, summary: Mapping[str, Any]) -> None:
    rows = summary["by_temperature"]
    entropies = np.array([row["entropy"]["value"] for row in rows])
    for name in MEASURES:
        values = np.array([row[name]["value"] for row in rows])
        spread = np.abs(np.array([[row[name]["low"], row[name]["high"]] for row in rows]).T - values)
        colour = _COLOURS[name]
        axes.errorbar(entropies, values, yerr=spread, fmt=_MARKERS[name], color=colour, markersize=5, linewidth=1, label=NAMES[name])
        fit = summary["law_of_temperatures"][name]
        axes.plot(entropies, fit["intercept"] + fit["slope"] * entropies, color=colour, linewidth=0.8, linestyle="--")
    top = axes.secondary_xaxis("top")
    top.set_xticks(entropies, labels=[f"T={row['temperature']:g}" for row in rows], rotation=90, fontsize=7)
    axes.set(xlabel="mean entropy of the policy (nats)", ylabel="acceptance of the first draft token", ylim=(0, 1.02))
    axes.set_title("by temperature; dashed: linear fit")
    axes.legend(frameon=False)


def _by_position(axes: Axes, summary: Mapping[str, Any]) -> None:
    rows = summary["by_entropy"]
    for name in MEASURES:
        axes.plot([row["entropy"] for row in rows], [row[name] for row in rows], marker=_MARKERS[name], color=_COLOURS[name], linewidth=1)
    axes.set(xlabel="entropy of the position (nats), all temperatures")
    axes.set_title("by position")
