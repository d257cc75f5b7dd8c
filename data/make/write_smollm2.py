"""Let SmolLM2-135M write calibration text, which is kept in data/smollm2/texts/chat.jsonl.

    make smollm2
    python -m data.make.write_smollm2        # three minutes on two cores

24 answers of at most 255 tokens to "Write a short text about ...", asked through the chat template
and sampled at temperature 0.7, as JSON lines with the field "text". Texts sampled from the start of
a document were tried, too: at 0.7 a quarter of them was code, at 1 much was odd words.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import encode_prompt
from cocurve_lab.extensions.pretrained.kept import kept_folder
from cocurve_lab.extensions.pretrained.smollm2 import NAME

TOKENS, TEMPERATURE, SEED = 255, 0.7, 0
TOPICS = """
the history of bread; how bridges are built; the life of bees; a walk in a city; the water cycle;
learning to play the piano; the invention of the telephone; keeping a garden in winter; the moon;
a small museum; how money is made; the rules of chess; trains; the sea; choosing a bicycle; sleep;
the work of a nurse; a storm; the printing press; cooking soup; why leaves turn red; maps; dogs;
a letter to a friend
"""


def written(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[str]:
    """What the model writes after each prompt, sampled; prompts of one length make a batch."""
    found: dict[int, str] = {}
    for length in sorted(set(map(len, prompts))):
        places = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[n] for n in places])
        torch.manual_seed(SEED + length)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            pad_token_id=tokenizer.eos_token_id,
        )
        texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        found |= dict(zip(places, texts, strict=True))
    return [found[n] for n in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=kept_folder() / "texts" / "chat.jsonl")
    out = parser.parse_args().out
    model, tokenizer = cl.load_model(NAME)
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(";")]
    prompts = [encode_prompt(model, tokenizer, f"Write a short text about {x}.") for x in topics]
    texts = written(model, tokenizer, prompts)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts if text.strip()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} texts in {out}")


if __name__ == "__main__":
    main()
