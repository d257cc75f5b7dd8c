"""Where a thing comes from: one record, and one decision whether two things belong together.

Two things belong together if their weights, as stored, are the same. A record may have the fields
of `RECORD`:

    name        of the model, for messages
    checkpoint  SHA-256 of all weights: "exact" of their numbers, whatever dtype holds them, one of
                the numbers rounded to each narrow dtype, and "loaded" as they were in memory
    dtype       in which the model ran
    tokenizer, text, H, plan    their fingerprints
    told        what a reader must know of it

In memory a record may also have `ALLOWED`: the "exact" marks of other checkpoints that the thing
may be used on, as `allow_other_weights` (models/identity.py) said. No file has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import MismatchError
from .schema import TEXT, Field, dict_of, is_text, nullable, optional

Record = Mapping[str, Any]
EXACT, LOADED, NARROW = "exact", "loaded", ("bfloat16", "float16")
ALLOWED = "allowed"
_TEXTS = ("name", "dtype", "tokenizer", "text", "H", "plan", "told")
_CHECKPOINT = nullable(Field("texts by dtype", dict_of(is_text)))
RECORD = optional({**dict.fromkeys(_TEXTS, nullable(TEXT)), "checkpoint": _CHECKPOINT})


class Verdict(NamedTuple):
    """Whether two things belong together: "same", "dtype" (another), "unknown" or "other"."""

    kind: str
    note: str = ""  # what a reader must be told


def record_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record in a provenance; the H that ships has the mark of the loaded bits alone."""
    names = {"name": "model_name", "dtype": "model_dtype", "text": "calibration_fingerprint"}
    found = {name: facts.get(key) for name, key in names.items()}
    mark = facts.get("model_fingerprint")
    found["checkpoint"] = facts.get("checkpoint") or (mark and {LOADED: mark})
    return {name: value for name, value in found.items() if value}


def require_same_source(mine: Record, *theirs: Record | None, between: tuple[str, str]) -> Verdict:
    """Decide whether two things are of the same stored weights; nothing else decides it.

    Of several records of the other thing, one must fit. `between` names the two in messages.
    Raises MismatchError if the weights are others, unless they are `ALLOWED`.
    """
    one, other = between
    found = {_kind(mine, record or {}): record or {} for record in (theirs or (None,))}
    kind = next(kind for kind in ("same", "dtype", "unknown", "other") if kind in found)
    if kind == "same":
        return Verdict(kind)
    if kind == "dtype":
        dtypes = f"{one} in {mine.get('dtype')}, {other} in {found[kind].get('dtype')}"
        return Verdict(kind, f"The same weights are used in two dtypes: {dtypes}.")
    if kind == "unknown":
        fact = f"Of which weights {other} is cannot be told"
        return Verdict(kind, f"{fact}, so it was not compared with {one}.")
    named = f"{other} is of {_named(found[kind])}, and {one} is {_named(mine)}"
    if mine["checkpoint"].get(EXACT) in found[kind].get(ALLOWED, ()):
        return Verdict(kind, f"Other weights were allowed: {named}.")
    raise MismatchError(
        f"{named}: these are other weights. Use things of one model; or, as for the plan of a base "
        "model on its fine-tuned copy, pass allow_other_weights(plan, model)."
    )


def _kind(mine: Record, theirs: Record) -> str:
    a, b = (record.get("checkpoint") or {} for record in (mine, theirs))
    equal = {form for form in a.keys() & b.keys() if a[form] == b[form]}
    if equal & {EXACT, LOADED}:
        return "same"
    if equal:
        return "dtype"
    # two copies, rounded to bfloat16 and float16, have no numbers in common
    halves = {mine.get("dtype"), theirs.get("dtype")} == set(NARROW)
    return "unknown" if halves or EXACT not in a or EXACT not in b else "other"


def _named(record: Record) -> str:
    return f"{record.get('name') or 'a model'} ({record['checkpoint'][EXACT][:10]})"
