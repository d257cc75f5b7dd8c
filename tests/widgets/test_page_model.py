"""The model inside a page: it says what the library says, offline."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.files import demo_folder
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text
from cocurve_widgets import refresh_html
from helpers.lab import Lab, in_browser
from helpers.layout import require_readable, serious_violations
from helpers.notebooks import NOTEBOOKS
from helpers.pages import node
from helpers.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
FRONT = ROOT / "widgets" / "cocurve_widgets" / "front"
TEXTS = [
    "For dinner Yuri always wants",
    "def f(x): return x + 12  # f(3) = 15",
    "What's this? I'VE seen ABC's  two\n\n lines\t, naïve café — 日本 😀 don't ",
    " <eos>A 3rd text<eos>",
]
CODE = """
import { readFileSync } from "node:fs";
import { modelOf, serve, tokenizerOf } from "%s";
const { packed, texts, plans } = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));
const { encode, decode } = tokenizerOf(JSON.parse(packed));
const model = serve(packed);
const found = { ids: texts.map(encode), texts: texts.map((text) => decode(encode(text))) };
found.words = plans.map((order) => model.words(texts[0], order));
found.went = plans.map((order) => model.words(texts[0], order) && model.texts());
found.kl = plans.map((order) => model.rows.map((_, k) => model.row(k, order)));
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def packed() -> str:
    """The demo model as a page has it."""
    return str(runpy.run_path(str(ROOT / ".ci" / "page.py"))["demo_model"]())


def test_the_javascript_says_what_the_library_says(packed: str, tmp_path: Path) -> None:
    model, tokenizer = cl.load_model("demo")
    curvature = cl.Curvature.load(demo_folder() / "H_64_rows.npz")
    plans = [cl.solve_greedy(curvature, r, x) for r, x in ((0.05, 0.0), (0.2, 0.5), (0.5, 1.0))]
    file = tmp_path / "model.json"
    orders = [plan.pruned for plan in plans]
    file.write_text(json.dumps({"packed": packed, "texts": TEXTS, "plans": orders}))
    code = CODE % (FRONT / "inference.js").as_uri()
    found = json.loads(node("--input-type=module", "-e", code, COCURVE_FIXTURES=str(file)))
    assert found["ids"] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert found["texts"] == TEXTS
    ids = torch.tensor([found["ids"][0]])
    for plan, words, went in zip(plans, found["words"], found["went"], strict=True):
        for k, order in enumerate(([], plan)):
            said = words[5 * k : 5 * k + 5]
            with torch.no_grad(), cl.ablate(model, order):
                shares, best = model(ids).logits[0, -1].softmax(-1).topk(5)
            assert [row["token"] for row in said] == [tokenizer.decode([i]) for i in best]
            assert [row["shares"][k] for row in said] == pytest.approx(shares.tolist(), rel=1e-3)
        pair = compare_text(model, tokenizer, TEXTS[0], plan, Sampling(40), chat=False)
        assert went == [pair.dense, pair.pruned]
    rows = cl.CalibrationSet(torch.tensor(json.loads(packed)["rows"]))
    assert rows.input_ids.shape == (8, 64)
    kl = cl.measure_plans(model, plans, rows, progress=False).kl
    np.testing.assert_allclose(found["kl"], kl, rtol=1e-3)


def bars(root: Any, side: int) -> list[str]:
    """The next words that one of the models says, likeliest first."""
    column = root.locator(".cc-sentence .cc-next").first.locator("> div").nth(side)
    return [str(text) for text in column.locator(".cc-word > span").all_inner_texts()]


@in_browser
def test_the_page_reads_a_sentence_and_measures_a_plan_offline(
    lab: Lab, packed: str, tmp_path: Path
) -> None:
    page_file = tmp_path / "page.html"
    page_file.write_bytes(NOTEBOOKS[0].with_name("explore_demo.html").read_bytes())
    with_model = runpy.run_path(str(ROOT / ".ci" / "page.py"))["with_model"]
    text = refresh_html(page_file).read_text(encoding="utf-8")
    page_file.write_text(with_model(text, packed), encoding="utf-8")
    assert page_file.stat().st_size < 12_000_000
    before = page_file.read_bytes()
    assert refresh_html(page_file).read_bytes() == before  # the model stays
    with lab.page(page_file) as page:
        root = page.locator(".cocurve").first
        root.get_by_role("button", name="Skip").click()
        box = root.get_by_label("sentence", exact=True)
        box.fill("For dinner Yuri always wants")
        eventually(lambda: bars(root, 0), lambda words: words[:2] == ["bread", "beans"])
        slider = root.get_by_label("ratio, share of cost to remove")
        slider.fill("0.5")
        eventually(lambda: bars(root, 1)[0], lambda word: word != "bread")
        eventually(root.locator(".cc-goes mark").count)  # both go on, and not alike

        root.locator("canvas[role=img]").first.press("ArrowDown")
        root.locator("canvas[role=img]").first.press("Enter")  # removed by hand
        order = [int(u) for u in str(root.get_attribute("data-shown")).split()]
        line, number = root.locator(".cc-measuring"), root.locator(".cc-kl b")
        eventually(line.inner_text, lambda said: said.startswith("8 of 8"), 60)
        model, _ = cl.load_model("demo")
        units = cl.enumerate_units(model)
        rows = cl.CalibrationSet(torch.tensor(json.loads(packed)["rows"]))
        kl = cl.pruning_risk(model, [units[u] for u in order], rows)
        assert float(number.inner_text()) == pytest.approx(kl, rel=0.01)

        root.locator("canvas[role=img]").first.press("ArrowDown")
        root.locator("canvas[role=img]").first.press("Enter")
        eventually(line.inner_text, lambda said: not said.startswith("8 of 8"))
        line.get_by_role("button", name="Stop").click()
        eventually(line.get_by_role("button", name="Measure").count)
        assert not line.inner_text().startswith("8 of 8")
        require_readable(page, "header, .cocurve")
        for theme in ("dark", "light"):
            page.emulate_media(color_scheme=theme)
            assert serious_violations(page) == []
