"""Tasks through the lm-evaluation-harness, and the size and speed of a pruned model.

In reading order:

    tasks.py           `evaluate_tasks`: a suite of tasks on a model, dense, ablated or pruned
    suites.py          the demo and the paper suite: their tasks, and the metrics they average
    sources.py         where their questions and texts are: the hub, or a folder of copies
    task_files.py      a task as the files the harness reads; tasks from local JSONL files
    harness.py         the call of lm_eval, and the scores read from its results
    report.py          `EvaluationReport`: task -> metric -> value
    code_execution.py  pass@1: confined runs of code that a model wrote
    confinement.py     what confines it: bubblewrap
    system_calls.py    the system calls it is refused
    judge.py           the script inside, which runs one program and records its end
    efficiency.py      size, speed and memory, dense and pruned in turn
    reproduction.py    `Reproduction`: the paper's tables measured on one model, resumable
    published.py       the paper's numbers, and those of the authors' release
    side_by_side.py    measured and published numbers as CSV and Markdown

Imports `measuring/`, `export/`, `pruner/` and the rooms below them. Only this room imports lm_eval,
when tasks run.
"""
