"""`cocurve evaluate`: perplexity, KL from the dense model, and tasks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import InputError
from ..base.schema import parse_json
from ..calibration import LONGEST_ROW
from ..evaluation.tasks import TaskOptions, evaluate_tasks
from ..extensions.judging.perplexity import PerplexityOptions, perplexity
from ..extensions.texts.documents import own_text, read_documents
from ..measuring.risk import mean_and_error, model_risk
from ..models.runtime import context_of
from ..pruner.manifest import require_dense
from .common import (
    PlannedModel,
    Rows,
    Suite,
    progress,
    require_new,
    rows_of,
    write_new,
)
from .options import Verb, flag, part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..evaluation.report import EvaluationReport


@dataclass(frozen=True, kw_only=True)
class Evaluate(Verb):
    """Measure a dense or pruned model: its perplexity on a text.

    --against adds the dense model's perplexity and the KL divergence from it in nats per token,
    with its standard error over rows. --sequences and --length bound all of them. --suite adds
    tasks, run by lm_eval. Use a text that H was not built on.

    Examples:
      cocurve evaluate smaller --against demo
      cocurve evaluate smaller --against MODEL --text held_out.jsonl --json
      cocurve evaluate demo --suite demo --limit 40 --report report.json
    """

    model: PlannedModel = part()
    against: str | None = flag("the dense model, for the KL", metavar="DENSE")
    text: Rows = rows_of("text", 16, "text to measure on", "none")
    tokenizer: str | None = flag("tokenizer of a pruned folder without one", metavar="MODEL")
    suite: Suite = part()
    report: Path | None = flag("file for the suite's report", metavar="FILE")
    json: bool = flag("print JSON")

    def run(self) -> int:
        """Run `cocurve evaluate`."""
        self._require()
        place = self.model.place
        model, tokenizer = self.model.load_any(place, self.tokenizer or self.against)
        if tokenizer is None:
            raise InputError(f"{place} holds no tokenizer. Give --tokenizer or --against.")
        found: dict[str, Any] = {"model": place}
        documents = self._documents(tokenizer)
        if documents is not None:
            found["perplexity"] = self._perplexity(model, tokenizer, documents)
        if self.against is not None:
            dense, own = self.model.load_any(self.against)
            if own is None:
                raise InputError(
                    f"{self.against} holds no tokenizer. Give --against a dense model."
                )
            if documents is not None:
                found["dense_perplexity"] = self._perplexity(dense, own, documents, self.against)
            found["kl"] = kl = self._divergence(self.against, dense, own, model)
            error = kl["standard_error"]
            known = "" if error is None else f" ± {error:.4f}"
            self._say(
                f"KL({kl['against']} || model) {kl['mean']:.4f}{known} nats per token, "
                f"{kl['rows']} rows of {kl['tokens_per_row']} tokens from {kl['source']}"
                + (kl["told"] and f"\n{kl['told']}")
            )
        if self.suite.name is not None:
            report = self._tasks(self.suite.name, model, tokenizer)
            found["tasks"] = parse_json(report.to_json())
            self._say(report)
        if self.json:  # before the report, so that a full disk does not lose the results
            print(json.dumps(found, indent=1), flush=True)
        if self.report is not None:
            write_new(self.report, report.to_json())
        return 0

    def _say(self, result: Any) -> None:
        if not self.json:
            print(result, flush=True)

    def _require(self) -> None:
        """Check, before hours of work, that options belong together and files can be written."""
        suite = self.suite
        suite.require()
        if suite.data is not None and suite.name != "paper":
            raise InputError("--data is for the datasets of --suite paper. Give both, or neither.")
        if suite.name is None and (suite.allow_code_execution or self.report is not None):
            raise InputError(
                "--allow-code-execution and --report go with a suite. Give --suite, or remove both."
            )
        if self.report is not None:
            require_new(self.report)
        self.text.require()

    def _documents(self, tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
        """The text for the perplexity: --text, the model's own held-out text, or None."""
        if self.text.file is not None:
            return list(read_documents(self.text.file, tokenizer))
        own = own_text(self.model.place) or own_text(self.against or "")
        if own is not None:
            return own("held_out")[0]
        if self.suite.name is None:
            raise InputError("there is nothing to measure on. Give --text FILE, or --suite.")
        return None

    def _perplexity(
        self, model: Any, tokenizer: Any, documents: list[str], name: str = ""
    ) -> dict[str, Any]:
        """Measure and say a perplexity, on as many tokens as the rows have together."""
        length = self.text.length or int(min(LONGEST_ROW, context_of(model)))
        settings = PerplexityOptions(progress=progress(), tokens=self.text.sequences * length)
        measured = perplexity(model, tokenizer, documents, options=settings, bos=self.text.bos)
        self._say(f"{name}: {measured}" if name else measured)
        whole = asdict(measured) | {"standard_error": measured.standard_error}
        return {k: v for k, v in whole.items() if not k.startswith("window_")}

    def _divergence(self, against: str, dense: Any, tokenizer: Any, model: Any) -> dict[str, Any]:
        """Measure KL(dense || model) on rows of the text, in nats per token."""
        told = "" if self.model.other_weights else require_dense(dense, model).note
        rows = self.text.held_out(against, tokenizer)
        values = model_risk(dense, model, rows, progress=progress())
        mean, error = mean_and_error(values)
        return {
            "against": against,
            "mean": mean,
            "standard_error": error if len(values) > 1 else None,
            "rows": len(rows),
            "tokens_per_row": rows.seq_len,
            "source": rows.source,
            "told": told,
        }

    def _tasks(self, suite: str, model: Any, tokenizer: Any) -> EvaluationReport:
        """Run the tasks of --suite."""
        # lm_eval has only bars, which would spoil a log file
        bars = progress() is True
        settings = TaskOptions(files=tuple(self.suite.tasks), data=self.suite.data, progress=bars)
        limit, allowed = self.suite.limit, self.suite.allow_code_execution
        return evaluate_tasks(
            model, tokenizer, suite, limit, allowed, options=settings, chat=self.suite.chat
        )
