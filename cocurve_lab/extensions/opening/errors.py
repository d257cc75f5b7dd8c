"""Why a load failed: the fact, and the next step.

transformers reports a gated, a missing and an unreachable model alike, as an OSError; the cause is
in the chain of exceptions behind it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ...base.atomic import is_full
from ...base.errors import CocurveError, InputError, one_line

# (names of exceptions or a part of the message, the fact and the next step); the first that fits
_CAUSES: tuple[tuple[set[str] | str, str], ...] = (
    (
        {"GatedRepoError"},
        "{name} is gated: its owner asks you to accept terms first. Accept them on the model's "
        "page, run `hf auth login` (or pass token=), and try again; or give a folder that holds "
        "the model.",
    ),
    (
        {"RevisionNotFoundError"},
        "{name} exists, but not in the requested revision. Omit revision=, or name a branch, tag "
        "or commit of that model.",
    ),
    (
        {"RepositoryNotFoundError", "HFValidationError"},
        "there is no model {name} on the hub, nor a folder of that name here. Check the spelling "
        "(owner/name); if it is private, run `hf auth login`; or give a folder.",
    ),
    (  # the last two are of the hub's HTTP client: compared by name, not imported
        {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"},
        "{name} is not in {cache} and the hub cannot be reached. Connect this machine (and unset "
        "HF_HUB_OFFLINE), or copy the model's folder here and give its path.",
    ),
    (
        "trust_remote_code=True",
        "{part}{name} comes with its own code, which is not run. Read that code, then load the "
        "model in Python with trust_remote_code=True; or give a model that needs none.",
    ),
    (
        {"UnpicklingError"},  # not torch's own words, which advise to run the file
        "the weights of {name} are a pickle that holds more than tensors. Loading it could run "
        "code, so nothing of it was run. Give a folder with .safetensors files.",
    ),
    (
        "file named model.safetensors found",  # no other kind was asked for
        "{name} holds no .safetensors weights, which stream=True reads. Load it without stream, "
        "save it with model.save_pretrained(folder), and give that folder.",
    ),
    (
        {"ImportError", "ModuleNotFoundError"},
        "{part}{name} needs a Python package that is missing ({error}). Give a model without such "
        "needs, for example one that is not quantized; or install it.",
    ),
)


@contextmanager
def explaining(
    model_id: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    part: str = "",
) -> Iterator[None]:
    """Turn what transformers raises inside the block into an InputError; as for `explain`."""
    try:
        yield
    except (CocurveError, Warning):  # its message is already an explanation
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise explain(model_id, error, cache=cache, part=part) from error


def explain(
    model_id: str | os.PathLike[str],
    error: BaseException,
    *,
    cache: str | os.PathLike[str] | None = None,
    part: str = "",
) -> InputError:
    """Build the InputError for a failed load: the fact, and the next step.

    `cache` is the cache_dir= of the load (None: the hub's own); `part` is what could not be read,
    such as "the tokenizer of ".
    """
    from huggingface_hub import constants

    name, chain = repr(str(model_id)), list(_chain(error))
    cache_dir = constants.HF_HUB_CACHE if cache is None else cache
    # first, because a missing or broken file may be the consequence of a full disk
    if any(is_full(link) for link in chain):
        elsewhere = "set HF_HOME to a folder" if cache is None else "give a cache_dir="
        return InputError(
            f"the disk filled up while {name} was downloaded to {cache_dir}. Free some space, or "
            f"{elsewhere} on a larger disk, and run this again, which goes on where it stopped."
        )
    kinds = {type(link).__name__ for link in chain}
    for cause, message in _CAUSES:
        if cause in str(error) if isinstance(cause, str) else kinds & cause:
            facts = {"name": name, "cache": cache_dir, "part": part, "error": one_line(error)}
            return InputError(message.format(**facts))
    return InputError(
        f"{part}{name} cannot be loaded ({type(error).__name__}: {one_line(error)}). Give a folder "
        "with a Hugging Face model, or the hub id of one."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those behind it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
