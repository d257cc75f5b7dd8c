"""Pictures, plans and findings of a bake-off, on planted cells and on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.evaluation.efficiency import EfficiencyOptions
from cocurve_lab.methods.base import Method
from cocurve_lab.methods.registry import method_names
from cocurve_studies.bake_off import contenders, findings, frontier, pictures, speeds
from cocurve_studies.bake_off.compare import compare
from cocurve_studies.bake_off.comparison import Comparison
from cocurve_studies.bake_off.settings import CompareOptions, Judges
from cocurve_studies.tables import pick
from helpers.comparisons import cell
from helpers.problems import make_units
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

DENSE = cell("Dense", 0.0, search="dense", requested_ratio=0.0, realized_ratio=0.0)
GRID = (cl.Guards(), cl.Guards(protect_first=1), cl.Guards(layer_cap=0.5))


def planted(**ours: Any) -> Comparison:
    """CoCurve, two baselines and one that failed, at two ratios, without and with guards."""
    rows = [DENSE | {"accuracy sums": 1.0}]
    kl = {"CoCurve": 0.1, "Magnitude": 0.9, "SlimLLM": 0.3}
    for ratio in (0.2, 0.4):
        for search, factor in (("none", 1.0), ("searched", 0.5)):
            for name, value in kl.items():
                more = {"search": search, "requested_ratio": ratio, "realized_ratio": ratio + 0.01}
                more |= {"accuracy sums": 0.75, "kl": value * factor * ratio, "kl_error": 0.001}
                rows.append(cell(name, **more | (ours if name == "CoCurve" else {})))
            rows.append(cell("Broken", None, search=search, requested_ratio=ratio, failed="why"))
    return Comparison(rows)


def points(figure: Any, name: str) -> list[tuple[float, float]]:
    (trace,) = (trace for trace in figure.data if trace.name == name)
    return list(zip(trace.x, trace.y, strict=True))


# Pictures ----------------------------------------------------------------------------------------


def test_perplexity_has_a_line_per_method_on_a_log_axis() -> None:
    figure = pictures.plot_perplexity(planted(), "searched")
    names = {trace.name for trace in figure.data}
    assert names == {"CoCurve", "Magnitude", "SlimLLM", "dense, 2.00"}
    assert points(figure, "dense, 2.00") == [(pytest.approx(x), 2.0) for x in (0.21, 0.41)]
    assert points(figure, "Magnitude") == [
        (pytest.approx(0.21), pytest.approx(2 + 0.9 * 0.5 * 0.2)),
        (pytest.approx(0.41), pytest.approx(2 + 0.9 * 0.5 * 0.4)),
    ]
    assert figure.layout.yaxis.type == "log"
    ticks = figure.layout.yaxis.tickvals
    assert sum(2.0 <= tick <= 2.18 for tick in ticks) >= 3  # less than a decade, and readable
    assert len(ticks) < 12
    looks = [(t.line.color, t.marker.symbol) for t in figure.data]
    assert len(set(looks)) == 4
    free = pictures.plot_perplexity(planted(), "none", ["Magnitude"])
    assert [y for _, y in points(free, "Magnitude")] == [pytest.approx(2.18), pytest.approx(2.36)]


@pytest.mark.parametrize("dense", [2.0, 8.0, 30.0, 700.0])
def test_perplexities_of_any_size_have_ticks(dense: float) -> None:
    rows = [DENSE | {"perplexity": dense}, cell("A", 0.1, perplexity=2.4 * dense)]
    ticks = pictures.plot_perplexity(Comparison(rows)).layout.yaxis.tickvals
    assert 3 <= sum(dense <= tick <= 2.4 * dense for tick in ticks) <= 12


def test_seventeen_methods_look_different() -> None:
    rows = [DENSE, *(cell(f"m{n}", 0.1) for n in range(17))]
    styles = pictures.styles(Comparison(rows), None)
    assert len({(s["color"], s["symbol"]) for s in styles.values()}) == 17


def test_capability_bars_and_their_intervals() -> None:
    figure = pictures.plot_capabilities(planted(), 0.2, 16, ["CoCurve", "SlimLLM"])
    bar = next(trace for trace in figure.data if trace.name == "SlimLLM")
    assert (list(bar.x), list(bar.y)) == (["sums"], [0.75])
    low, high = 0.75 - bar.error_y.arrayminus[0], 0.75 + bar.error_y.array[0]
    # Wilson's ends solve (share - p)^2 = z^2 p (1 - p) / n
    for end in (low, high):
        assert (0.75 - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / 16, rel=1e-3)
    bare = [{k: v for k, v in row.items() if "accuracy" not in k} for row in planted().rows]
    with pytest.raises(cl.InputError, match="asked no questions"):
        pictures.plot_capabilities(Comparison(bare), 0.2, 16)
    with pytest.raises(cl.InputError, match="no cells of 'Wanda'"):
        pictures.plot_capabilities(planted(), 0.2, 16, ["Wanda"])


def test_layer_shares_are_costs_removed() -> None:
    units = make_units(3, attention=2, ffn=3, attention_cost=5, ffn_cost=11)
    plan = cl.Selection.from_pruned(
        units, [units.index("L0.attention[1]"), units.index("L2.ffn[0]")]
    )
    assert pictures.layer_shares(plan) == pytest.approx([5 / 43, 0, 11 / 43])
    figure = pictures.plot_layers({"a": plan, "b": cl.Selection.from_pruned(units, [])})
    assert list(figure.data[0].y) == ["a", "b"]
    assert figure.data[0].z[1] == pytest.approx([0, 0, 0])
    with pytest.raises(cl.InputError, match="no plan"):
        pictures.plot_layers({})


def timing(method: str, ratio: float, half: float, **more: Any) -> dict[str, Any]:
    row = {"method": method, "requested_ratio": 0.2, "quantity": "prefill", "batch_size": 1}
    return row | {"ratio": ratio, "low": ratio - half, "high": ratio + half} | more


def test_frontier_and_its_sentence() -> None:
    table = [timing("CoCurve", 1.2, 0.05), timing("Magnitude", 1.25, 0.05)]
    figure = pictures.plot_frontier(planted(), table)
    assert points(figure, "CoCurve") == [(1.2, pytest.approx(2.01))]
    assert points(figure, "Dense") == [(1.0, 2.0)]
    with pytest.raises(cl.InputError, match="was not timed"):
        pictures.plot_frontier(planted(), table, "decode")
    (row,) = pick(speeds.speed_summary(table))
    assert (row["lowest"], row["highest"], row["faster"]) == (1.2, 1.25, 2)
    assert not row["apart"]
    assert "differ no more than repeats" in speeds.speed_sentence(row)
    (row,) = pick(speeds.speed_summary([*table, timing("SlimLLM", 0.95, 0.02)]))
    assert row["apart"]
    assert (row["faster"], row["plans"]) == (2, 3)
    assert "differ by more" in speeds.speed_sentence(row)


def test_the_table_names_guards_and_families() -> None:
    page = planted().to_html(0.2, "searched")
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", page)
    assert heads[:5] == ["method", "removed", "KL", "perplexity", "all"]
    assert heads[-1] == "guards"
    assert page.count("cap none protect 0/0") == 3  # the dense model has no guards
    assert ">guards</th>" not in planted().to_html(0.2)


# Plans -------------------------------------------------------------------------------------------


class Setting:
    """A bake-off on a tiny model, kept in a folder, H in another."""

    def __init__(self, folder: Path) -> None:
        self.model, text = tiny_model(), tiny_text(12, 20, 5)
        self.calibration = text.rows(0, 4)
        self.judges = Judges(text.rows(4, 8), text.rows(8, 12))
        self.methods: dict[str, Method] = {
            "CoCurve": cl.get_method("cocurve", top_r=16),
            "gains": cl.get_method("cocurve", top_r=16, compensate=True),
            "2SSP": cl.get_method("2ssp"),
            "Heads only": cl.get_method("head-only", top_r=16),
        }
        (folder / "h").mkdir()
        self.folder = folder
        self.options = CompareOptions(folder, GRID, GROUPS, False, folder / "h")
        tokenizer: Any = None
        self.result = compare(
            self.model,
            tokenizer,
            self.methods,
            (0.5,),
            self.calibration,
            self.judges,
            self.options,
        )

    def plans(self, options: CompareOptions | None = None) -> dict[str, cl.Selection]:
        return frontier.chosen_plans(
            self.model, self.methods, 0.5, self.calibration, self.judges, options or self.options
        )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("bake"))


def test_h_is_kept_where_it_is_looked_for(setting: Setting) -> None:
    assert len(list((setting.folder / "h").glob("H_*.pkl"))) == 1
    assert not list(setting.folder.glob("H_*.pkl"))


def test_chosen_plans_are_those_of_the_cells(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocurve_lab.estimator.estimate.load_or_estimate", loads_only(setting))
    plans = setting.plans()
    assert list(plans) == ["CoCurve", "2SSP"]  # one repairs, one does not reach half
    (row,) = pick(setting.result.summary(0.5, "searched"), method="Heads only")
    assert row["failed"]
    assert setting.result.unreached() == f"Heads only has no plan at 50%: {row['failed']}"
    for name, search in (("CoCurve", "searched"), ("2SSP", "none")):
        (row,) = pick(setting.result.rows, method=name, search=search)
        kl = cl.pruning_risk(setting.model, plans[name], setting.judges.test)
        assert kl == pytest.approx(row["kl"], rel=1e-4)
    free = setting.plans(CompareOptions(setting.folder, (), GROUPS, False, setting.folder / "h"))
    assert free["CoCurve"].guards == cl.Guards()


def loads_only(setting: Setting) -> Any:
    """Stands for load_or_estimate; building anew would be an error."""
    (path,) = (setting.folder / "h").glob("H_*.pkl")
    return lambda *_, **__: cl.Curvature.load(path)


def test_paired_differences_are_row_by_row(setting: Setting) -> None:
    plans = setting.plans()
    table = frontier.paired_table(setting.model, plans, "2SSP", setting.judges.test)
    measured = cl.measure_plans(
        setting.model, [plans["CoCurve"], plans["2SSP"]], setting.judges.test, progress=False
    )
    difference = measured.nll[0] - measured.nll[1]
    (row,) = pick(table, method="CoCurve")
    assert row["nll_behind"] == pytest.approx(difference.mean())
    assert row["nll_behind_error"] == pytest.approx(difference.std(ddof=1) / 2)
    (own,) = pick(table, method="2SSP")
    assert (own["nll_behind"], own["nll_behind_error"]) == (0, 0)
    assert pick(table)[0]["perplexity"] <= pick(table)[1]["perplexity"]
    with pytest.raises(cl.InputError, match="no plan of 'SlimLLM'"):
        frontier.paired_table(setting.model, plans, "SlimLLM", setting.judges.test)


def test_speeds_are_kept(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {"CoCurve": setting.plans()["CoCurve"]}
    options = EfficiencyOptions((1,), 4, 2, repeats=2, progress=False)
    table = speeds.speed_table(setting.model, plans, options, tmp_path)
    pruned = cl.prune(setting.model, plans["CoCurve"])
    (row,) = pick(table, quantity="parameters")
    assert row["pruned"] == pruned.num_parameters()
    assert row["requested_ratio"] == 0.5
    assert row["prune_seconds"] is None
    monkeypatch.setattr(speeds, "cut", None)
    assert speeds.speed_table(setting.model, plans, options, tmp_path).equals(table)
    timed = speeds.speed_table(setting.model, plans, options, tmp_path, {"CoCurve": 7.5})
    assert set(timed["prune_seconds"]) == {7.5}


def test_leaders_and_the_guards_table() -> None:
    assert frontier.leaders(planted(), 0.2, 2) == ["CoCurve", "SlimLLM"]
    far = {"realized_ratio": 0.1, "comparable": False}
    assert frontier.leaders(planted(**far), 0.2, 5) == ["SlimLLM", "Magnitude"]
    rows = pick(frontier.guards_table(planted(), [0.2], ["SlimLLM", "Broken", "absent"]))
    assert rows[0]["KL, no guards"] == 2 * rows[0]["KL, own guards"] == 0.06
    assert (rows[1]["KL, own guards"], rows[1]["its guards"]) == (None, "why")
    assert len(rows) == 2


def test_all_methods_are_the_registry_and_four() -> None:
    methods = contenders.all_methods(32)
    assert len(methods) == len(method_names()) - len(contenders.DEPTH) + 4
    assert [name for name, m in methods.items() if m.repairs] == [
        "CoCurve + gains",
        "SlimGPT + refit",
    ]
    assert all(m.top_r == 32 for m in methods.values() if hasattr(m, "top_r"))


# Findings ----------------------------------------------------------------------------------------


def behind(method: str, value: float, error: float, perplexity: float = 3.0) -> dict[str, Any]:
    return {
        "method": method,
        "perplexity": perplexity,
        "nll_behind": value,
        "nll_behind_error": error,
    }


@pytest.mark.parametrize(
    ("value", "expected"), [(0.1, True), (0.03, None), (-0.03, None), (-0.1, False), (0.0, None)]
)
def test_a_lead_needs_two_errors(value: float, expected: bool | None) -> None:
    table = [behind("CoCurve", 0, 0), behind("Wanda-sp", 0.2, 0.01), behind("FLAP", value, 0.02)]
    found = findings.lead_finding([*table, behind("FFN only", -9, 0.01)])  # not a rival
    assert found.agrees is expected
    assert "FLAP" in found.ours
    assert findings.lead_finding(table[:1]).agrees is None
    assert findings.lead_finding([pick(table)[0], behind("FLAP", 0.1, np.nan)]).agrees is None


def test_other_findings_follow_their_tables() -> None:
    find = findings.accuracy_finding
    better, worse = ({"accuracy all": share} for share in (0.99, 0.5))
    assert find(planted(**better), 0.4, 2000).agrees is True
    assert find(planted(**worse), 0.4, 2000).agrees is False
    assert find(planted(**better), 0.4, 20).agrees is None
    recover = findings.recovery_finding
    assert recover(planted(), 0.4, "SlimLLM").agrees is True
    assert recover(planted(kl=0.9), 0.4, "SlimLLM").agrees is False
    assert recover(planted(kl=0.06, kl_error=0.1), 0.4, "SlimLLM").agrees is None
    assert recover(planted(), 0.4, "Broken").agrees is None
    units = make_units()
    for unit, expected in (("L0.ffn[0]", True), ("L0.attention[0]", False)):
        plan = cl.Selection.from_pruned(units, [units.index(unit)])
        assert findings.attention_finding(plan).agrees is expected
    assert findings.attention_finding(None).agrees is None
    close = [timing("A", 1.2, 0.05), timing("B", 1.25, 0.05)]
    assert findings.speed_finding(close).agrees is True
    torn = [*close, timing("C", 0.9, 0.01)]
    assert findings.speed_finding(torn).agrees is False
    calm = [row | {"batch_size": 8} for row in close]
    assert findings.speed_finding([*torn, *calm]).agrees is None  # half of the timings
    assert findings.speed_finding(close[:1]).agrees is None
