"""`cocurve` in a terminal or a batch job: one verb for each step of the flow.

Other packages add verbs at the entry point `cocurve.verbs`. In the order of the flow:

    inventory.py   `inventory`: the removable units and their costs
    building.py    `build` and `merge`: H
    planning.py    `solve`: a plan
    searching.py   `search`: a plan of lower measured KL
    pruning.py     `prune` and `export`: a smaller model
    recovering.py  `recover`: a little training
    evaluating.py  `evaluate`: perplexity, KL and tasks
    compressing.py `compress`: all of it in a given time
    fetching.py    `fetch`: a real language model
    opening.py     `lab`: the notebooks, in JupyterLab
    common.py      options and checks that several verbs share
    options.py     flags from dataclasses
    demo.py        the whole flow in one command (`make demo`)

Exit codes: 0 done, or the result was there already; 1 an error, described on stderr; 2 a wrong
command line; 130 interrupted by Ctrl-C or SIGTERM: finished work is kept, and stderr says how to
resume. README.md explains the verbs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..base.atomic import clean
from ..base.errors import CocurveError, one_line
from .options import Verb, add_verb, made

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_DESCRIPTION = """\
Find the parts of a language model that can be removed together: estimate the curvature H of its
attention heads and FFN channel groups (build), choose the units to remove (solve), remove them
(prune), and measure what was lost (evaluate). Only `build` is slow. Notebooks find the H that it
writes."""
_EPILOG = """\
a complete run on the model that comes with the lab:
  cocurve inventory demo
  cocurve build demo --sequences 64 --out H
  cocurve solve H --ratio 0.2 --out plan.json
  cocurve prune demo plan.json --out smaller --verify
  cocurve evaluate smaller --against demo

`cocurve VERB --help` explains a verb. Exit codes: 0 done, 1 an error, 2 a wrong command line,
130 interrupted (finished work is kept). COCURVE_DEBUG=1 in the environment shows where an error
arose."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Every error becomes a line on stderr, not a traceback; with COCURVE_DEBUG=1 it is raised.

    Args:
        argv: the arguments; None means those of the process.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt as stop:
        kept = str(stop) or "interrupted before anything was done; nothing is left behind."
        print(f"cocurve: {kept}", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(arguments: list[str]) -> int:
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # --help, or a command line that cannot be read
        return int(stop.code or 0)
    options.again = shlex.join(["cocurve", *arguments])  # the command that resumes, to paste
    try:
        _quieten()
        with warnings.catch_warnings():
            warnings.showwarning = partial(_say_warning, set())
            verb: Verb = made(options.verb_class, vars(options))
            out: Path | None = getattr(verb, "out", None)
            if out is not None:  # what killed runs left there
                clean(out)
                clean(out.parent)
            return verb.run()
    except Exception as error:
        if os.environ.get("COCURVE_DEBUG"):
            raise
        print(f"cocurve {options.verb}: {_told(error)}", file=sys.stderr)
        return FAILED


def _told(error: Exception) -> str:
    """An error in words; one that nobody foresaw with its type, and how to see where it arose."""
    if isinstance(error, (CocurveError, OSError)):
        return re.sub(r"(\S{60})\S{240,}", r"\1...", str(error))  # a path may be very long
    return (
        f"{type(error).__name__}: {one_line(error)}. This is an error that cocurve did not expect; "
        "to see where it arose, run the same command with COCURVE_DEBUG=1 set."
    )


def _parser() -> argparse.ArgumentParser:
    from .. import __version__
    from .building import Build, Merge
    from .compressing import Compress
    from .evaluating import Evaluate
    from .fetching import Fetch
    from .inventory import Inventory
    from .opening import Lab
    from .planning import Solve
    from .pruning import Export, Prune
    from .recovering import Recover
    from .searching import Search

    parser = argparse.ArgumentParser(
        prog="cocurve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a script that abbreviates would break with the next option
    )
    parser.add_argument("--version", action="version", version=f"cocurve-lab {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    kinds: list[type[Verb]] = [Inventory, Build, Merge, Solve, Search, Prune, Export, Recover]
    kinds += [Evaluate, Compress, Fetch, Lab]
    # packages beside this one add subclasses of Verb at this entry point (see pyproject.toml)
    kinds += [entry.load() for entry in entry_points(group="cocurve.verbs")]
    for kind in kinds:
        add_verb(verbs, kind)
    return parser


def _say_warning(said: set[str], message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, once, without the place in the code that it came from."""
    if str(message) not in said:
        said.add(str(message))
        print(f"cocurve: warning: {message}", file=sys.stderr)


def _quieten() -> None:
    """Silence transformers' warnings, and its progress bars in a log file."""
    import transformers

    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
