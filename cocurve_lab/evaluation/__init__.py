"""Tasks through the lm-evaluation-harness, and the size and speed of a pruned model.

In reading order:

    tasks.py           `evaluate_tasks`: a suite of tasks on a model, dense, ablated or pruned
    suites.py          the demo and the paper suite: their tasks, texts and averaged metrics
    task_files.py      a task as the files the harness reads; tasks from local JSONL files
    report.py          `EvaluationReport`: task -> metric -> value
    code_execution.py  pass@1: confined runs of code that a model wrote
    confinement.py     what confines it: bubblewrap, and the system calls it is refused
    runner.py          the script inside, which runs one program with its tests
    efficiency.py      size, speed and memory, dense and pruned in turn

Imports `measuring/`, `pruner/` and the rooms below them. Only this room imports lm_eval,
when tasks run.
"""
