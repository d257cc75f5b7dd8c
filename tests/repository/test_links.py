"""Every page is reached from README, and every link of a page leads to a file and a heading."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = {
    path
    for pattern in ("*.md", ".ci/*.md", "[a-z]*/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md" and not path.is_relative_to(ROOT / "data/models")
}


def links_of(page: Path) -> list[tuple[Path, str]]:
    """The file and the heading of each link that stays in the repository."""
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    parts = [link.partition("#") for link in links]
    return [((page.parent / file).resolve() if file else page, mark) for file, _, mark in parts]


def headings_of(page: Path) -> set[str]:
    """The headings of a page as GitHub writes them in links."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {file}#{mark}"
        for page in sorted(PAGES)
        for file, mark in links_of(page)
        if not file.exists() or (mark and file.suffix == ".md" and mark not in headings_of(file))
    ]
    assert broken == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        new |= {file for file, _ in links_of(page) if file.suffix == ".md"} - reached
    assert reached >= PAGES
