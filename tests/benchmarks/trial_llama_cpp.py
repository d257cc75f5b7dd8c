"""From a model to stock llama.cpp: H, a plan, a smaller model, a bare reload, a GGUF file, text.

`python tests/benchmarks/trial_llama_cpp.py [MODEL] [--text-file FILE]`; without MODEL the demo.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.gguf.gguf import export_gguf
from helpers.bare_process import run_bare
from helpers.benchmarks import arguments, flag
from helpers.llama_cpp import Answer, Job, largest_difference, log_softmax, mean_kl, run_llama_cpp

GREEDY, CONTEXT = 40, 256


def main() -> None:
    options = arguments(
        __doc__,
        model=flag("demo", nargs="?", positional=True),
        text_file=flag(help="calibration text; the demo has its own"),
        rows=24,
        ratio=0.25,
    )
    disable_progress_bar()
    model, tokenizer = cl.load_model(options.model, device="cpu")
    calibration, held_out = cl.default_calibration(
        options.model,
        tokenizer,
        num_sequences=options.rows,
        held_out=8,
        text_file=options.text_file,
        seq_len=128,
    )
    curvature = cl.estimate_curvature(model, cl.enumerate_units(model), calibration, progress=False)
    plan = cl.solve_greedy(curvature, ratio=options.ratio)
    pruned = cl.prune(model, plan)
    before, after = model.num_parameters(), pruned.num_parameters()
    print(f"pruned: {plan.realized_ratio:.1%} of what can go, {before:,} to {after:,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        saved = cl.save_pruned(pruned, Path(folder) / "saved", tokenizer=tokenizer)
        prompts = [row.tolist()[:64] for row in held_out.input_ids[:6]]
        with cl.ablate(model, plan):
            masked = model(torch.tensor(prompts)).logits.detach()
        reference, texts = bare_reload(saved, prompts, masked.numpy())
        for dtype, cache in (("f32", "f32"), ("f32", "f16"), ("f16", "f16"), ("q8_0", "f16")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # printed with the result
                path = Path(folder) / f"{dtype}.gguf"
                file = export_gguf(pruned, tokenizer, path, dtype=dtype, overwrite=True)
            answer = run_llama_cpp(path, Job(prompts, greedy=GREEDY, context=CONTEXT, cache=cache))
            print(f"\n{file}\n{cache} cache: {agreement(answer, reference, texts)}")
        starts = [tokenizer.decode(ids[:12], skip_special_tokens=True) for ids in prompts[:3]]
        written = run_llama_cpp(
            Path(folder) / "q8_0.gguf", Job(continued=starts, greedy=GREEDY, context=CONTEXT)
        )
    for start, text in zip(starts, written.texts, strict=True):
        print(f"\nllama.cpp, q8_0: {start!r}\n   {text!r}")


def bare_reload(
    folder: Path, prompts: list[list[int]], masked: np.ndarray
) -> tuple[list[np.ndarray], list[list[int]]]:
    """Log-probabilities and greedy ids of the saved folder, read without cocurve_lab.

    Prints the largest difference from the logits of the masked model.
    """
    asked = {"input_ids": np.array(prompts), "greedy": np.array(GREEDY)}
    save_file(asked, f"{folder}.expected.safetensors")
    saw = run_bare("answer", [folder], folder.parent / "home", timeout=None)[folder.name]
    print(f"read without cocurve_lab: {saw['class']} {saw['parameters']} parameters")
    found = load_file(f"{folder}.answer.safetensors")
    difference = np.abs(found["logits"] - masked).max()
    print(f"largest difference of a logit from the masked model's: {difference:.1e}")
    logits = [log_softmax(z.astype(np.float64)) for z in found["logits"]]
    return logits, found["greedy"].tolist()


def agreement(answer: Answer, reference: list[np.ndarray], texts: list[list[int]]) -> str:
    found, wanted = np.concatenate(answer.log_probabilities), np.concatenate(reference)
    top = float((found.argmax(-1) == wanted.argmax(-1)).mean())
    same = sum(a == b for a, b in zip(answer.greedy, texts, strict=True))
    return (
        f"largest difference of a log-probability {largest_difference(answer, reference):.1e}, "
        f"mean KL {mean_kl(answer, reference):.1e} nats, same best token at {top:.1%} of "
        f"{len(found)} positions, same greedy text of {GREEDY} tokens for {same} of {len(texts)} "
        "prompts"
    )


if __name__ == "__main__":
    main()
