"""What the library shows: its public names, their stub, and stripped notebooks in the wheel."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import cocurve_lab as cl

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def test_every_public_name_is_there_and_in_the_stub() -> None:
    assert sorted(dir(cl)) == sorted(cl.__all__)
    for name in cl.__all__:
        assert getattr(cl, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = cl.nothing
    stub = runpy.run_path(str(ROOT / ".ci" / "stub.py"))
    assert stub["STUB"].read_text(encoding="utf-8") == stub["text"]()


def test_the_wheel_has_the_notebooks_and_pages() -> None:
    """All that `cocurve lab` copies, where it looks in an installed package."""
    wheel = runpy.run_path(str(ROOT / ".ci" / "wheel.py"))
    added: dict[str, str] = {}
    hook = wheel["Notebooks"](str(ROOT), {}, None, None, "", "wheel")
    hook.initialize("standard", {"force_include": added})
    names = {path.name for path in NOTEBOOKS} | {"explore_demo.html", "explore_smollm2.html"}
    assert set(added.values()) == {f"cocurve_lab/notebooks/{n}" for n in names | {"README.md"}}
