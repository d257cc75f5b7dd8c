"""Tasks through the lm-evaluation-harness, and the size and speed of a pruned model.

In reading order:

    tasks.py           `evaluate_tasks`: a suite of tasks on a model, dense, ablated or pruned
    suites.py          the demo and the paper suite: their tasks, and the metrics they average
    task_files.py      a task as the files the harness reads; tasks from local JSONL files
    harness.py         the call of lm_eval, and the scores read from its results
    report.py          `EvaluationReport`: task -> metric -> value
    code_execution.py  pass@1: confined runs of code that a model wrote
    sandbox.py         the process that confines it
    efficiency.py      size, speed and memory, dense and pruned in turn

Imports `measuring/` and the rooms below it. Only this room imports lm_eval, when tasks run.
"""
