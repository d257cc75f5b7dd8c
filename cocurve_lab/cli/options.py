"""Command-line flags from dataclasses: each field is a flag, and each verb a dataclass.

    @dataclass(frozen=True, kw_only=True)
    class Solve(Verb):
        curvature: str = argument("H", "the file of H, or its folder")
        ratio: float | None = flag("share of removable parameters to remove")
        guards: Guards = part(layer_cap="largest share removed from a layer")

The type of a field says how its text is read, and its default what is taken without the flag. A
`part` is a dataclass in a field: its flags stand among those of the verb.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from inspect import cleandoc
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_NO_FLAGS: Mapping[str, Any] = MappingProxyType({})


def flag(
    text: str,
    default: Any = MISSING,
    *,
    name: str = "",
    one_of: str = "",
    at_most_one_of: str = "",
    **more: Any,
) -> Any:
    """Make the flag of a field.

    Args:
        text: its help.
        default: without one, a field that may be None is None, a bool False, a tuple empty, and
            any other field is required.
        name: of the flag, where it is not the name of the field.
        one_of, at_most_one_of: a group of flags of which one must, or may, be given.
        more: for `add_argument`, such as `metavar` and `type`.
    """
    group = (one_of or at_most_one_of, bool(one_of))
    metadata = {"flag": text, "name": name, "group": group, "more": more}
    return field(default=default, metadata=metadata)


def argument(metavar: str, text: str, **more: Any) -> Any:
    """Make a field that is given by its position, without a flag."""
    return flag(text, positional=True, metavar=metavar, **more)


def part(**flags: Any) -> Any:
    """Make a field that holds a dataclass.

    Args:
        flags: for fields that describe no flag, or another one: the help, or a `flag`.
    """
    return field(metadata={"part": flags})


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A verb: its flags, a docstring for --help with examples at its end, and `run`."""

    again: str = ""  # the command line, to paste

    def run(self) -> int:
        """Run the verb and return the exit code."""
        raise NotImplementedError


def add_verb(verbs: Any, verb: type[Verb]) -> None:
    """Add a verb to the command line."""
    text, _, examples = cleandoc(verb.__doc__ or "").partition("\n\nExamples:\n")
    description = " ".join(text.split())
    parser = verbs.add_parser(
        verb.__name__.lower(),
        # the list of verbs shows the first clause
        help=description.split(". ")[0].split(": ")[0].rstrip("."),
        description=textwrap.fill(description, 100),
        epilog="examples:\n" + textwrap.indent(textwrap.dedent(examples), "  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(verb_class=verb)
    add_flags(parser, verb)


def add_flags(
    parser: argparse.ArgumentParser,
    options: type,
    prefix: str = "",
    changed: Mapping[str, Any] = _NO_FLAGS,
) -> None:
    """Add the flags of a dataclass; `changed` is what a `part` says of them."""
    hints: dict[str, Any] = get_type_hints(options)
    groups: dict[str, Any] = {}
    for each in fields(options):
        dest, hint = prefix + each.name, hints[each.name]
        if "part" in each.metadata:
            add_flags(parser, hint, f"{dest}.", each.metadata["part"])
            continue
        own = changed.get(each.name, each)
        about: dict[str, Any] = {"name": "", "group": ("", False), "more": {}, **each.metadata}
        about |= {"flag": own} if isinstance(own, str) else own.metadata
        if not about.get("flag"):
            continue
        settings = _settings(hint, each.default if isinstance(own, str) else own.default, about)
        group, required = about["group"]
        if group and group not in groups:
            groups[group] = parser.add_mutually_exclusive_group(required=required)
        to: Any = groups[group] if group else parser
        if about["more"].get("positional"):
            to.add_argument(dest, **settings)
        else:
            if "type" in settings:  # argparse would name the value after `dest`
                settings.setdefault("metavar", each.name.upper())
            name = (about["name"] or each.name).replace("_", "-")
            to.add_argument(f"--{name}", dest=dest, **settings)


def made(options: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Make a dataclass of the values that its flags were given."""
    hints, found = get_type_hints(options), {}
    for each in fields(options):
        if "part" in each.metadata:
            found[each.name] = made(hints[each.name], values, f"{prefix}{each.name}.")
        elif prefix + each.name in values:
            found[each.name] = values[prefix + each.name]
    return options(**found)


def as_path(text: str) -> Path:
    """Make a path of an argument; the shell does not expand the ~ in --out=~/H."""
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path on any system")
    return Path(os.path.expanduser(text))


def _settings(hint: Any, default: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """How `add_argument` reads a field."""
    more = {name: value for name, value in about["more"].items() if name != "positional"}
    optional = NoneType in get_args(hint)
    kind = get_args(hint)[0] if optional else hint
    many = get_origin(kind) is tuple and "type" not in more
    if default is MISSING:
        default = False if kind is bool else () if many else None
        if default is None and not optional and "positional" not in about["more"]:
            more["required"] = True
    if kind is bool:
        more["action"] = argparse.BooleanOptionalAction if optional else "store_true"
    elif get_origin(kind) is Literal:
        more["choices"] = get_args(kind)
    elif "type" not in more:
        one = get_args(kind)[0] if many else kind
        more["type"] = as_path if one is Path else one
    return {"help": about["flag"], "default": default} | ({"nargs": "+"} if many else {}) | more
