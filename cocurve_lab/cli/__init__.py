"""`cocurve` in a terminal or a batch job: one verb for each step of the flow.

A verb is a typed function, and tyro makes its options of the arguments and the docstring. Other
packages add verbs at the entry point `cocurve.verbs`.

    models.py      verbs that run a model, or read it and write a smaller one
    files.py       `merge`, `solve`, `fetch` and `lab`: verbs that need no model
    arguments.py   what verbs take and write
    common.py      models, text and tasks of several verbs
    demo.py        the whole flow in one command (`make demo`)

Exit codes: 0 done, or the result was there already; 1 an error, described on stderr; 2 a wrong
command line; 130 interrupted by Ctrl-C or SIGTERM: finished work is kept, and stderr says how to
resume. README.md explains the verbs.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from inspect import cleandoc
from typing import Any

from .. import __version__
from ..base.errors import CocurveError, one_line

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
VERBS = {  # the files of the verbs, in the order of the flow
    "inventory": "models",
    "build": "models",
    "merge": "files",
    "solve": "files",
    "search": "models",
    "prune": "models",
    "recover": "models",
    "evaluate": "models",
    "compress": "models",
    "export": "models",
    "chat": "models",
    "fetch": "files",
    "lab": "files",
}
_HELP = """\
usage: cocurve VERB [OPTIONS]

Find the parts of a language model that can be removed together: estimate the curvature H of its
attention heads and FFN channel groups (build), choose the units to remove (solve), remove them
(prune), and measure what was lost (evaluate). Only `build` is slow. Notebooks find the H that it
writes.

  inventory   list the removable units of a model
  build       estimate H of a model
  merge       join the shards of a build
  solve       choose the units to remove within a budget, from H alone
  search      search for a plan of lower measured KL near a plan
  prune       remove the units of a plan from a model
  recover     train a pruned model until it answers as the dense one does
  evaluate    measure a dense or pruned model
  compress    find the best smaller model that some minutes of work buy
  export      write a pruned model as one GGUF file
  chat        let a pruned model continue what you type, beside the dense one
  fetch       fetch SmolLM2-135M-Instruct once, as the model smollm2
  lab         copy the notebooks into a folder and open the first one in JupyterLab
  paper       measure the paper's tables

a complete run on the model that comes with the lab:
  cocurve inventory demo
  cocurve build demo --sequences 64 --out H
  cocurve solve H --ratio 0.2 --out plan.json
  cocurve prune demo plan.json --out smaller --verify
  cocurve evaluate smaller --against demo

`cocurve VERB --help` explains a verb; `cocurve --version` names the version. Exit codes: 0 done, 1
an error, 2 a wrong command line, 130 interrupted (finished work is kept). COCURVE_DEBUG=1 in the
environment shows where an error arose."""

_UNFORESEEN = """\
{}: {}. This is an error that cocurve did not expect; to see where it arose, run the same command \
with COCURVE_DEBUG=1 set."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Every error becomes a line on stderr, not a traceback; with COCURVE_DEBUG=1 it is raised.

    Args:
        argv: the arguments; None means those of the process.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_say_warning, set())
            return _run(words)
    except SystemExit as stop:  # --help, or a command line that cannot be read
        return int(stop.code or DONE)
    except KeyboardInterrupt as stop:
        kept = str(stop) or "interrupted; what was finished is kept where the command keeps it"
        print(
            f"cocurve: {kept.rstrip('.')}. To resume: cocurve {shlex.join(words)}", file=sys.stderr
        )
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("COCURVE_DEBUG"):
            raise
        foreseen = isinstance(error, (CocurveError, OSError))
        told = str(error) if foreseen else _UNFORESEEN.format(type(error).__name__, one_line(error))
        print(f"cocurve {words[0]}: {told}", file=sys.stderr)
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("--help", "-h", "--version"):
        print(_HELP if name != "--version" else f"cocurve-lab {__version__}")
        return DONE
    verb = verb_named(name)
    if verb is None:
        print(f"cocurve: {name!r} is no VERB. See `cocurve --help` for the verbs.", file=sys.stderr)
        return USAGE
    import tyro

    done = tyro.cli(
        verb,
        args=words[1:],
        prog=f"cocurve {name}",
        description=cleandoc(verb.__doc__ or "").partition("\n\nArgs:\n")[0],
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return done or DONE


def verb_named(name: str) -> Callable[..., int | None] | None:
    """Return the function of a verb, here or in another package; None if there is none."""
    if name in VERBS:
        return getattr(import_module(f"{__name__}.{VERBS[name]}"), name)
    further = entry_points(group="cocurve.verbs", name=name)
    return next(iter(further)).load() if further else None


def _say_warning(said: set[str], message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, once, without the place in the code that it came from."""
    if str(message) not in said:
        said.add(str(message))
        print(f"cocurve: warning: {message}", file=sys.stderr)
