"""The model inside a page: its JavaScript says what the library says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.files import demo_folder
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text
from cocurve_widgets.make_page import demo_model
from helpers.pages import node

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
import { modelOf, serve, tokenizerOf, unpacked } from "%s";
const { packed, texts, plans } = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));
const spec = unpacked(packed);
const [{ encode, decode }, model] = [tokenizerOf(spec), serve(packed)];
const found = { ids: texts.map(encode), texts: texts.map((text) => decode(encode(text))) };
found.logits = [[], ...plans].map((order) => Array.from(
  modelOf(spec)(encode(texts[0]), { gone: new Set(order), kept: {} })));
found.words = plans.map((order) => model.words(texts[0], order));
found.went = plans.map((order) => model.words(texts[0], order) && model.texts());
found.kl = plans.map((order) => model.rows.map((_, k) => model.row(k, order)));
console.log(JSON.stringify(found));
"""


def test_the_javascript_says_what_the_library_says(tmp_path: Path) -> None:
    packed = demo_model()
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
    for order, logits in zip(([], *plans), found["logits"], strict=True):
        with torch.no_grad(), cl.ablate(model, order):
            wanted = model(ids).logits[0].numpy()
        np.testing.assert_allclose(np.reshape(logits, wanted.shape), wanted, atol=1e-3)
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
