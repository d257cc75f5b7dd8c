"""How good, how fast and how large a model is: perplexity, tasks, executed code, efficiency.

Nothing here is imported by the core, and lm_eval only when tasks are run.
"""
