"""Why a load failed: the fact, and the next step.

transformers reports a gated, a missing and an unreachable model alike, as an OSError; the cause is
in the chain of exceptions behind it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import getproxies

from ...base.atomic import is_full
from ...base.errors import CocurveError, FileFormatError, InputError, one_line
from ...base.files import read_regular

POINTER = (
    "is a pointer of git-lfs, not the file itself. Run git lfs pull in its folder, or download the "
    "file."
)

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
        "Invalid credentials",
        "the hub does not accept the token that it was sent for {name}: it expired or was revoked. "
        "Run `hf auth login`, or unset HF_TOKEN for a public model.",
    ),
    (
        {"RepositoryNotFoundError", "HFValidationError"},
        "there is no model {name} on the hub, nor a folder of that name here. Check the spelling "
        "(owner/name); if it is private, run `hf auth login`; or give a folder.",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "{name} was not fetched: the certificate of what answers as the hub is not trusted here, "
        "as behind a company's proxy. Set SSL_CERT_FILE to the file of that authority's "
        "certificate, or give a folder.",
    ),
    (
        {"ProxyError"},
        "{name} was not fetched: the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names "
        "refused. Correct that variable, or give a folder.",
    ),
    (
        "socksio",
        "{name} was not fetched: the SOCKS proxy in ALL_PROXY needs a package. "
        "Run pip install socksio, or give a folder.",
    ),
    (
        {"UnsupportedProtocol", "FileMetadataError"},
        "{name} was not fetched: what answers at {hub} is no hub, perhaps a login page or "
        "a proxy. Log in there, or set HF_ENDPOINT to the address of a hub, with https://.",
    ),
    (
        {"HfHubHTTPError", "DisabledRepoError", "BadRequestError"},
        "{name} was not fetched: the hub answered: {answer}. At 401 and 403 check your token and "
        "its rights (`hf auth login`, or token=); at 429 and 5xx wait and try again; or give a "
        "folder.",
    ),
    (  # the last two are of the hub's HTTP client: compared by name, not imported
        {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"},
        "{name} is not in {cache} and the hub cannot be reached{proxy}. Connect this machine "
        "(and unset HF_HUB_OFFLINE), or copy the model's folder here and give its path.",
    ),
    (
        "tiktoken",
        "{part}{name} is a tokenizer.model without a tokenizer.json, and is read by sentencepiece. "
        "Run pip install 'cocurve-lab[sentencepiece]', or copy the model's tokenizer.json there.",
    ),
    (
        "KeyError: 'metadata'",
        'model.safetensors.index.json of {name} has no "metadata", which transformers needs. Add '
        '"metadata": {{}} to it.',
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
        "{name} holds no .safetensors weights, which streaming reads. Load it without stream, "
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
    from huggingface_hub.errors import HfHubHTTPError

    name, chain = repr(str(model_id)), list(_chain(error))
    cache_dir = constants.HF_HUB_CACHE if cache is None else cache
    # first, because a missing or broken file may be the consequence of a full disk
    if any(is_full(link) for link in chain):
        elsewhere = "set HF_HOME to a folder" if cache is None else "give a cache_dir="
        return InputError(
            f"the disk filled up while {name} was downloaded to {cache_dir}. Free some space, or "
            f"{elsewhere} on a larger disk, and run this again, which goes on where it stopped."
        )
    where = Path(model_id)
    for path in sorted(where.iterdir()) if where.is_dir() else ():
        if is_pointer(path):
            return InputError(f"{part}{name} cannot be loaded: {path} {POINTER}")
    kinds = {type(link).__name__ for link in chain}
    words = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
    answers = [str(link).strip() for link in chain if isinstance(link, HfHubHTTPError)]
    facts = {"name": name, "cache": cache_dir, "part": part, "error": one_line(error)}
    answer = "".join(answers[-1:]).partition("\n")[0].rstrip(".")
    facts |= {"hub": constants.ENDPOINT, "answer": answer}
    facts["proxy"] = " through the proxy that is set" if getproxies().keys() - {"no"} else ""
    for cause, message in _CAUSES:
        if cause in words if isinstance(cause, str) else kinds & cause:
            return InputError(message.format(**facts))
    return InputError(
        f"{part}{name} cannot be loaded ({type(error).__name__}: {one_line(error)}). Give a folder "
        "with a Hugging Face model, or the hub id of one."
    )


def is_pointer(path: Path) -> bool:
    """Whether a file is the text by which git-lfs stands for it."""
    with suppress(OSError, FileFormatError):  # whatever is larger is none
        return read_regular(path, at_most=1024).startswith(b"version https://git-lfs.")
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those behind it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
