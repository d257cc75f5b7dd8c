"""Train the embedded demo model on the closed world of world.py, from nothing to a model folder.

    python -m data.make.train_demo --out data/demo
    python -m data.make.train_demo --out data/mixture --experts 16 --steps 800 --documents 100000

The second line trains a small mixture of experts instead.
CPU or CUDA is chosen automatically. The schedule counts steps, never seconds, and the rows of a
step depend on the seed and the step alone; so a run that was killed and started again with the
same command goes on from its last checkpoint and sees what it would have seen. The folder is
rewritten at every evaluation, and at the end holds an ordinary Hugging Face model in float16, its
tokenizer, and training.json.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

import numpy
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from . import world
from .measure import capability, held_out

END = "<eos>"  # stands between documents; also begin and padding
CONTEXT, BATCH = 256, 32  # tokens per row, rows per step
BALANCE = 0.02  # of the loss that spreads tokens over experts, beside the model's own
SHARDS = 64  # of the training text, each with a seed of its own; drawn by several processes
TOKENIZER_DOCUMENTS = 20_000
FULL_PROMPTS, QUICK_PROMPTS = 200, 50  # per family: at the end, and while training


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that keeps digits, and the letters of 'ABC' in code, as single tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("[A-Z](?=[A-Z'])"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def shard(number: int, documents: int, seed: int) -> list[str]:
    """The documents of one of the SHARDS of the training text."""
    drawn = world.documents("train", documents // SHARDS, seed * SHARDS + number)
    return [made.text for made in drawn]


def encode(texts: list[str], tokenizer) -> numpy.ndarray:
    """The documents in one line of token ids [n] (int32), an end token after each."""
    end, encoded = tokenizer.eos_token_id, tokenizer(texts)["input_ids"]
    return numpy.fromiter(chain.from_iterable([*ids, end] for ids in encoded), numpy.int32)


def training_text(options: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, torch.Tensor]:
    """The tokenizer, and the stream of token ids; the same for any number of processes."""
    with ProcessPoolExecutor(options.threads) as pool:
        each = [options.documents] * SHARDS, [options.seed] * SHARDS
        shards = list(pool.map(shard, range(SHARDS), *each))
        sample = list(chain.from_iterable(shards))[:TOKENIZER_DOCUMENTS]
        tokenizer = train_tokenizer(sample, options.vocabulary)
        lines = list(pool.map(encode, shards, [tokenizer] * SHARDS))
    return tokenizer, torch.from_numpy(numpy.concatenate(lines))


def rows_of_step(stream: torch.Tensor, starts: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """The [BATCH, CONTEXT] rows of one step: half begin anywhere, half at the start of a document.

    Calibration rows begin anywhere, prompts begin a document: the model must be used to both.
    """
    rng = numpy.random.default_rng((seed, step))
    last = len(stream) - CONTEXT
    anywhere = rng.integers(0, last, BATCH // 2)
    at_start = starts[rng.integers(0, int((starts < last).sum()), BATCH - BATCH // 2)]
    return torch.stack([stream[i : i + CONTEXT] for i in [*anywhere, *at_start.tolist()]]).long()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 200 steps, constant, and over the last 40 % linearly down to 2 % of the peak.

    Before the last 40 % the number of steps has no influence, so a run can still be lengthened.
    """
    return peak * min(1.0, (step + 1) / 200, max(0.02, (steps - step) / (0.4 * steps)))


def export(model, tokenizer, out: Path) -> None:
    """Write model (float16) and tokenizer; each file replaces the old one only when complete."""
    staging = out.with_name(out.name + "-staging")
    half = type(model)(model.config).half()
    half.load_state_dict(model.state_dict())
    half.generation_config.update(do_sample=False, max_new_tokens=64)
    half.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    out.mkdir(parents=True, exist_ok=True)
    for file in staging.iterdir():
        os.replace(file, out / file.name)
    staging.rmdir()


def split_sizes(tokenizer, train_documents: int, train_tokens: int) -> dict[str, dict[str, int]]:
    sizes = {"train": {"documents": train_documents, "tokens": train_tokens}}
    for split, n in world.TEXTS.items():
        texts = [made.text for made in world.documents(split, n)]
        tokens = sum(len(ids) for ids in tokenizer(texts)["input_ids"]) + n
        sizes[split] = {"documents": n, "tokens": tokens}
    return sizes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/demo"))
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--documents", type=int, default=400_000, help="in the training stream")
    parser.add_argument("--peak-learning-rate", type=float, default=3e-3)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads and processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=3000, help="steps between evaluations")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a dense model")
    parser.add_argument("--compile", action="store_true", help="torch.compile (needs a C compiler)")
    return parser.parse_args(arguments)


def build_model(tokenizer, seed: int, experts: int = 0):
    """The untrained model: grouped-query attention, two query heads per key/value head.

    With experts, two of each layer for a token.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if not experts:
        return LlamaForCausalLM(config)
    names = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")
    names += ("bos_token_id", "eos_token_id", "pad_token_id")
    return MixtralForCausalLM(
        MixtralConfig(
            **{name: getattr(config, name) for name in names},
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=experts,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.0,  # `balance` instead
        )
    )


def balance(router_logits: tuple[torch.Tensor, ...], chosen: int) -> torch.Tensor:
    """The loss that spreads tokens over the experts of each layer; 1 if all have equally many.

    The sum over experts of their share of the choices times their mean probability, times their
    number; the mean over layers. transformers adds the choices of all layers up first, so that an
    expert may idle in one of them.

    Args:
        router_logits: [tokens, experts] of each layer.
        chosen: experts of each token.
    """
    losses = []
    for logits in router_logits:
        likely = logits.float().softmax(-1)
        picked = torch.zeros_like(likely).scatter_(1, likely.topk(chosen).indices, 1 / chosen)
        losses.append(likely.shape[1] * (picked.mean(0) * likely.mean(0)).sum())
    return torch.stack(losses).mean()


def build_optimizer(model) -> torch.optim.AdamW:
    """AdamW; the gains of the norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """The whole run; its state lives in <out>-checkpoint until it is done."""
    work = options.out.with_name(options.out.name + "-checkpoint")
    work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    tokenizer, stream = training_text(options)
    starts = torch.nonzero(stream == tokenizer.eos_token_id).flatten() + 1
    model = build_model(tokenizer, options.seed, options.experts).to(device)
    optimizer = build_optimizer(model)
    first, past, curve = 0, 0.0, []
    if (work / "state.pt").exists():
        state = torch.load(work / "state.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, past, curve = state["step"], state["seconds"], state["curve"]
    forward = torch.compile(model) if options.compile else model
    routed = {"output_router_logits": True} if options.experts else {}
    print(f"{model.num_parameters()} parameters, {len(stream)} tokens, step {first}", flush=True)
    running = []
    for step in range(first, options.steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.peak_learning_rate)
        rows = rows_of_step(stream, starts, options.seed, step).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            made = forward(input_ids=rows, labels=rows, **routed)
        loss = made.loss
        if options.experts:
            loss = loss + BALANCE * balance(made.router_logits, model.config.num_experts_per_tok)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running.append(loss.detach())
        done, seconds = step + 1, past + time.monotonic() - begun
        last = done == options.steps
        if done % 100 == 0 or last:
            curve.append([done, round(torch.stack(running).mean().item(), 4)])
            running = []
            print(f"step {done} loss {curve[-1][1]:.4f} {seconds:.0f} s", flush=True)
        if done % options.every == 0 or last:
            print(f"step {done} {capability(model, tokenizer, QUICK_PROMPTS)}", flush=True)
            export(model, tokenizer, options.out)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": done, "curve": curve, "seconds": past + time.monotonic() - begun}
            torch.save(state, work / "state.tmp")
            os.replace(work / "state.tmp", work / "state.pt")
    record = {"seconds": round(past + time.monotonic() - begun), "loss_curve": curve}
    report(options, model, record, len(stream))
    shutil.rmtree(work)


def report(options, model, record: dict, train_tokens: int) -> None:
    """Measure the folder as it will be loaded, and write training.json into it."""
    loaded = AutoTokenizer.from_pretrained(options.out)
    saved = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32).to(model.device)
    half = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float16).to(model.device)
    curve = record["loss_curve"]
    kept = curve[:: max(1, len(curve) // 50)]
    record |= {
        "command": "python -m data.make.train_demo " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "steps": options.steps,
        "tokens_seen": options.steps * BATCH * CONTEXT,
        "parameters": model.num_parameters(),
        "splits": split_sizes(loaded, options.documents, train_tokens),
        "capability": capability(saved, loaded, FULL_PROMPTS),
        "capability_float16_arithmetic": capability(half, loaded, FULL_PROMPTS),
        "prompts": {f: len(world.prompts("test", f, FULL_PROMPTS)) for f in world.FAMILIES},
        "held_out": held_out(saved, loaded),
        "loss_curve": kept if kept[-1] == curve[-1] else [*kept, curve[-1]],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "loss_curve"}, indent=1), flush=True)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    train(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
