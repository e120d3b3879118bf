"""A few lines of SVG. Colours come from docs/_static/drawings.css, by class, so a drawing follows the page's theme."""

from __future__ import annotations

from html import escape


class Svg:
    """A drawing of `width` x `height` units. Boxes are (left, top, width, height); y grows downwards.

    title: what a screen reader says instead of the drawing.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, rounded: float = 2) -> None:
        """kind: a class of drawings.css, such as `encoder`."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rounded}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "label", anchor: str = "start") -> None:
        """anchor: start, middle or end of the words is at x."""
        self._parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        self._parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def path(self, points: list[tuple[float, float]], kind: str) -> None:
        """Straight lines from point to point."""
        self._parts.append(f'<path class="{kind}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A straight arrow, along one of the axes."""
        self.line(x1, y1, x2, y2, "arrow")
        size, along = 4.0, (1 if x2 > x1 else -1 if x2 < x1 else 0, 1 if y2 > y1 else -1 if y2 < y1 else 0)
        back = (x2 - along[0] * 2 * size, y2 - along[1] * 2 * size)
        corners = (
            (x2, y2),
            (back[0] - along[1] * size, back[1] - along[0] * size),
            (back[0] + along[1] * size, back[1] + along[0] * size),
        )
        self._parts.append(f'<path class="head" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in corners)} Z"/>')

    def brace(self, x1: float, x2: float, y: float, words: str) -> None:
        """A bracket over x1..x2 that opens downwards, with words in its middle."""
        self.line(x1, y, x2, y)
        self.line(x1, y, x1, y + 6)
        self.line(x2, y, x2, y + 6)
        self.text((x1 + x2) / 2, y - 5, words, anchor="middle")

    def __str__(self) -> str:
        width, height = self._size
        return (
            f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self._title)}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(self._parts)}</svg>'
        )
