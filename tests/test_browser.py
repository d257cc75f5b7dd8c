"""Notebook 01 in a real JupyterLab and browser: pictures appear, nothing leaves the machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = "/usr/bin/chromium"
NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_build_H.ipynb"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not Path(CHROMIUM).exists(),
        reason=f"no browser at {CHROMIUM} (Debian: apt-get install chromium)",
    ),
]

KERNEL_READY = """() => {
  const widget = window.jupyterapp && jupyterapp.shell.currentWidget;
  const session = widget && widget.sessionContext && widget.sessionContext.session;
  return session && session.kernel && session.kernel.connectionStatus === 'connected'
    && session.kernel.status === 'idle';
}"""
# every code cell has a number, so all of them have run
ALL_RAN = """() => {
  const cells = jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code');
  return cells.length > 0 && cells.every(c => c.model.executionState === 'idle'
    && c.model.executionCount !== null);
}"""


@pytest.fixture
def jupyter(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A JupyterLab on 127.0.0.1 with its own settings, on a small copy of the notebook."""
    folder = tmp_path / "work"
    folder.mkdir()
    source = NOTEBOOK.read_text(encoding="utf-8")
    source, count = re.subn(r"ROWS, HELD_OUT = \d+, \d+", "ROWS, HELD_OUT = 3, 2", source)
    assert count == 1
    (folder / NOTEBOOK.name).write_text(source, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = {name: str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = os.environ | {f"JUPYTER_{name}_DIR": path for name, path in places.items()}
    environment["IPYTHONDIR"] = str(tmp_path / "ipython")
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", "--allow-root", "--IdentityProvider.token=local"),
        *(f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"),
        *("--LabApp.extension_manager=readonly", "--LabApp.news_url=None"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api/status?token=local", server)
        yield address, folder
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(240):
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, "JupyterLab ended while starting"
            time.sleep(0.5)
    raise AssertionError("JupyterLab did not answer within two minutes")


@pytest.mark.slow
def test_notebook_01_in_jupyterlab(jupyter: tuple[str, Path], tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    address, folder = jupyter
    outside: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            str(tmp_path / "profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1280, "height": 1000},
        )
        page = browser.new_page()
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((address, "data:", "blob:"))
                else outside.append(request.url)
            ),
        )
        page.goto(f"{address}/doc/tree/{NOTEBOOK.name}?token=local&reset")
        page.wait_for_function(KERNEL_READY, timeout=120_000)
        page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells') }")
        page.wait_for_function(ALL_RAN, timeout=500_000)
        page.wait_for_selector(".js-plotly-plot .gtitle", state="attached", timeout=60_000)
        figures = page.locator(".js-plotly-plot")
        assert figures.count() == 3
        titles = figures.locator(".gtitle").all_text_contents()
        assert any("orrelation" in title for title in titles)
        assert page.locator(".jp-RenderedText[data-mime-type*='error']").count() == 0
        buttons = page.locator(".modebar-btn").evaluate_all(
            "all => all.map(b => b.getAttribute('data-title') || '')"
        )
        assert buttons
        assert not [title for title in buttons if re.search("cloud|share|edit in", title, re.I)]
        shots = os.environ.get("COCURVE_SCREENSHOTS")
        if shots:
            _take_pictures(page, Path(shots))
        browser.close()
    assert not outside, outside
    assert list(folder.glob("H_demo_*.pkl"))
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)


def _take_pictures(page, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """Screenshots for a person to look at: the top, and each figure in both themes."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme in ("Light", "Dark"):
        page.evaluate(
            "name => jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
            f"JupyterLab {theme}",
        )
        page.wait_for_timeout(1500)
        for number, cell in enumerate(page.locator(".jp-CodeCell").all()):
            cell.scroll_into_view_if_needed()
            page.wait_for_timeout(200)
            page.screenshot(path=str(folder / f"{theme.lower()}_{number:02d}.png"))
