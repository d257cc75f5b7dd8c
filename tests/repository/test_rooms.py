"""The rooms: no import goes up, none grows, and the core runs alone."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

from helpers.problems import make_units, random_curvature

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"cocurve_lab": ROOT, "cocurve_studies": ROOT / "notebooks"}
FLOORS = {"extensions": 1, "methods": 2, "evaluation": 2, "cli": 3}  # the core's rooms: 0
FILES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for package, root in PACKAGES.items()
    for path in (root / package).rglob("*.py")
}
# a package from outside -> where the library may import it
ALLOWED: dict[str, tuple[str, ...]] = {
    "lm_eval": ("evaluation",),
    "ray": ("extensions.big_models",),
    "gguf": ("extensions.gguf",),
    "plotly": ("extensions.figures",),
    "pandas": ("evaluation", "measuring", "extensions.choosing", "extensions.judging"),
    "matplotlib": (),
    "ipywidgets": (),
    "anywidget": (),
    "cocurve_widgets": (),
    "cocurve_studies": (),
}


def floor_of(module: str) -> int:
    package, _, rest = module.partition(".")
    if package == "cocurve_studies" or rest in ("", "__main__"):
        return 4
    return FLOORS.get(rest.partition(".")[0], 0)


def imports_in(module: str, tree: ast.AST) -> Iterator[str]:
    """All that a file imports: modules of ours, and packages from outside.

    Anywhere in the file, but under `if TYPE_CHECKING:`.
    """
    inside = module.split(".")
    package = inside if FILES[module].name == "__init__.py" else inside[:-1]
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield from imports_in(module, node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{home}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else home for name in names)


def test_no_import_goes_up_or_round_and_packages_stay_in_their_rooms() -> None:
    graph = nx.DiGraph()
    wrong = []
    for module, path in FILES.items():
        graph.add_node(module)
        for found in imports_in(module, ast.parse(path.read_text(encoding="utf-8"))):
            graph.add_edge(module, found)
            if found in FILES and "." in found and floor_of(module) < floor_of(found):
                wrong.append((module, found))
            places = ALLOWED.get(found.partition(".")[0])
            inside = module.removeprefix("cocurve_lab.")
            if places is not None and module != inside and not inside.startswith(places):
                wrong.append((module, found))
    assert wrong == []
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    assert [part for part in nx.strongly_connected_components(graph) if len(part) > 1] == []
    for module in numpy_only():
        reached = nx.descendants(graph, module)
        assert not {name for name in reached if name.split(".")[0] in ("torch", "transformers")}


def numpy_only() -> list[str]:
    """The modules of H and of the solver."""
    return [module for module in FILES if module.split(".")[1:2] in (["curvature"], ["solver"])]


NUMPY_ONLY = """
import importlib, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "pandas"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
for module in sys.argv[2:]:
    importlib.import_module(module)
import cocurve_lab as cl

H = cl.Curvature.load(sys.argv[1])
plan = cl.solve_greedy(H, 0.2)
gate, path, bridges = cl.redundancy_gate(H), cl.lambda_path(H, 0.2), cl.bridge_units(H)
cl.refine(plan, H), cl.risk_lower_bound(H, 0.2), cl.solve_gains(H, plan), cl.edge_graph(H)
cl.plot_correlation(H), cl.plot_saliency(H), cl.plot_budget(plan)
from cocurve_widgets import BridgeExplorer, LambdaExplorer, export_html
LambdaExplorer(H), BridgeExplorer(H)
export_html(H, sys.argv[1] + ".html")
print(cl.Selection.from_json(plan.to_json()) is not None, len(plan))
"""


def test_a_stored_H_opens_solves_and_shows_without_torch(tmp_path: Path) -> None:
    stored = random_curvature(make_units(), groups=4).save(tmp_path / "H.pkl")
    command = [sys.executable, "-c", NUMPY_ONLY, str(stored), *numpy_only()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "4"]


def test_public_names_import_no_optional_package() -> None:
    optional = {"ipywidgets", "anywidget", "plotly", "matplotlib", "ray", "gguf"}
    optional |= {"lm_eval", "datasets"}
    program = (
        "import sys, cocurve_lab as cl\n"
        "for name in cl.__all__: getattr(cl, name)\n"  # names are imported on first use
        f"print(*sorted({optional!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# The house may only shrink ------------------------------------------------------------------------


TOOL = ROOT.parent / "shared" / "tools" / "size.py"


@pytest.mark.skipif(not TOOL.is_file(), reason="the tool that counts statements is not here")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the marks are read from git")
def test_no_room_grows_past_its_mark() -> None:
    measured = subprocess.run([sys.executable, TOOL], cwd=ROOT, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stdout + measured.stderr


# The core alone -----------------------------------------------------------------------------------


FLOW = """
import sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import cocurve_lab as cl

folder = Path(sys.argv[1])
assert Path(cl.__file__).is_relative_to(folder)
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=42, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=97, max_position_embeddings=64,
)
model = LlamaForCausalLM(config).eval()
text = cl.CalibrationSet(torch.randint(0, 97, (3, 20)))
units = cl.enumerate_units(model, 4)
found = cl.estimate_curvature(model, units, text, 16, progress=False)
found = cl.Curvature.load(found.save(folder / "H.pkl"))
plan = cl.solve_greedy(found, 0.25)
assert cl.pruning_risk(model, plan, text) > 0
pruned = cl.prune(model, plan, verify=text)
again = cl.load_pruned(cl.save_pruned(pruned, folder / "small"), device="cpu")
assert torch.equal(again(text.input_ids).logits, pruned(text.input_ids).logits)
try:
    cl.prune(model, plan, out=folder / "streamed")
except cl.InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_flow_runs_without_the_extensions(tmp_path: Path) -> None:
    unwanted = shutil.ignore_patterns("extensions", "__pycache__")
    shutil.copytree(ROOT / "cocurve_lab", tmp_path / "cocurve_lab", ignore=unwanted)
    command = [sys.executable, "-c", FLOW, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "extensions" in done.stdout
