"""cocurve-lab: which parts of a language model can be removed together.

    model -> units -> masks -> H -> plan -> measured -> a smaller model
    models/            estimator/  solver/  measuring/  pruner/
                       curvature/

Read the core in an hour, twelve files: models/units.py, models/masking.py, estimator/algorithm1.py,
estimator/teacher.py, estimator/replay.py, curvature/matrix.py, solver/guards.py, solver/greedy.py,
solver/selection.py, pruner/slicing.py, pruner/cutting.py, pruner/equivalence.py.

Above the core stand extensions/, methods/, evaluation/ and cli/; ARCHITECTURE.md explains the tree.
Names are imported on first use, so that exploring a stored matrix needs numpy only.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

with suppress(ModuleNotFoundError):  # the core also works without the folder
    import_module(f"{__name__}.extensions")  # fills the seams

__version__ = "0.1.0"

_FLOW = {
    # A model and what can be removed from it
    "load_model": "models.loading",
    "report_device": "models.loading",
    "Unit": "models.units",
    "UnitSet": "models.units",
    "KINDS": "models.families",
    "enumerate_units": "models.units",
    "ablate": "models.masking",
    # H, from text
    "CalibrationSet": "calibration",
    "default_calibration": "calibration",
    "estimate_curvature": "estimator.estimate",
    "load_or_estimate": "estimator.estimate",
    "BuildOptions": "curvature.settings",
    "ProbeOptions": "extensions.analysis.preview",
    "StopWhenConverged": "extensions.analysis.stability",
    "ray_executor": "extensions.big_models.cluster",
    "Curvature": "curvature.matrix",
    "jackknife": "curvature.uncertainty",
    "edge_graph": "curvature.graph",
    "bridge_units": "curvature.graph",
    # A plan, from H
    "Target": "solver.targets",
    "kv_cache_costs": "solver.targets",
    "Guards": "solver.guards",
    "Selection": "solver.selection",
    "solve_greedy": "solver.solve",
    "redundancy_gate": "solver.gate",
    "lambda_path": "solver.path",
    "refine": "extensions.analysis.refinement",
    "risk_lower_bound": "extensions.analysis.bounds",
    "edge_variant": "solver.variants",
    "solve_gains": "solver.gains",
    "is_converged": "extensions.analysis.stability",
    "selection_stability": "extensions.analysis.stability",
    # What a plan costs, measured
    "pruning_risk": "measuring.risk",
    "measure_plans": "measuring.risk",
    "agreement": "measuring.agreement",
    "ChoiceOptions": "extensions.choosing.racing",
    "choose_interaction_strength": "extensions.choosing.settings",
    "search_plan": "extensions.choosing.search",
    "perplexity": "measuring.perplexity",
    "continue_text": "measuring.generation",
    "demo_questions": "measuring.generation",
    "example_prompts": "measuring.generation",
    # A smaller model
    "prune": "pruner.cutting",
    "repair": "extensions.repairing.repair",
    "best_plan": "extensions.choosing.best_plan",
    "check_equivalence": "pruner.equivalence",
    "save_pruned": "pruner.saving",
    "load_pruned": "pruner.saving",
    "CardFacts": "pruner.card",
    "export_gguf": "extensions.gguf.gguf",
    # Other methods, tasks, pictures
    "get_method": "methods.registry",
    "evaluate_tasks": "evaluation.tasks",
    "EvaluationReport": "evaluation.report",
    "measure_efficiency": "evaluation.efficiency",
    "CompareOptions": "cocurve_studies.bake_off.settings",
    "Judges": "cocurve_studies.bake_off.settings",
    "compare": "cocurve_studies.bake_off.compare",
    "match_controls": "cocurve_studies.structure.matching",
    "plot_saliency": "figures",
    "plot_correlation": "figures",
    "plot_budget": "figures",
    # What goes wrong
    "CocurveError": "base.errors",
    "InputError": "base.errors",
    "ArchitectureError": "base.errors",
    "MismatchError": "base.errors",
    "FileFormatError": "base.errors",
    "NumericalError": "base.errors",
    "EquivalenceError": "base.errors",
    "InfeasibleError": "base.errors",
    "WorkerError": "base.errors",
}
_ALSO = {
    "Architecture": "models.architectures",
    "describe": "models.architectures",
    "demo_folder": "models.loading",
    "is_demo": "models.loading",
    "units_like": "models.units",
    "exclusive": "models.runtime",
    "merge_shards": "curvature.matrix",
    "preview_note": "extensions.surrogates.notes",
    "TRUSTED_STRENGTH": "extensions.surrogates.notes",
    "BLOCKS": "curvature.matrix",
    "PAIR_KL": "extensions.surrogates.pair_kl",
    "Coverage": "cocurve_studies.certainty.resampling",
    "Jackknife": "curvature.uncertainty",
    "coverage": "cocurve_studies.certainty.resampling",
    "Bridges": "curvature.graph",
    "exact_curvature": "estimator.estimate",
    "ExactOptions": "extensions.analysis.exact",
    "RayExecutor": "extensions.big_models.cluster",
    "Build": "estimator.build",
    "Convergence": "extensions.analysis.stability",
    "Stability": "extensions.analysis.stability",
    "ADDITIVE_KL": "extensions.surrogates.additive",
    "reachable_ratio": "solver.guards",
    "Gate": "solver.gate",
    "LambdaPath": "solver.path",
    "longest": "solver.solve",
    "require_strength": "solver.targets",
    "require_ratio": "solver.targets",
    "measured_diagonal": "solver.variants",
    "plain_greedy": "solver.variants",
    "solve_variant": "solver.variants",
    "structure_table": "solver.variants",
    "compensated_risk": "solver.gains",
    "PlanTable": "measuring.risk",
    "Meter": "measuring.risk",
    "plans_file": "measuring.plan_memory",
    "answers_file": "measuring.plan_memory",
    "PlanSearch": "extensions.choosing.search",
    "SearchFront": "extensions.choosing.search",
    "SearchOptions": "extensions.choosing.search",
    "search_front": "extensions.choosing.search",
    "TorchAdditiveKL": "extensions.surrogates.additive_torch",
    "RiskSplit": "measuring.gap",
    "staged_plan": "extensions.surrogates.staged",
    "split_risk": "measuring.gap",
    "Agreement": "measuring.agreement",
    "same_budget_pool": "measuring.agreement",
    "POOL_METHODS": "measuring.agreement",
    "PREDICTIONS": "measuring.agreement",
    "predictions": "measuring.agreement",
    "GuardsChoice": "extensions.choosing.settings",
    "InteractionChoice": "extensions.choosing.settings",
    "choose_guards": "extensions.choosing.settings",
    "AnswerTable": "measuring.answers",
    "answer_accuracy": "measuring.answers",
    "AnswerOptions": "measuring.answers",
    "Asker": "measuring.answers",
    "Perplexity": "measuring.perplexity",
    "PerplexityOptions": "measuring.perplexity",
    "GainsChoice": "extensions.choosing.gains",
    "choose_gains": "extensions.choosing.gains",
    "Question": "measuring.generation",
    "read_questions": "measuring.generation",
    "GrowingText": "measuring.generation",
    "token_pieces": "measuring.generation",
    "Sampling": "measuring.lockstep",
    "TextPair": "measuring.lockstep",
    "compare_text": "measuring.lockstep",
    "first_divergence": "measuring.lockstep",
    "forced_kl": "measuring.lockstep",
    "next_token_probabilities": "measuring.lockstep",
    "generate_lockstep": "measuring.lockstep",
    "encode_prompt": "measuring.lockstep",
    "RepairOptions": "extensions.repairing.repair",
    "model_risk": "measuring.risk",
    "recover": "extensions.repairing.recovery",
    "RecoverOptions": "extensions.repairing.recovery",
    "Evidence": "methods.base",
    "Method": "methods.base",
    "method_names": "methods.registry",
    "take_in_order": "methods.filling",
    "TaskOptions": "evaluation.tasks",
    "LocalTask": "evaluation.task_files",
    "Limits": "evaluation.code_execution",
    "run_programs": "evaluation.code_execution",
    "Efficiency": "evaluation.efficiency",
    "EfficiencyOptions": "evaluation.efficiency",
    "GGUFFile": "extensions.gguf.gguf",
    "quantize_gguf": "extensions.gguf.quantizing",
    "Matching": "cocurve_studies.structure.matching",
    "causal_arms": "cocurve_studies.structure.matching",
    "Comparison": "cocurve_studies.bake_off.comparison",
    "write_atomically": "base.atomic",
}
_HOMES = _FLOW | _ALSO
__all__ = list(_FLOW)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = home if home.startswith("cocurve_studies") else f"{__name__}.{home}"
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
