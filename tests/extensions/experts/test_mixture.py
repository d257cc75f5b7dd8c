"""The mixture of experts that ships: what it must be to be shown."""

from __future__ import annotations

import cocurve_lab as cl


def test_the_mixture_is_trained_and_cut_as_it_is_masked() -> None:
    model, tokenizer = cl.load_model("mixture")
    _, text = cl.default_calibration("mixture", tokenizer, 16, 8)
    losses = [float(model(ids[None], labels=ids[None]).loss) for ids in text.input_ids]
    assert sum(losses) / len(losses) < 2.3  # an untrained one has 8.3, the demo model 1.8
    units = cl.enumerate_units(model)
    assert list(units.kinds).count("expert") == 64
    plan = cl.Selection.from_pruned(units, ["L0.expert[3]"])
    cl.check_equivalence(model, cl.prune(model, plan), plan, text)
