"""`cocurve` in a terminal or a batch job: the functions of the library, one verb each.

    common.py      models, H, rows of text, files that are never overwritten
    inventory.py   units from the configuration alone
    building.py    `build` and `merge`
    planning.py    `solve`
    pruning.py     `prune` and `export`
    evaluating.py  perplexity, KL, tasks
    demo.py        what `make demo` runs

Exit codes: 0 done, or there already; 1 an error, in words on stderr; 2 a wrong command line;
130 interrupted, by Ctrl-C or SIGTERM: what is done is kept, and stderr says how to go on.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import CocurveError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_DESCRIPTION = """\
Which parts of a language model can be removed together: estimate the curvature H of its attention
heads and FFN channel groups (build), solve for the units to remove (solve), remove them (prune),
and say what was lost (evaluate). Only `build` is slow. Notebooks find what it writes."""
_EPILOG = """\
a whole run, on the model that comes with the lab:
  cocurve inventory demo
  cocurve build demo --sequences 64 --out H
  cocurve solve H --ratio 0.2 --out plan.json
  cocurve prune demo plan.json --out smaller --verify
  cocurve evaluate smaller --against demo

`cocurve VERB --help` explains a verb. Exit codes: 0 done, 1 an error, 2 a wrong command line,
130 interrupted with what is done kept."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; nothing of the library escapes as a traceback.

    Args:
        argv: the arguments; None takes those of the process.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # --help, or a command line that cannot be read
        return int(stop.code or 0)
    options.again = shlex.join(["cocurve", *arguments])
    try:
        _quieten()
        with _terminated_like_interrupted(), warnings.catch_warnings():
            warnings.showwarning = _say_warning
            return int(options.run(options))
    except KeyboardInterrupt as stop:
        kept = str(stop) or "interrupted before anything was done; nothing is left behind."
        print(f"cocurve: {kept}", file=sys.stderr)
        return INTERRUPTED
    except (CocurveError, OSError) as error:
        print(f"cocurve {options.verb}: {error}", file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    from . import building, evaluating, inventory, planning, pruning

    parser = argparse.ArgumentParser(
        prog="cocurve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    from .. import __version__

    parser.add_argument("--version", action="version", version=f"cocurve-lab {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in (inventory, building, planning, pruning, evaluating):
        module.add_to(verbs)
    return parser


def _say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as a line, without the place in the code it came from."""
    print(f"cocurve: warning: {message}", file=sys.stderr)


def _quieten() -> None:
    """Only errors of transformers, and no bars of its own in a log file."""
    import transformers

    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which ends batch jobs, takes the way of Ctrl-C: the checkpoint is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: Any) -> None:
        # whoever holds Ctrl-C back for a few lines holds this back too
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(number, frame)
        else:  # background jobs of a script start with Ctrl-C ignored
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
