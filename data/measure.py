"""What the demo model can do: exact match on test prompts, and the loss on held-out documents."""

import re
from collections import defaultdict

import torch
import world

ANSWER_TOKENS = 16  # more than any answer of the world needs


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
def validation_loss(model, tokenizer, split: str = "held_out") -> dict[str, float]:
    """Mean cross-entropy in nats per token on whole documents of each family, and over all."""
    model.eval()
    nats, tokens = defaultdict(float), defaultdict(int)
    for family, text in world.documents(split, world.TEXTS[split]):
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        row = torch.tensor([ids], device=model.device)
        nats[family] += model(input_ids=row, labels=row).loss.item() * (row.shape[1] - 1)
        tokens[family] += row.shape[1] - 1
    losses = {family: round(nats[family] / tokens[family], 4) for family in world.FAMILIES}
    return losses | {"all": round(sum(nats.values()) / sum(tokens.values()), 4)}
