"""What a reader cannot read on a page: broken words, clipped text, and text under something."""

from __future__ import annotations

from typing import Any

FAULTS = r"""async selector => {
  const found = [];
  const told = (fault, text) => found.push(`${fault}: ${text.trim().slice(0, 60)}`);
  const scrolls = value => /auto|scroll/.test(value);
  // a reader can scroll to what lies outside of these; outside of others it is lost
  const cut = (element, box) => {
    for (let up = element; up && up !== document.body; up = up.parentElement) {
      const { overflowX, overflowY } = getComputedStyle(up), frame = up.getBoundingClientRect();
      if (scrolls(overflowX) || scrolls(overflowY)) return false;
      if (overflowX === "visible" && overflowY === "visible") continue;
      if (box.left < frame.left - 2 || box.right > frame.right + 2
        || box.top < frame.top - 2 || box.bottom > frame.bottom + 2) return true;
    }
    return false;
  };
  const hidden = "select, script, style, .cm-editor, [aria-hidden=true], .modebar";
  const all = { visibilityProperty: true, opacityProperty: true };
  const seen = element => element.checkVisibility(all) && !element.closest(hidden);
  const drawn = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  for (const root of document.querySelectorAll(selector)) {
    if (!root.checkVisibility(all)) continue;
    root.scrollIntoView({ block: "nearest" });
    await drawn();
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    while (walker.nextNode()) {
      const node = walker.currentNode, element = node.parentElement;
      if (!node.data.trim() || !seen(element)) continue;
      // a heading or a label keeps a name and its value on one line; prose may break there
      const label = element.closest("th, label, button, h4");
      const words = label ? /lambda [\d.]+|[\p{L}\p{N}_.]+/gu : /[\p{L}\p{N}_.]+/gu;
      for (const word of node.data.matchAll(words)) {
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
        if (lines.size > 1 && !element.closest("svg")) told("breaks inside a word", word[0]);
        let box = range.getBoundingClientRect();
        const beyond = up => up && ((scrolls(getComputedStyle(up).overflowY)
          && box.bottom > up.getBoundingClientRect().bottom) || beyond(up.parentElement));
        // what covers it is known only in view
        if (box.top < 0 || box.bottom > innerHeight || beyond(element)) {
          element.scrollIntoView({ block: "center" });
          box = range.getBoundingClientRect();
        }
        if (box.width < 1 || box.height < 1) continue;  // for screen readers alone
        if (cut(element, box)) { told("is clipped", node.data); break; }
        const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        if (!at || at === element || element.contains(at) || at.contains(element)) continue;
        const over = at.closest("svg, canvas") !== element.closest("svg, canvas")
          && root.contains(at) && !at.closest("label");
        if (over) { told("is covered", node.data); break; }
      }
    }
    for (const field of root.querySelectorAll("button, select, [role=button]")) {
      const short = field.scrollWidth > field.clientWidth + 2;
      if (seen(field) && short) told("is clipped", field.innerText);
    }
  }
  return [...new Set(found)];
}"""


def require_readable(page: Any, selector: str) -> None:
    """No text of the elements breaks inside a word, is clipped, or lies under something.

    Each element and text is scrolled to, because what covers a text is found only in view.
    """
    found = page.evaluate(FAULTS, selector)
    assert not found, found


SIDEWAYS = """selector => [...document.querySelectorAll(selector)]
  .filter(part => part.offsetParent && part.scrollWidth > part.clientWidth + 2)
  .map(part => `${part.scrollWidth} > ${part.clientWidth}: ${part.innerText.slice(0, 60)}`)"""


def require_readable_notebook(page: Any) -> None:
    """The same of all prose and outputs of a notebook in JupyterLab; none scrolls sideways.

    Cells of code may: their lines are as long as they are.
    """
    page.evaluate(  # else only the cells in view are on the page
        """() => {
          const notebook = jupyterapp.shell.currentWidget.content;
          notebook.notebookConfig = { ...notebook.notebookConfig, windowingMode: 'none' };
        }"""
    )
    page.wait_for_timeout(1000)
    wide = page.evaluate(SIDEWAYS, ".jp-WindowedPanel-outer, .jp-OutputArea-output")
    assert not wide, wide
    require_readable(page, ".jp-OutputArea-output, .jp-MarkdownOutput")


def serious_violations(page: Any, selector: str = "body") -> list[str]:
    """What axe-core calls serious or critical inside the elements, as "rule: element"."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context={"include": [selector]}).response["violations"]
    return [
        f"{fault['id']}: {node['html'][:100]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
