"""The paper's studies, one room per notebook: functions that return tidy tables, and pictures.

    draws.py     errors of a difference between plans, over rows and draws of H
    findings.py  a claim beside what was measured, and the verdict
    sections.py  where each study stands in the notebooks
    shared.py    what the studies share: the recipe of a build, marks of kept tables, resampling
    abilities.py  right answers by lambda (notebook 06) and by edge variant (notebook 07)
    surrogates.py  plans of H, Q and F beside what they cost (notebook 11)
    exercises.py  the checks of the notebooks' exercises
    trust/       notebook 06: when to trust the edges
    structure/   notebook 07: bridges and structure
    certainty/   notebook 08: how sure H is
    bake_off/    notebook 09: CoCurve against other methods

The top of the house: no other room imports it. The notebooks do.
"""
