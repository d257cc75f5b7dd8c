"""cocurve-lab: which parts of a language model can be removed together.

Names are imported on first use, so that exploring a stored matrix needs numpy only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "models.architectures": ["Architecture", "describe"],
    "models.units": ["Unit", "UnitSet", "enumerate_units"],
    "models.loading": ["demo_folder", "load_model", "report_device"],
    "models.masking": ["ablate"],
    "calibration": ["CalibrationSet", "default_calibration"],
    "estimator.build": ["BuildOptions"],
    "estimator.probing": ["ProbeOptions"],
    "estimator.estimate": ["estimate_curvature", "exact_curvature", "load_or_estimate"],
    "estimator.exact": ["ExactOptions"],
    "curvature.matrix": ["Curvature", "merge_shards", "preview_note"],
    "curvature.uncertainty": ["Coverage", "Jackknife", "coverage", "jackknife"],
    "solver.stability": [
        "Convergence",
        "Stability",
        "StopWhenConverged",
        "is_converged",
        "selection_stability",
    ],
    "curvature.graph": ["Bridges", "bridge_units", "edge_graph"],
    "solver.targets": ["Target", "kv_cache_costs"],
    "solver.guards": ["Guards", "reachable_ratio"],
    "solver.selection": ["Selection"],
    "solver.solve": ["solve_greedy"],
    "solver.refinement": ["refine"],
    "solver.bounds": ["risk_lower_bound"],
    "solver.interaction": ["Gate", "LambdaPath", "lambda_path", "redundancy_gate"],
    "measuring.risk": ["PlanTable", "measure_plans", "pruning_risk"],
    "solver.variants": [
        "edge_variant",
        "measured_diagonal",
        "plain_greedy",
        "solve_variant",
        "structure_table",
    ],
    "studies.structure.matching": ["Matching", "causal_arms", "match_controls"],
    "measuring.agreement": ["Agreement", "agreement", "same_budget_pool"],
    "measuring.racing": ["ChoiceOptions"],
    "measuring.choosing": [
        "GuardsChoice",
        "InteractionChoice",
        "choose_guards",
        "choose_interaction_strength",
    ],
    "measuring.answers": ["AnswerTable", "answer_accuracy"],
    "methods.base": ["Evidence", "Method"],
    "methods.registry": ["get_method", "method_names"],
    "measuring.perplexity": ["Perplexity", "PerplexityOptions", "perplexity"],
    "evaluation.report": ["EvaluationReport"],
    "evaluation.tasks": ["TaskOptions", "evaluate_tasks"],
    "evaluation.task_files": ["LocalTask"],
    "evaluation.code_execution": ["Limits", "run_programs"],
    "evaluation.efficiency": ["Efficiency", "EfficiencyOptions", "measure_efficiency"],
    "studies.bake_off.compare": ["CompareOptions", "Judges", "compare"],
    "studies.bake_off.comparison": ["Comparison"],
    "measuring.choosing_gains": ["GainsChoice", "choose_gains"],
    "solver.gains": ["compensated_risk", "solve_gains"],
    "pruner.cutting": ["prune"],
    "pruner.equivalence": ["check_equivalence"],
    "pruner.saving": ["load_pruned", "save_pruned"],
    "pruner.card": ["CardFacts"],
    "export.gguf": ["GGUFFile", "export_gguf"],
    "estimator.cluster": ["RayExecutor", "ray_executor"],
    "measuring.generation": [
        "Question",
        "continue_text",
        "demo_questions",
        "example_prompts",
        "token_pieces",
    ],
    "measuring.lockstep": [
        "Sampling",
        "TextPair",
        "compare_text",
        "first_divergence",
        "forced_kl",
        "generate_lockstep",
    ],
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
