"""How good, how fast and how large a model is.

In reading order:

    tasks.py           `evaluate_tasks`: suites of tasks through lm_eval
    suites.py          the demo and the paper suite: what is asked, which metric is averaged
    task_files.py      tasks from JSONL files, and a task as the files the harness reads
    harness.py         driving lm_eval
    report.py          `EvaluationReport`: task -> metric -> value
    code_execution.py  pass@1: running code a model wrote
    sandbox.py         the process that code is shut in
    efficiency.py      size, speed and memory, dense and pruned in turn

Imports `measuring/` and what lies below it. Only this room imports lm_eval, when tasks run.
"""
