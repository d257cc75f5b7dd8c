"""Notebooks in a kernel alone, or in a real JupyterLab and Chromium: run them, see what happens."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from helpers.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = NOTEBOOKS[0].with_name("README.md").read_text(encoding="utf-8")
# number of a notebook -> the solution of its exercise
SOLUTIONS = dict(
    re.findall(r"^# notebook (\d\d)\n(.*?)(?=\n\n\n# notebook|^```)", README, re.M | re.S)
)
CHROMIUM = Path("/usr/bin/chromium")
NO_BROWSER = f"no browser at {CHROMIUM} (Debian: apt-get install chromium)"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KERNEL_READY = """() => {
  const widget = window.jupyterapp && jupyterapp.shell.currentWidget;
  const session = widget && widget.sessionContext && widget.sessionContext.session;
  return session && session.kernel && session.kernel.connectionStatus === 'connected'
    && session.kernel.status === 'idle';
}"""
# every code cell has a number, so all of them have run; or one has failed, and the rest will not
FINISHED = """() => {
  const cells = jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code');
  for (const { model } of cells) {
    for (let i = 0; i < model.outputs.length; i++) {
      if (model.outputs.get(i).type === 'error') return 'error';
    }
  }
  return cells.length > 0 && cells.every(c => c.model.executionState === 'idle'
    && c.model.executionCount !== null) && 'done';
}"""

CONTENT = "() => jupyterapp.shell.currentWidget.content.model.toJSON()"
ASK = """async code => {
  const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const options = {code: '', user_expressions: {x: code}, silent: true};
  const reply = await kernel.requestExecute(options).done;
  const found = reply.content.user_expressions.x;
  return found.data ? found.data['text/plain'] : JSON.stringify(found);
}"""


SMALL = {"ROWS": 3, "HELD_OUT": 2, "LENGTH": 64}  # as many sequences as every notebook needs


def in_browser(test: Any) -> Any:
    """The marks of a test that needs Chromium."""
    skip = pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
    return pytest.mark.browser(pytest.mark.slow(skip(test)))


def set_parameters(content: nbformat.NotebookNode, values: dict[str, Any]) -> None:
    """Give names of a notebook's parameters cell other values; the names must be there."""
    if not values:
        return
    cell = next(c for c in content.cells if "parameters" in c.metadata.get("tags", []))
    known = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
    assert known >= values.keys(), f"not among the parameters: {values.keys() - known}"
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())


def red_boxes(notebook: nbformat.NotebookNode) -> list[str]:
    """What cells wrote to stderr: JupyterLab shows it on red, as if something had failed."""
    outputs = (o for cell in notebook.cells for o in cell.get("outputs", []))
    return [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]


def run(
    notebook: Path, folder: Path, values: dict[str, Any], timeout: int = 600
) -> nbformat.NotebookNode:
    """Execute a notebook in a kernel of its own, with other parameters; seconds are of a cell."""
    content = nbformat.read(notebook, as_version=4)
    set_parameters(content, values)
    client = NotebookClient(
        content,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        coalesce_streams=True,  # one print can arrive in several messages
    )
    done = client.execute()
    assert red_boxes(done) == []
    return done


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Everything the cells printed or showed as text."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(shown)


# In a browser -----------------------------------------------------------------------------------


@dataclass
class Visit:
    """One opened page and what it did: requests to elsewhere, console errors, bytes received."""

    page: Any
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    received: int = 0  # without the still pictures for the saved notebook, which come when it rests

    def listen(self, address: str) -> None:
        """Keep a record of everything that goes wrong or out."""
        own = (address, "data:", "blob:", "file:")
        self.page.on(
            "request",
            lambda r: None if r.url.startswith(own) else self.outside.append(r.url),
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("websocket", lambda socket: socket.on("framereceived", self._count))

    def _count(self, data: str | bytes) -> None:
        head = data[:400] if isinstance(data, bytes) else data[:400].encode()
        if b'"update_display_data"' not in head:
            self.received += len(data)

    def run_all(self, timeout: float = 500) -> None:
        """Run every cell and wait until all have a number."""
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells') }")
        # not at every frame, which would have the page drawn all the time
        found = self.page.wait_for_function(FINISHED, timeout=timeout * 1000, polling=250)
        assert found.json_value() == "done", self.failures()

    def content(self) -> nbformat.NotebookNode:
        """The notebook as it stands in the page, outputs included."""
        return nbformat.from_dict(self.page.evaluate(CONTENT))

    def failures(self) -> list[str]:
        """What went wrong in cells, in view or out of it."""
        outputs = (o for cell in self.content().cells for o in cell.get("outputs", []))
        return [f"{o.ename}: {o.evalue}" for o in outputs if o.output_type == "error"]

    def ask(self, expression: str) -> str:
        """What an expression is in the notebook's kernel, as it would be printed there."""
        return str(self.page.evaluate(ASK, expression))

    def set(self, name: str, **values: Any) -> None:
        """Set traits of one of the notebook's instruments."""
        found = self.ask(f"[setattr({name}, n, v) for n, v in {values!r}.items()] and None")
        assert found == "None", found

    def restart_kernel(self) -> None:
        """Restart the notebook's kernel, which then knows no widget any more."""
        self.page.evaluate(
            "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
        )

    def becomes(self, expression: str, wanted: str) -> None:
        """Wait until the kernel has a value; traits travel behind the page."""
        eventually(lambda: self.ask(expression), lambda text: text == wanted)

    @contextmanager
    def slow_model(self, seconds: float) -> Iterator[None]:
        """Every pass of the notebook's model takes longer: a click may else come too late."""
        pause = f"lambda *_: __import__('time').sleep({seconds})"
        hook = f"slow = model.model.register_forward_pre_hook({pause})"
        assert self.ask(f"exec({hook!r})") == "None"
        yield
        assert self.ask("slow.remove()") == "None"

    def theme(self, name: str) -> None:
        """Switch JupyterLab to its "Light" or "Dark" theme."""
        self.page.evaluate(
            "name => jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
            f"JupyterLab {name}",
        )
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light",
            arg=str(name == "Light").lower(),
        )
        self.page.wait_for_timeout(800)

    def require_clean(self) -> None:
        """Nothing went out, nothing failed in the page, no cell shows an error."""
        assert not self.outside, self.outside
        noise = ("favicon", "the server responded with a status of 404")
        found = [text for text in self.errors if not any(part in text for part in noise)]
        assert not found, found
        assert not self.failures()
        written = red_boxes(self.content())
        assert not written, written


@dataclass
class Lab:
    """A JupyterLab on 127.0.0.1 with its own settings, and a browser to look at it."""

    address: str
    folder: Path
    browser: Any

    @contextmanager
    def open(self, notebook: Path, values: dict[str, Any] | None = None) -> Iterator[Visit]:
        """A copy of a notebook in a new folder, with other parameters, on a cold kernel."""
        content = nbformat.read(notebook, as_version=4)
        set_parameters(content, values or {})
        folder = Path(tempfile.mkdtemp(prefix=f"{notebook.stem}-", dir=self.folder))
        nbformat.write(content, folder / notebook.name)
        page = self.browser.new_page(viewport={"width": 1280, "height": 1000})
        visit = Visit(page)
        visit.listen(self.address)
        try:
            page.goto(f"{self.address}/doc/tree/{folder.name}/{notebook.name}?token=local&reset")
            page.wait_for_function(KERNEL_READY, timeout=120_000)
            visit.theme("Light")  # the last visit's choice is remembered
            yield visit
        finally:
            page.evaluate("() => jupyterapp.serviceManager.sessions.shutdownAll()")
            page.close()

    @contextmanager
    def page(self, file: Path) -> Iterator[Any]:
        """A file in a browser without a network, which must neither fail nor ask for anything."""
        context = self.browser.new_context(viewport={"width": 1280, "height": 1000})
        context.set_offline(True)
        visit = Visit(context.new_page())
        visit.listen("file:")
        try:
            visit.page.goto(file.as_uri())
            yield visit.page
            assert not visit.outside + visit.errors
        finally:
            context.close()


@contextmanager
def served(folder: Path, work: Path) -> Iterator[str]:
    """The address of a JupyterLab on `work`, with its settings in `folder`, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    places = {name: folder / name for name in ("CONFIG", "DATA", "RUNTIME")}
    own = {f"JUPYTER_{name}_DIR": str(place) for name, place in places.items()}
    own |= {"IPYTHONDIR": str(folder / "ipython"), "XDG_CONFIG_HOME": str(folder / "xdg")}
    command = [
        *("jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"),
        *("--ServerApp.port_retries=0", "--IdentityProvider.token=local"),
        *(f"--ServerApp.root_dir={work}", "--LabApp.expose_app_in_browser=True"),
        *("--LabApp.extension_manager=readonly", "--LabApp.news_url=None"),
        f"--LabApp.app_settings_dir={ROOT / '.ci/settings'}",  # asks about no news, as make lab
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=os.environ | own,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            eventually(lambda: _answers(f"{address}/api/status?token=local", server), seconds=120)
            yield address
        finally:
            server.terminate()
            server.wait(timeout=60)


def _answers(address: str, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server ended while starting"
    with suppress(OSError), urllib.request.urlopen(address, timeout=1):
        return True
    return False


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """Start JupyterLab and Chromium; their files go under `folder`, notebooks in its `work`."""
    from playwright.sync_api import sync_playwright

    work = folder / "work"
    work.mkdir()
    with served(folder, work) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=FLAGS)
        yield Lab(address, work, browser)
        browser.close()
