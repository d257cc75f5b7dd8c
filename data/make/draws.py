"""Choices at random that know their price.

The generator of the corpus draws every word through one `Draws`. The sum of -log p over the choices
of a document bounds the entropy of the text from above (two ways to the same text cost more than
one). So it says how low the loss of a language model can get, nearly: the model card compares them.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
# Rank k = 0, 1, ... weighs 1 / (k + shift): the law of Zipf and Mandelbrot.
ZIPF_SHIFT = 3.0


class Draws:
    """A seeded source of choices; `nats` is the sum of -log p over those made so far."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        # For what the text does not show: free of charge.
        self.unseen = random.Random(f"unseen {seed}")
        self.nats = 0.0

    def choice(self, options: Sequence[T]) -> T:
        """One of the options, all equally likely."""
        self.nats += math.log(len(options))
        return options[self._random.randrange(len(options))]

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """One of the options, with a probability proportional to its weight."""
        place = self._random.choices(range(len(options)), weights)[0]
        self.nats -= math.log(weights[place] / sum(weights))
        return options[place]

    def zipf(self, options: Sequence[T]) -> T:
        """One of the options, which stand in the order of their frequency."""
        return self.weighted(options, [1 / (k + ZIPF_SHIFT) for k in range(len(options))])

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self.weighted((True, False), (probability, 1 - probability))

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return self.choice(range(low, high + 1))

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options in random order."""
        self.nats += sum(math.log(len(options) - k) for k in range(count))
        return self._random.sample(options, count)

    def offered(self, make: Callable[[], T]) -> tuple[T, float]:
        """Something that may not be used after all, and its price, which is not paid yet."""
        before = self.nats
        made = make()
        price, self.nats = self.nats - before, before
        return made, price

    def among(
        self, options: Sequence[T | Callable[[], T]], weights: Sequence[float] | None = None
    ) -> T:
        """One of the options, of which some are drawn first; only the one taken is paid."""
        drawn = [self.offered(o) if callable(o) else (o, 0.0) for o in options]
        made, price = self.weighted(drawn, weights) if weights else self.choice(drawn)
        self.nats += price
        return made

    def until(self, make: Callable[[], T], accept: Callable[[T], bool]) -> T:
        """The first accepted of many tries. Only that one is paid, as if nothing were refused."""
        before = self.nats
        while True:
            self.nats = before
            made = make()
            if accept(made):
                return made
