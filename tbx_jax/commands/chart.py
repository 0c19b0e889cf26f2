"""The chart of a demo run: pass rate during training, and on held-out tasks before and after it.

The only module that needs matplotlib (the `demo` extra).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_BEFORE, _AFTER = "#b9c2cc", "#1f6f8b"
_SMOOTHING = 5  # steps on either side of a point of the smooth line


def draw_demo(
    path: Path,
    metrics: Sequence[Mapping[str, Any]],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    unseen: Collection[str],
    attempts: int,
) -> None:
    """Writes the chart as PNG.

    Args:
        path: path of the file.
        metrics: rows of the training's `metrics.jsonl`; `pass_rate` of each step is drawn.
        before, after: measures of the held-out tasks, with `families`.
        unseen: families held out from training.
        attempts: number of attempts at each task.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, bars, repeats) = plt.subplots(1, 3, figsize=(15, 4.5), width_ratios=(1.1, 1.6, 1.0))
    _draw_curve(curve, metrics)
    _draw_families(bars, before, after, unseen)
    _draw_repeats(repeats, before, after, attempts)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_curve(axes: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    steps = [row["step"] for row in metrics]
    rates = [row["pass_rate"] for row in metrics]
    smooth = []
    for place in range(len(rates)):
        near = rates[max(0, place - _SMOOTHING) : place + _SMOOTHING + 1]
        smooth.append(sum(near) / len(near))
    axes.plot(steps, rates, color=_BEFORE, linewidth=1)
    axes.plot(steps, smooth, color=_AFTER, linewidth=2)
    axes.set(title="Training: share of attempts that pass", xlabel="update", ylim=(0, 1))


def _draw_families(axes: Any, before: Mapping[str, Any], after: Mapping[str, Any], unseen: Collection[str]) -> None:
    families = list(before["families"])
    places = range(len(families))
    for shift, measures, colour, label in ((-0.2, before, _BEFORE, "before"), (0.2, after, _AFTER, "after")):
        rates = [measures["families"][family]["pass_at_1"] or 0.0 for family in families]
        axes.bar([place + shift for place in places], rates, width=0.4, color=colour, label=label)
    axes.set_xticks(
        list(places),
        [family.replace("_", "\n") + ("\n(unseen)" if family in unseen else "") for family in families],
        fontsize=8,
    )
    axes.set(title="Held-out tasks: pass@1", ylim=(0, 1.12))  # room for the legend
    axes.legend(loc="upper center", ncols=2, fontsize=8, frameon=False)


def _draw_repeats(axes: Any, before: Mapping[str, Any], after: Mapping[str, Any], attempts: int) -> None:
    key = f"observed_{attempts}_of_{attempts}"
    counts = [before[key], after[key]]
    axes.bar(["before", "after"], counts, color=[_BEFORE, _AFTER], width=0.6)
    for place, count in enumerate(counts):
        axes.text(place, count, str(count), ha="center", va="bottom")
    axes.set(title=f"Tasks passed in all {attempts} attempts, of {before['tasks']}", ylim=(0, before["tasks"]))
