"""What is asked of a server, and what is measured of its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """`batch` requests at once, each with a prompt of its own, in tokens."""

    prompt: int
    batch: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}x{self.batch}"


@dataclass(frozen=True)
class Measured:
    """Means over the requests, in seconds: to the first token, and from one token to the next."""

    first_token: float
    per_token: float
