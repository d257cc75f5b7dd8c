"""cocurve-lab: which parts of a language model can be removed together.

Names are imported on first use, so that exploring a stored matrix needs numpy only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "architectures": ["Architecture", "describe"],
    "units": ["Unit", "UnitSet", "enumerate_units"],
    "loading": ["demo_folder", "load_model", "report_device"],
    "masking": ["ablate"],
    "calibration": ["CalibrationSet", "default_calibration"],
    "build": ["BuildOptions"],
    "probing": ["ProbeOptions"],
    "estimator": ["estimate_curvature", "load_or_estimate"],
    "infinitesimal": ["exact_curvature"],
    "curvature": ["Curvature"],
    "uncertainty": ["Coverage", "Jackknife", "coverage", "jackknife"],
    "stability": [
        "Convergence",
        "Stability",
        "StopWhenConverged",
        "is_converged",
        "selection_stability",
    ],
    "graph": ["Bridges", "bridge_units", "edge_graph"],
    "targets": ["Target", "kv_cache_costs"],
    "guards": ["Guards", "reachable_ratio"],
    "selection": ["Selection"],
    "solver": ["solve_greedy"],
    "refinement": ["refine"],
    "bounds": ["risk_lower_bound"],
    "interaction": ["Gate", "LambdaPath", "lambda_path", "redundancy_gate"],
    "risk": ["PlanTable", "measure_plans", "pruning_risk"],
    "variants": [
        "edge_variant",
        "measured_diagonal",
        "plain_greedy",
        "solve_variant",
        "structure_table",
    ],
    "matching": ["Matching", "causal_arms", "match_controls"],
    "fidelity": ["Agreement", "agreement", "same_budget_pool"],
    "racing": ["ChoiceOptions"],
    "choosing": [
        "GuardsChoice",
        "InteractionChoice",
        "choose_guards",
        "choose_interaction_strength",
    ],
    "studies.capabilities": ["AnswerTable", "answer_accuracy"],
    "methods.base": ["Evidence", "Method"],
    "methods.registry": ["get_method", "method_names"],
    "evaluation.perplexity": ["Perplexity", "PerplexityOptions", "perplexity"],
    "evaluation.report": ["EvaluationReport"],
    "evaluation.tasks": ["TaskOptions", "evaluate_tasks"],
    "evaluation.local_tasks": ["LocalTask"],
    "evaluation.code_execution": ["Limits", "run_programs"],
    "evaluation.efficiency": ["Efficiency", "EfficiencyOptions", "measure_efficiency"],
    "evaluation.compare": ["CompareOptions", "Judges", "compare"],
    "evaluation.comparison": ["Comparison"],
    "compensation": ["GainsChoice", "choose_gains", "compensated_risk", "solve_gains"],
    "pruner": ["prune"],
    "equivalence": ["check_equivalence"],
    "saving": ["load_pruned", "save_pruned"],
    "export.card": ["CardFacts"],
    "export.gguf": ["GGUFFile", "export_gguf"],
    "merging": ["merge_shards"],
    "distributed": ["RayExecutor", "ray_executor"],
    "generation": [
        "Question",
        "continue_text",
        "demo_questions",
        "example_prompts",
        "token_pieces",
    ],
    "lockstep": [
        "Sampling",
        "TextPair",
        "compare_text",
        "first_divergence",
        "forced_kl",
        "generate_lockstep",
    ],
    "preview": ["preview_note"],
    "figures": ["plot_budget", "plot_correlation", "plot_saliency"],
    "errors": [
        "ArchitectureError",
        "CocurveError",
        "EquivalenceError",
        "FileFormatError",
        "InfeasibleError",
        "InputError",
        "MismatchError",
        "NumericalError",
        "WorkerError",
    ],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
