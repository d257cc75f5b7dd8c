"""The words that the instruments explain on hover; the table itself is front/glossary.js."""

from __future__ import annotations

from html import escape

from cocurve_lab.base.schema import parse_json

from .instrument import front


def terms() -> dict[str, str]:
    """Word -> its explanation, of the words that stand beside the title of an instrument."""
    table = front("glossary.js").split("TERMS = ", 1)[1].split(";\n\n", 1)[0]
    return dict(parse_json(table))  # the table is written as JSON, so both sides can read it


def words_html() -> str:
    """The words as HTML for an instrument made of ipywidgets, which gives them the same look."""
    words = "".join(
        f'<span class="cc-term" tabindex="0" data-lm-suppress-shortcuts="true"'
        f' aria-description="{escape(text)}" data-tip="{escape(text)}">{word}</span>'
        for word, text in terms().items()
    )
    return f'<div class="cocurve"><span class="cc-words">{words}</span></div>'
