"""Measured speeds in words: is the pruned model faster, and if not, why."""

from __future__ import annotations

from typing import Any

FASTER = 1.02  # a median ratio below it is no speed-up worth the word


def speed_verdict(rows: list[dict[str, Any]]) -> str:
    """Whether it is faster, in words; where it is not, what stands against it."""
    parameters = next(row["ratio"] for row in rows if row["quantity"] == "parameters")
    bound = 1 / parameters
    timed = [row for row in rows if row["quantity"] in ("prefill", "decode")]
    fast = [row for row in timed if row["ratio"] >= FASTER and row["low"] > 1]
    slow = [row for row in timed if row not in fast]
    sentences = []
    if fast:
        best = "; ".join(f"{_named(row)} {_spread(row)}" for row in fast)
        sentences.append(f"Faster than dense: {best}.")
    if slow:
        worst = "; ".join(f"{_named(row)} {_spread(row)}" for row in slow)
        sentences.append(f"No clear speed-up: {worst}.")
        sentences.append(_reason(slow, timed, parameters, bound))
    return " ".join(sentences)


def _reason(
    slow: list[dict[str, Any]], timed: list[dict[str, Any]], parameters: float, bound: float
) -> str:
    """Why some rows are not faster, from what was measured beside them."""
    removed = 1 - parameters
    if bound < FASTER:
        return (
            f"Only {removed:.1%} of the parameters are gone, so time spent on weights can shrink "
            f"by {bound:.2f}x at most."
        )
    reason = (
        f"{removed:.1%} of the parameters are gone, but the pruned model has the same number of "
        "layers and runs the same number of operations, each only narrower"
    )
    single = [row for row in timed if row["quantity"] == "decode"]
    if any(row["quantity"] == "decode" for row in slow) and len(single) > 1:
        first, last = single[0], single[-1]
        growth = last["dense"] / first["dense"]
        more = last["batch_size"] / first["batch_size"]
        if growth > 0.5 * more:
            return (
                f"{reason}. A decoding step of {last['batch_size']} prompts takes the dense model "
                f"{more / growth:.1f}x as long as one of {first['batch_size']}: its time goes into "
                "starting operations, not into their width."
            )
    return f"{reason}; narrower ones need not fill the processor as well."


def _named(row: dict[str, Any]) -> str:
    return f"{row['quantity']} at batch {row['batch_size']}"


def _spread(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f})"
