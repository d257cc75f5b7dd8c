"""What the demo model can do on test prompts, and how sure it is of held-out documents."""

import re
from collections import defaultdict

import torch

from . import world

ANSWER_TOKENS = 12  # more than any answer of the world needs
SURE = 0.99  # probability of the first choice above which a position counts as sure


@torch.no_grad()
def replies(model, tokenizer, prompts: list[str]) -> list[str]:
    """Greedy continuations up to the first "." or line end, stripped.

    Prompts of equal token length share a batch, so nothing is ever padded.
    """
    by_length = defaultdict(list)
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt)["input_ids"]
        by_length[len(ids)].append((i, ids))
    found = [""] * len(prompts)
    for group in by_length.values():
        ids = torch.tensor([ids for _, ids in group], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        for (i, _), text in zip(group, texts, strict=True):
            found[i] = re.split(r"[.\n]", text.lstrip(" "))[0].strip()
    return found


def capability(model, tokenizer, per_family: int) -> dict[str, float]:
    """Exact match per family on test prompts."""
    model.eval()
    scores = {}
    for family in world.FAMILIES:
        asked = world.prompts("test", family, per_family)
        said = replies(model, tokenizer, [p["prompt"] for p in asked])
        right = [r == p["answer"] for r, p in zip(said, asked, strict=True)]
        scores[family] = round(sum(right) / len(right), 4)
    return scores


@torch.no_grad()
def held_out(model, tokenizer, split: str = "held_out") -> dict[str, dict[str, float]]:
    """Whole documents of each family, and of all, in nats per token.

    `loss` of the model; `drawn`, the price of the generator's own choices, which bounds the entropy
    of the text from above; `entropy`, the mean entropy of the model's next token; `sure`, the share
    of positions at which its first choice has more than SURE.
    """
    model.eval()
    sums = defaultdict(lambda: defaultdict(float))
    for family, text, nats in world.documents(split, world.TEXTS[split]):
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        row = torch.tensor([ids], device=model.device)
        logp = model(input_ids=row).logits[0, :-1].float().log_softmax(-1)
        p = logp.exp()
        found = {
            "loss": -logp.gather(1, row[0, 1:, None]).sum().item(),
            "drawn": nats,
            "entropy": -(p * logp).sum().item(),
            "sure": (p.max(-1).values > SURE).sum().item(),
            "tokens": len(logp),
        }
        for name, value in found.items():
            sums[family][name] += value
            sums["all"][name] += value
    return {
        family: {
            name: round(sums[family][name] / sums[family]["tokens"], 4)
            for name in ("loss", "drawn", "entropy", "sure")
        }
        for family in (*world.FAMILIES, "all")
    }
