"""`cocurve compress`: from a model, a budget and some minutes to the best smaller model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..extensions.choosing.best_plan import best_plan
from ..pruner.folder import CardFacts
from ..pruner.saving import save_pruned
from ..solver.targets import Target, require_ratio
from .common import Model, progress, require_counts, require_new, require_text
from .options import Verb, flag, part


@dataclass(frozen=True, kw_only=True)
class Compress(Verb):
    """Find the best smaller model that some minutes of work buy.

    Build H on as many rows as fit, solve on it, search by measured KL from the
    best plan, refit, and measure on text that no step before has seen. The result is a folder, as
    `cocurve prune` writes it, and a report. Each step is also a verb or a function of
    its own. The model must fit in memory twice; for a larger one run the steps with --stream:
    build, solve, search, and prune with --refit.

    Examples:
      cocurve compress demo --ratio 0.2 --minutes 10 --out smaller
      cocurve compress MODEL --parameters 6B --minutes 120 --text c4.jsonl --out smaller
    """

    model: Model = part()
    ratio: float | None = flag("share of removable parameters to remove", one_of="budget")
    parameters: str | None = flag('most parameters left: "6B", "350M"', one_of="budget")
    minutes: float = flag("time to spend (30)", 30.0)
    out: Path = flag("a new folder", metavar="FOLDER")
    text: Path | None = flag("text for all steps; default: C4 from the hub", metavar="FILE")
    sequences: int = flag("the most rows for H; also those of the refit (128)", 128)
    length: int | None = flag("tokens per row (2048, or the context)")
    no_refit: bool = flag("leave the weights as they are")
    checkpoint: Path | None = flag(
        "keep what is measured here; the same command with more minutes goes on from it",
        metavar="FOLDER",
    )

    def run(self) -> int:
        """Run `cocurve compress`."""
        require_new(self.out)
        require_counts(self, "sequences", "length")
        if self.ratio is not None:
            require_ratio(self.ratio)
        if self.text is not None:
            require_text(self.text)
        budget = Target(parameters=self.parameters) if self.ratio is None else self.ratio
        model, tokenizer = self.model.load(self.model.place)
        found = best_plan(
            model,
            tokenizer,
            budget,
            self.minutes,
            refit=not self.no_refit,
            num_sequences=self.sequences,
            text_file=self.text,
            seq_len=self.length,
            checkpoint=self.checkpoint,
            progress=progress(),
        )
        facts = CardFacts(
            kl=found.kl,
            kl_error=found.standard_error,
            kl_text=f"{len(found.side.kl)} rows that no step of the search has seen",
        )
        save_pruned(found.model, self.out, tokenizer=tokenizer, evaluation=facts)
        print(f"{found}\nSaved to {self.out}.")
        return 0
