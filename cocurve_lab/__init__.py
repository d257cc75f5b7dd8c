"""cocurve-lab: which parts of a language model can be removed together.

    model -> units -> masks -> H -> plan -> measured -> a smaller model
    models/            estimator/  solver/  measuring/  pruner/
                       curvature/

Read the core in an hour, twelve files: models/kinds.py, models/masking.py, estimator/algorithm1.py,
estimator/teacher.py, estimator/replay.py, curvature/matrix.py, solver/guards.py, solver/greedy.py,
solver/selection.py, pruner/slicing.py, pruner/cutting.py, pruner/equivalence.py.

Above the core stand extensions/, methods/, evaluation/ and cli/; ARCHITECTURE.md explains the tree.
Names are imported on first use, so that exploring a stored matrix needs numpy only.
"""

from __future__ import annotations

try:  # noqa: SIM105, contextlib takes longer to import than all of this
    __import__(f"{__name__}.extensions")  # registers what is optional
except ModuleNotFoundError:  # the core also works without the folder
    pass

__version__ = "0.1.0"

_HOMES = {
    # A model and what can be removed from it
    "load_model": "models.loading",
    "report_device": "extensions.device",
    "Unit": "models.unit",
    "UnitSet": "models.units",
    "KINDS": "models.kinds",
    "register_family": "models.families",
    "enumerate_units": "models.units",
    "ablate": "models.masking",
    # H, from text
    "CalibrationSet": "calibration",
    "default_calibration": "extensions.texts.documents",
    "estimate_curvature": "estimator.estimate",
    "load_or_estimate": "estimator.estimate",
    "BuildOptions": "curvature.settings",
    "StopWhenConverged": "extensions.analysis.stability",
    "Curvature": "curvature.matrix",
    "jackknife": "curvature.uncertainty",
    "edge_graph": "curvature.graph",
    "bridge_units": "curvature.graph",
    # A plan, from H
    "Target": "solver.targets",
    "kv_cache_costs": "solver.targets",
    "Guards": "solver.guards",
    "opening_guards": "solver.protection",
    "Selection": "solver.selection",
    "allow_other_weights": "models.identity",
    "solve_greedy": "solver.solve",
    "solve_aligned": "extensions.machine",
    "Machine": "extensions.machine",
    "redundancy_gate": "extensions.analysis.gate",
    "lambda_path": "solver.path",
    "refine": "extensions.analysis.refinement",
    "risk_lower_bound": "extensions.analysis.bounds",
    "edge_variant": "extensions.analysis.variants",
    "solve_gains": "extensions.analysis.gains",
    "is_converged": "extensions.analysis.stability",
    "selection_stability": "extensions.analysis.stability",
    # What a plan costs, measured
    "pruning_risk": "measuring.risk",
    "measure_plans": "measuring.risk",
    "agreement": "extensions.judging.agreement",
    "ChoiceOptions": "extensions.choosing.racing",
    "choose_interaction_strength": "extensions.choosing.settings",
    "search_plan": "extensions.choosing.search",
    "perplexity": "extensions.judging.perplexity",
    "continue_text": "extensions.judging.generation",
    "demo_questions": "extensions.judging.generation",
    "example_prompts": "extensions.judging.generation",
    "compare_text": "extensions.judging.lockstep",
    "answer_accuracy": "extensions.judging.answers",
    "split_risk": "extensions.judging.gap",
    "measure_interactions": "extensions.interactions.measured",
    # A smaller model
    "prune": "pruner.cutting",
    "repair": "extensions.repairing.repair",
    "recover": "extensions.repairing.recovery",
    "best_plan": "extensions.choosing.best_plan",
    "check_equivalence": "pruner.equivalence",
    "save_pruned": "pruner.saving",
    "load_pruned": "pruner.saving",
    "export_gguf": "extensions.gguf.gguf",
    # Other methods, tasks, pictures
    "get_method": "methods.registry",
    "evaluate_tasks": "evaluation.tasks",
    "EvaluationReport": "evaluation.report",
    "plot_saliency": "extensions.figures",
    "plot_correlation": "extensions.figures",
    "plot_budget": "extensions.figures",
    # What goes wrong
    "CocurveError": "base.errors",
    "InputError": "base.errors",
    "ArchitectureError": "base.errors",
    "MismatchError": "base.errors",
    "FileFormatError": "base.errors",
    "NumericalError": "base.errors",
    "EquivalenceError": "base.errors",
    "InfeasibleError": "base.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
