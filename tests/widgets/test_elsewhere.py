"""The instruments in Notebook 7, marimo and the widget managers of other places.

The managers come from `npm pack @vscode/jupyter-ipywidgets8 @jupyter-widgets/html-manager
requirejs` in the folder COCURVE_NPM (default ~/.cache/cocurve-lab/npm). What is missing is skipped.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anywidget
import pytest
from ipywidgets.embed import embed_minimal_html

from helpers.lab import CHROMIUM, KERNEL_READY, NO_BROWSER, Lab, Visit, notebook_of, served
from helpers.waiting import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]
MADE = """
import cocurve_lab as cl
from cocurve_widgets import BridgeExplorer, CurvatureMap, GenerationCompare, LambdaExplorer
from cocurve_widgets import FidelityScatter
from cocurve_lab.models.identity import demo_folder
H = cl.Curvature.load(demo_folder() / "H_16_rows.npz")
model, tokenizer = cl.load_model("demo")
_, held_out = cl.default_calibration(
    "demo", tokenizer, 2, 2, seq_len=32, positions_per_sequence="all"
)
plan = cl.solve_greedy(H, 0.2)
"""
SHOWN = {
    "explorer": "LambdaExplorer(H)",
    "bridges": "BridgeExplorer(H)",
    "heat": "CurvatureMap(H)",
    "compare": "GenerationCompare(model, tokenizer, H, selection=plan)",
    "scatter": "FidelityScatter(H, model, held_out)",
}

NPM = Path(os.environ.get("COCURVE_NPM") or "~/.cache/cocurve-lab/npm").expanduser()
# What VS Code's Jupyter extension does in its web view: a manager on a kernel's messages, with a
# loader that finds a widget's script among the nbextensions of the environment.
VS_CODE = """async (source) => {
  (await import(source)).activate();
  vscIPyWidgets8.load();
  const kernels = jupyterapp.serviceManager.kernels;
  const kernel = await kernels.startNew({name: 'python3'}, {handleComms: true});
  const known = new Set();
  const loader = {widgetsRegisteredInRequireJs: known, async loadWidgetScript(name) {
    requirejs.config({paths: {[name]: `/nbextensions/${name}/index`}});
    known.add(name);
  }};
  document.documentElement.style.overflow = document.body.style.overflow = 'auto';
  document.body.replaceChildren();
  const manager = new vscIPyWidgets.WidgetManager(kernel, document.body, loader, () => {});
  window.run = async (code) => {
    let text = '';
    const views = [];
    const show = async (data) => {
      const node = document.body.appendChild(document.createElement('div'));
      const view = await manager.create_view(await manager.get_model(data.model_id), {el: node});
      await manager.display_view(data, view, {node});
    };
    const future = kernel.requestExecute({code});
    future.onIOPub = ({content}) => {
      text += content.text ?? content.evalue ?? '';
      const data = content.data?.['application/vnd.jupyter.widget-view+json'];
      if (data) views.push(show(data));
    };
    await future.done;
    await Promise.all(views);
    return text;
  };
}"""


def packed(name: str, file: str) -> str:
    """A file of a package that `npm pack` has fetched."""
    with tarfile.open(sorted(NPM.glob(f"{name}-*.tgz"))[-1]) as archive:
        found = archive.extractfile(f"package/{file}")
        assert found, file
        return found.read().decode()


def needs(package: str) -> Any:
    """Skip where a package or RequireJS, with which both managers load scripts, is missing."""
    there = any(NPM.glob(f"{package}-*.tgz")) and any(NPM.glob("requirejs-*.tgz"))
    return pytest.mark.skipif(not there, reason=f"no {package} and requirejs from npm in {NPM}")


def serve_anywidget(page: Any, addresses: str) -> None:
    """Answer requests for anywidget's script with the installed one."""
    script = Path(anywidget.__file__).parent / "nbextension" / "index.js"
    page.route(addresses, lambda r: r.fulfill(path=script, content_type="text/javascript"))


@contextmanager
def page_of(
    lab: Lab, command: Sequence[str], folder: Path, alive: str, path: str
) -> Iterator[Visit]:
    """A page of a server that runs in a folder, in the browser of `lab`."""
    with served(command, folder, alive) as address:
        page = lab.browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(120_000)
        page.goto(address + path)
        yield Visit(page)
        page.close()


def drive(page: Any) -> None:
    """One control of each instrument, by keyboard or menu."""
    page.locator(".cocurve h3").nth(4).wait_for(state="attached")
    page.get_by_label("lambda, weight of the edges").focus()
    page.keyboard.press("Home")
    page.get_by_label("threshold", exact=True).focus()
    page.keyboard.press("End")
    page.get_by_label("order of rows and columns").select_option("clustering")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.locator(".cc-status", has_text="written together").wait_for()
    page.get_by_role("button", name="Ratio sweep").click()
    page.locator('.cocurve[data-plans="6"]').wait_for()


@pytest.mark.skipif(find_spec("notebook") is None, reason="Notebook 7 is not installed")
def test_every_instrument_works_in_notebook_7(lab: Lab, tmp_path: Path) -> None:
    cells = [MADE, *(f"{name} = {code}\n{name}" for name, code in SHOWN.items())]
    notebook_of(tmp_path / "all.ipynb", *cells)
    command = ["notebook", "--no-browser", "--ip=127.0.0.1", "--allow-root"]
    command += ["--IdentityProvider.token=local", "--JupyterNotebookApp.expose_app_in_browser=True"]
    alive, path = "/api/status?token=local", "/notebooks/all.ipynb?token=local"
    with page_of(lab, command, tmp_path, alive, path) as visit:
        visit.page.wait_for_function(KERNEL_READY)
        visit.run_all()
        drive(visit.page)
        visit.becomes("explorer.interaction_strength, explorer.agrees", "(0.0, True)")
        visit.becomes("bridges.threshold > 0.2", "True")
        visit.becomes("len(heat.clustered)", "160")
        visit.becomes("'written together' in compare.status", "True")
        visit.becomes("sum(scatter.points['kind'] == 'plan') > 3", "True")


@pytest.mark.skipif(find_spec("marimo") is None, reason="marimo is not installed")
def test_every_instrument_works_in_marimo(lab: Lab, tmp_path: Path) -> None:
    # names must not be in two cells, so the instruments share one, and what the kernel has another
    made = "\n".join(f"{name} = mo.ui.anywidget({code})" for name, code in SHOWN.items())
    told = "explorer.value['interaction_strength'], heat.value['order']"
    told += ", bridges.value['threshold'] > 0.2"
    cells = [
        f"import marimo as mo\n{MADE}\n{made}\nmo.vstack([{', '.join(SHOWN)}])",
        f"mo.plain_text('kernel: ' + str(({told})))",
    ]
    written = "import marimo\napp = marimo.App()\n"
    for number, cell in enumerate(cells):
        body = "\n".join(f"    {line}" for line in cell.splitlines())
        names = "" if number == 0 else "mo, " + ", ".join(SHOWN)
        given = f"    return mo, {', '.join(SHOWN)}"
        written += f"@app.cell\ndef _({names}):\n{body}\n{given if number == 0 else '    return'}\n"
    (tmp_path / "all.py").write_text(written, encoding="utf-8")
    command = ["marimo", "run", "all.py", "--headless", "--no-token", "--host=127.0.0.1"]
    with page_of(lab, command, tmp_path, "/health", "/") as visit:
        drive(visit.page)
        wanted = "kernel: (0.0, 'clustering', True)"
        eventually(visit.page.locator("body").inner_text, lambda found: wanted in found)


@needs("vscode-jupyter-ipywidgets8")
def test_every_instrument_works_in_the_widget_manager_of_vs_code(lab: Lab, tmp_path: Path) -> None:
    command = ["jupyterlab", "--no-browser", "--ip=127.0.0.1", "--allow-root"]
    command += ["--IdentityProvider.token=local", "--LabApp.expose_app_in_browser=True"]
    shown = "".join(f"\n{name} = {code}\ndisplay({name})" for name, code in SHOWN.items())
    manager = packed("vscode-jupyter-ipywidgets8", "dist/ipywidgets.js")
    with page_of(
        lab, command, tmp_path, "/api/status?token=local", "/lab?token=local&reset"
    ) as visit:
        page = visit.page
        page.wait_for_function("() => window.jupyterapp && jupyterapp.serviceManager.isReady")
        page.route(
            "**/vs_code.js", lambda r: r.fulfill(body=manager, content_type="text/javascript")
        )
        serve_anywidget(page, "**/nbextensions/anywidget/index.js")
        page.add_script_tag(content=packed("requirejs", "require.js"))
        page.evaluate(VS_CODE, "/vs_code.js")
        assert page.evaluate("code => run(code)", MADE + shown) == ""
        drive(page)
        told = (
            "explorer.interaction_strength, explorer.agrees, bridges.threshold > 0.2, "
            "len(heat.clustered), 'written together' in compare.status, "
            "sum(scatter.points['kind'] == 'plan') > 3"
        )
        eventually(
            lambda: page.evaluate("code => run(code)", f"print(({told}))"),
            lambda text: text.strip() == "(0.0, True, True, 160, True, True)",
            seconds=60,
        )


@needs("jupyter-widgets-html-manager")
def test_a_page_without_a_kernel_shows_the_explorers_and_solves(lab: Lab, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(MADE, names)
    views = [eval(SHOWN[name], names) for name in ("explorer", "bridges", "heat")]
    place = tmp_path / "page.html"
    embed_minimal_html(place, views=views, drop_defaults=False, embed_url="embed-amd.js")
    page_text = place.read_text(encoding="utf-8")
    script = r'<script src="[^"]*?([\w-]+)(?:\.min)?\.js"[^>]*>'
    own, count = re.subn(script, r'<script src="\1.js">', page_text)  # beside the page
    assert count == 2
    place.write_text(own, encoding="utf-8")
    for package, file in [
        ("jupyter-widgets-html-manager", "dist/embed-amd.js"),
        ("requirejs", "require.js"),
    ]:
        (tmp_path / Path(file).name).write_text(packed(package, file), encoding="utf-8")
    page = lab.browser.new_page(viewport={"width": 1280, "height": 1000})
    with closing(page):
        visit = Visit(page)
        visit.listen("file:")
        serve_anywidget(page, "**/npm/anywidget@*/**")
        page.goto(place.as_uri())
        page.locator(".cocurve h3").nth(2).wait_for(state="attached")
        for strength, key in [(1.0, "End"), (0.0, "Home")]:
            page.get_by_label("lambda, weight of the edges").focus()
            page.keyboard.press(key)
            plan = names["cl"].solve_greedy(names["H"], 0.2, strength)
            wanted = " ".join(map(str, plan.pruned))
            page.locator(f'.cocurve[data-pruned="{wanted}"]').wait_for()
        page.get_by_role("alert").filter(has_text="The kernel does not answer").wait_for()
        assert {"anywidget" in address for address in visit.outside} == {True}
