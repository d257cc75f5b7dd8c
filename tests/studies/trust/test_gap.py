"""The picture of a split risk shows its bins."""

from __future__ import annotations

import pytest

import cocurve_lab as cl
from cocurve_studies.trust.gap import plot_split
from helpers.tiny_models import GROUPS, tiny_model, tiny_text


@pytest.mark.parametrize("rows", [1, 3])  # one row has no error
def test_the_bars_are_the_bins_and_add_up_alike(rows: int) -> None:
    model = tiny_model()
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [1, 8, 13])
    split = cl.split_risk(model, plan, tiny_text(rows, 20), progress=False)
    figure = plot_split(split)
    bars = iter(figure.data)
    for by in ("p_max", "shift"):
        for name, label, whole in (
            ("predicted", "predicted", split.predicted),
            ("kl_of_sum", "KL of the summed shifts", split.kl_of_sum.mean()),
            ("measured", "measured", split.measured),
        ):
            bar = next(bars)
            assert bar.name == label
            bins = split.bins(by)  # type: ignore[arg-type]
            assert list(bar.x) == bins["bin"].tolist()
            assert list(bar.y) == bins[name].tolist()
            assert sum(bar.y) == pytest.approx(whole)
            assert list(bar.text) == [f"{share:.0%}" for share in bins["share"]]
    assert not list(bars)
    assert f"{plan.realized_ratio:.1%} removed" in figure.layout.title.text
