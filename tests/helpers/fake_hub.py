"""A hub on this machine: enough of its protocol to load a model by name, and to fail to.

    python tests/helpers/fake_hub.py FOLDER CACHE

serves FOLDER as `org/good`, tries one name after the other with `load_model`, or for its tokenizer
alone as the command line does, and prints what came of each as JSON. It runs in its own process
because the hub's client reads its settings on import.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40
REFUSALS = {  # a hub answers 401 for what does not exist as well: it does not say which
    "gated": (401, "GatedRepo"),
    "missing": (401, "RepoNotFound"),
    "denied": (403, "Other"),
    "portal": (200, "Other"),  # a login page in between
}
OWN: dict[str, dict[str, Any]] = {  # what models with a word in their name say in these files
    "modelopt": {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
    "unknown": {"config.json": {"quantization_config": {"quant_method": "new"}}},
    "tuned": {"adapter_config.json": {"peft_type": "LORA"}},
}


class Hub(BaseHTTPRequestHandler):
    """Answers for one model; any name with a word of REFUSALS in it is refused in that way."""

    folder: Path
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        path = self.path.split("?")[0]
        type(self).asked.append(f"{self.command} {path}")
        for word, (status, code) in REFUSALS.items():
            if word in path:
                return self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": word})
        if "/revision/" in path and COMMIT not in path and not path.endswith("/main"):
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if "/resolve/" in path:
            return self._file(path.split("/resolve/")[1].split("/", 1))
        names = [{"rfilename": entry.name} for entry in self.folder.iterdir()]
        body: Any = {"id": "org/good", "sha": COMMIT, "siblings": names}
        if "/tree/" in path:
            body = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0"}
                for f in self.folder.iterdir()
            ]
        return self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    do_GET = do_HEAD

    def _file(self, parts: list[str]) -> None:
        revision, name = parts
        if revision not in ("main", COMMIT):
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        file = self.folder / name
        own = next((files for word, files in OWN.items() if word in self.path), {}).get(name)
        if own is None and not file.exists():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = file.read_bytes() if file.exists() else b"{}"
        data = data if own is None else json.dumps(json.loads(data) | own).encode()
        tag = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        return self._answer(200, data, tag)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(folder: Path) -> Iterator[ThreadingHTTPServer]:
    """A running hub that holds `folder` as org/good."""
    Hub.folder, Hub.asked = folder, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def attempt(name: str, **options: Any) -> dict[str, Any]:
    """What `load_model` makes of a name, and which weights it asked the hub for."""
    import cocurve_lab as cl

    Hub.asked.clear()
    try:
        outcome = type(cl.load_model(name, device="cpu", **options)[0]).__name__
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    weights = [line for line in Hub.asked if line.startswith("GET") and "safetensors" in line]
    return {"outcome": outcome, "weights": len(weights)}


def attempt_tokenizer(name: str) -> str:
    """What the command line makes of the name of a tokenizer."""
    from cocurve_lab.cli.common import read_tokenizer

    try:
        return type(read_tokenizer(name)).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def full_disk(temp_file: Any) -> None:
    temp_file.write(b"x" * 1000)
    temp_file.flush()
    raise OSError(28, "No space left on device")


def main(folder: Path, cache: Path) -> None:
    # whoever runs the tests may be offline, behind a proxy, or keep a cache elsewhere
    theirs = ("HF_", "HUGGING", "TRANSFORMERS_", "XDG_CACHE")
    for name in list(os.environ):
        if name.startswith(theirs) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "5"}
    with serving(folder) as server:
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        from huggingface_hub import file_download

        found = {
            "gated": attempt("org/gated"),
            "missing": attempt("org/missing"),
            "denied": attempt("org/denied"),
            "portal": attempt("org/portal"),
            "misspelt": attempt("org/go od!"),
            "revision": attempt("org/good", revision="nowhere"),
        }
        get = file_download.http_get

        def run_out(url: str, temp_file: Any, **options: Any) -> None:
            full_disk(temp_file) if "safetensors" in url else get(url, temp_file, **options)

        file_download.http_get = run_out  # type: ignore[assignment]
        found["full"] = attempt("org/good")
        found["full elsewhere"] = attempt("org/good", cache_dir=str(cache / "elsewhere"))
        found["left"] = sorted(p.name for p in cache.rglob("*") if p.is_file())  # type: ignore[assignment]
        file_download.http_get = get
        found["good"] = attempt("org/good")
        found |= {name: attempt(f"org/{name}") for name in OWN}
        names = ("org/gated", "org/missing", "org/go od!", "./good", "org/good")
        found["tokenizers"] = {name: attempt_tokenizer(name) for name in names}
    time.sleep = lambda _: None  # the client asks five times, with pauses, for every file
    found["offline"] = attempt("org/other")
    found["tokenizers"]["org/other"] = attempt_tokenizer("org/other")
    found["cached"] = attempt("org/good")  # what is here needs no hub
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
