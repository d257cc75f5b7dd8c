"""Put the demo model into its page: it then reads any sentence and measures any plan, offline.

python -m cocurve_widgets.make_page     # `make page`: build/explore_demo.html, 12 MB, for a release

The page holds the weights in float16, as they are stored, unit by unit, the tokenizer, and eight
rows of held-out text. widgets/cocurve_widgets/front/inference.js runs it.
"""

from __future__ import annotations

import base64
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

import cocurve_lab as cl
from cocurve_lab.models.architectures import UNIT_KINDS, describe

from .export import ALONE

ROOT = Path(__file__).resolve().parents[2]
PAGE, OUT = ROOT / "notebooks" / "explore_demo.html", ROOT / "build" / "explore_demo.html"
# The rows of the page's held-out text that it measures on, and how much of each. At 10 to 40 %
# plans cost 0.79 to 1.03 of what they cost on all 64 whole rows; other eight were further off.
ROWS, LENGTH = slice(8, 16), 64
# what the page says with the model inside, in place of ALONE
INSIDE = (
    "The model is in this page: it reads your sentence, and measures plans that you make by clicks "
    f"on {ROWS.stop - ROWS.start} rows of {LENGTH} tokens. Only the notebooks measure other pairs."
)
# where the tokenizer cuts a text: at its end token, digits, capitals before capitals, then as GPT-2
SPLITS = (
    r"(<eos>)",
    r"(\p{N})",
    r"([A-Z](?=[A-Z']))",
    r"('(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+)",
)


def half(weight: Tensor) -> dict[str, str]:
    """A weight as float16 bytes, in the order of its present shape."""
    data = weight.detach().half().contiguous().numpy().tobytes()
    return {"$half": base64.b64encode(data).decode()}


def packed_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A Llama with tied embeddings and byte-level BPE, for `serve` of front/inference.js."""
    architecture, config = describe(model), model.config
    decoder: Any = architecture.decoder
    width, size = config.hidden_size, config.head_dim

    def unit_of(u: int, unit: cl.Unit) -> dict[str, Any]:
        def weight(name: str) -> Tensor:
            return architecture.projection(unit.layer, unit.kind, name).weight

        parts = []
        kind = UNIT_KINDS[unit.kind]
        for rows in kind.rows(architecture, unit.layer, unit.start, unit.stop):
            part = weight(rows.projection)[rows.start : rows.stop]
            if rows.projection in ("q_proj", "k_proj"):  # the two that turn together side by side
                part = part.view(-1, 2, size // 2, width).transpose(1, 2).reshape(-1, width)
            parts.append(part)
        out = weight(architecture.output_name(unit.kind))[:, unit.start : unit.stop]
        columns = unit.stop - unit.start
        return {"u": u, "columns": columns, "into": half(torch.cat(parts).T), "out": half(out.T)}

    blocks = []
    units = list(enumerate(cl.enumerate_units(model)))
    for (layer, kind), found in groupby(units, lambda pair: (pair[1].layer, pair[1].kind)):
        module = decoder.layers[layer]
        ffn = kind == "ffn"
        norm = module.post_attention_layernorm if ffn else module.input_layernorm
        own = [unit_of(u, unit) for u, unit in found]
        blocks.append({"ffn": ffn, "gain": half(norm.weight), "units": own})
    spec = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].get)
    byte_of = {letter: chr(byte) for byte, letter in bytes_to_unicode().items()}
    return {
        "width": width,
        "head": size,
        "theta": config.rope_parameters["rope_theta"],
        "epsilon": config.rms_norm_eps,
        "context": config.max_position_embeddings,
        "tokens": ["".join(byte_of[letter] for letter in token) for token in tokens],
        "merges": [[spec["vocab"][part] for part in pair] for pair in spec["merges"]],
        "splits": SPLITS,
        "embedding": half(decoder.embed_tokens.weight.T),
        "blocks": blocks,
        "ending": half(decoder.norm.weight),
    }


def demo_model() -> str:
    """The demo model, and how some rows of its page's held-out text begin."""
    model, tokenizer = cl.load_model("demo")
    _, held_out = cl.default_calibration("demo", tokenizer, 320, ROWS.stop)  # as the page's
    rows = held_out.input_ids[ROWS, :LENGTH].tolist()
    return json.dumps(packed_model(model, tokenizer) | {"rows": rows}, separators=(",", ":"))


def with_model(page: str, packed: str) -> str:
    """The text of a page with a packed model inside."""
    place = '<script type="application/json" id="cocurve-model">'
    page = page.replace(ALONE, INSIDE)
    return page.replace(place, place + packed.replace("<", "\\u003c"))


def main() -> None:
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(with_model(PAGE.read_text(encoding="utf-8"), demo_model()), encoding="utf-8")
    print(f"{OUT}: {OUT.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
