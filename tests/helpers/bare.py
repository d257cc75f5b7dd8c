"""Reads saved folders where cocurve_lab cannot be imported, and prints what it saw as JSON.

`python -I tests/helpers/bare.py load FOLDER...`; for `load` also `read_it`, `harness`, `adapter`,
`text`, `answer`.
Beside each folder lies FOLDER.expected.safetensors: input ids, attention mask, and what the masked
model makes of them; for `answer`, input ids and how many more to write.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

sys.modules["cocurve_lab"] = None  # type: ignore[assignment]  # any import of it now fails

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

torch.set_num_threads(1)
logging.disable(logging.WARNING)


def read(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@torch.no_grad()
def load(folder: str) -> dict[str, Any]:
    expected = load_file(f"{folder}.expected.safetensors")
    inputs = {name: expected[name] for name in ("input_ids", "attention_mask")}
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )

    def off(logits: torch.Tensor) -> float:  # nothing is defined at padding
        return float((logits - expected["logits"])[inputs["attention_mask"] > 0].abs().max())

    def difference(model: Any) -> float:
        return off(model(**inputs).logits)

    def generated(**options: Any) -> bool:
        options |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        return torch.equal(model.generate(**inputs, **options), expected["generated"])

    saw: dict[str, Any] = {
        "info": {name: sorted(map(str, keys)) for name, keys in info.items()},
        "class": type(model).__name__,
        "config": type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__,
        "parameters": model.num_parameters(),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "difference": difference(model),
        "generated": {flag: generated(use_cache=flag == "cache") for flag in ("cache", "none")},
    }
    model.set_attn_implementation("eager")
    saw["switched to eager"] = difference(model)
    eager = read(folder, attn_implementation="eager")
    saw["eager"] = difference(eager)
    if eager._supports_sdpa:  # Gemma 2 caps attention, which only eager does
        eager.set_attn_implementation("sdpa")  # whose masks are of another form
    saw["switched to sdpa"] = difference(eager)
    half = read(folder, dtype=torch.bfloat16)
    saw["half"] = sorted({str(p.dtype) for p in half.parameters()})
    saw["half finite"] = bool(half(**inputs).logits.isfinite().all())
    base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    hidden = model.lm_head(base(**inputs).last_hidden_state)
    cap = getattr(model.config, "final_logit_softcapping", None)
    saw["base"] = off(hidden if cap is None else (hidden / cap).tanh() * cap)
    again = f"{folder}.again"
    read(folder).save_pretrained(again)
    saw["again files"] = sorted(path.name for path in Path(again).iterdir())
    saw["again"] = difference(read(again))
    saw["card"] = difference(by_the_card(folder))
    return saw


@torch.no_grad()
def read_it(folder: str) -> dict[str, Any]:
    """The least of `load`."""
    expected = load_file(f"{folder}.expected.safetensors")
    inputs = {k: v for k, v in expected.items() if k not in ("logits", "generated")}
    tower = "text_config" in json.loads(Path(folder, "config.json").read_text())
    auto = AutoModelForImageTextToText if tower else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    saw: dict[str, Any] = {"info": {name: sorted(map(str, keys)) for name, keys in info.items()}}
    saw["difference"] = float((model(**inputs).logits - expected["logits"]).abs().max())
    made = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    saw["generated"] = torch.equal(made, expected["generated"])
    model.set_attn_implementation("eager")
    saw["eager"] = float((model(**inputs).logits - expected["logits"]).abs().max())
    return saw


def by_the_card(folder: str) -> Any:
    """What the first Python block of the card loads."""
    card = Path(folder, "README.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"folder": folder}
    exec(block.group(1), names)
    return names["model"].eval()


def harness(folder: str) -> dict[str, Any]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", dtype="float32")
    request = Instance("loglikelihood", {}, ("w1 w2 w3", " w4 w5"), 0)
    score, _ = model.loglikelihood([request], disable_tqdm=True)[0]
    ids = AutoTokenizer.from_pretrained(folder)("w1 w2 w3 w4 w5", return_tensors="pt").input_ids
    logp = model.model(ids).logits.log_softmax(-1)[0, 2:4]
    return {"score": score, "by hand": float(logp.gather(-1, ids[0, 3:, None]).sum())}


def adapter(folder: str) -> dict[str, Any]:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    names = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model = get_peft_model(read(folder), LoraConfig(r=2, target_modules=names, lora_dropout=0.0))
    ids = load_file(f"{folder}.expected.safetensors")["input_ids"]
    steps = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    before = model(input_ids=ids, labels=ids).loss
    before.backward()
    steps.step()
    after = model(input_ids=ids, labels=ids).loss
    model.save_pretrained(f"{folder}.adapter")
    read_back = PeftModel.from_pretrained(read(folder), f"{folder}.adapter")
    return {
        "before": float(before),
        "after": float(after),
        "read back": float(read_back(input_ids=ids, labels=ids).loss),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


@torch.no_grad()
def text(folder: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = load_file(f"{folder}.expected.safetensors")["input_ids"][:1, :8]
    mask = torch.ones_like(ids)
    made = read(folder).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    written: str = tokenizer.decode(made[0])
    return written


@torch.no_grad()
def answer(folder: str) -> dict[str, Any]:
    """Into FOLDER.answer.safetensors: logits [N, T, V] and further greedy ids, without a cache."""
    asked = load_file(f"{folder}.expected.safetensors")
    model, ids = read(folder, dtype=torch.float32), asked["input_ids"]
    logits = model(ids, use_cache=False).logits
    for _ in range(int(asked["greedy"])):
        best = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], dim=1)
    greedy = ids[:, asked["input_ids"].shape[1] :].contiguous()
    save_file({"logits": logits, "greedy": greedy}, f"{folder}.answer.safetensors")
    return {"class": type(model).__name__, "parameters": model.num_parameters()}


if __name__ == "__main__":
    try:
        import cocurve_lab  # noqa: F401
    except ImportError:
        action, *folders = sys.argv[1:]
        if action in ("load", "read_it"):
            warnings.simplefilter("error")
        print(json.dumps({Path(f).name: globals()[action](f) for f in folders}))
    else:
        sys.exit("cocurve_lab can be imported here")
