"""README and the pages of the rooms: true, short, and linked."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted(ROOT.glob("tests/benchmarks/*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    path
    for pattern in ("*.md", ".ci/*.md", "[a-z]*/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md" and not path.is_relative_to(ROOT / "data/models")
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_make_lab_asks_about_no_news() -> None:
    settings = json.loads((ROOT / ".ci/settings/overrides.json").read_text(encoding="utf-8"))
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    assert '--LabApp.app_settings_dir="$PWD/.ci/settings"' in (ROOT / ".ci/lab").read_text()


def linked(page: Path) -> set[Path]:
    """Files of the repository that a page links to."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if "://" not in link}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_short_and_its_links_lead_somewhere(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [link for link in linked(page) if not link.exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        new |= {link for link in linked(page) if link.suffix == ".md"} - reached
    assert set(PAGES) <= reached


def test_readme_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    code = "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", README, flags=re.DOTALL))
    commands = set(re.findall(r"\bmake ([a-z]+)\b", code))
    assert {"lab", "demo", "test"} <= commands <= targets


def test_extras_are_quoted_for_zsh() -> None:
    patterns = ("cocurve_lab/**/*.py", "widgets/**/*.py", "notebooks/**/*.py", "notebooks/*.ipynb")
    for path in [*PAGES, *(file for pattern in patterns for file in ROOT.glob(pattern))]:
        assert not re.search(r"install [^'\n]*cocurve-lab\[", path.read_text("utf-8")), path


def test_gallery_is_small_and_there() -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(shown) >= 4
    assert all((ROOT / path).read_bytes().startswith(b"\x89PNG") for path in shown)
    assert sum(path.stat().st_size for path in ROOT.glob("widgets/gallery/*.png")) < 1_000_000


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: p.name)
def test_benchmark_explains_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = [place for place in sys.path if Path(place) != ROOT / "tests"]
    monkeypatch.setattr(sys, "path", [str(path.parent), *elsewhere])  # as for a command
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == ROOT / "tests" / "helpers":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    assert "usage" in capsys.readouterr().out.lower()
