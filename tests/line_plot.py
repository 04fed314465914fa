"""A line plot as an SVG file, written by hand: a few lines, axes, a legend, one marked place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 800, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 52  # margins around the axes


@dataclass(frozen=True)
class Line:
    label: str
    values: Sequence[float]  # at x = first, first + 1, ...
    color: str


@dataclass(frozen=True)
class Plot:
    """From y = `lowest` up; a dashed line at x = `marked[0]` says `marked[1]`."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    first: int = 0
    lowest: float = 0.0
    marked: tuple[int, str] | None = None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self._elements()) + "\n", encoding="ascii")

    def _elements(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="13" fill="#333">'
        )
        yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        yield _text(WIDTH / 2, 24, self.title, size=15)
        yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, self.x_label)
        yield _text(18, (TOP + HEIGHT - BOTTOM) / 2, self.y_label, turned=True)
        yield from self._grid()
        for line in self.lines:
            points = " ".join(
                f"{self._x(self.first + step):.1f},{self._y(value):.1f}"
                for step, value in enumerate(line.values)
            )
            yield (
                f'<polyline points="{points}" fill="none" stroke="{line.color}" '
                'stroke-width="2.5"/>'
            )
            yield from (
                f'<circle cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="3" '
                f'fill="{line.color}"/>'
                for point in points.split()
            )
        for number, line in enumerate(self.lines):
            y = TOP + 18 + 20 * number
            yield (
                f'<line x1="{LEFT + 12}" x2="{LEFT + 40}" y1="{y - 4}" y2="{y - 4}" '
                f'stroke="{line.color}" stroke-width="2.5"/>'
            )
            yield _text(LEFT + 48, y, line.label, anchor="start")
        yield "</svg>"

    def _grid(self) -> Iterator[str]:
        step = 0.2 if self._highest - self.lowest > 1 else 0.05
        value = self.lowest
        while value <= self._highest + 1e-9:
            y = self._y(value)
            yield (
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            )
            yield _text(LEFT - 8, y + 4, f"{value:.2f}", anchor="end")
            value += step
        for place in range(self.first, self.first + self._length):
            yield _text(self._x(place), HEIGHT - BOTTOM + 20, str(place))
        if self.marked is not None:
            place, words = self.marked
            x = self._x(place)
            yield (
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
                'stroke="#999" stroke-dasharray="4 4"/>'
            )
            yield _text(x - 6, HEIGHT / 2, words, anchor="end", size=12)

    @property
    def _length(self) -> int:
        return max(len(line.values) for line in self.lines)

    @property
    def _highest(self) -> float:
        return max(max(line.values) for line in self.lines)

    def _x(self, place: float) -> float:
        return LEFT + 16 + (place - self.first) / (self._length - 1) * (WIDTH - LEFT - RIGHT - 32)

    def _y(self, value: float) -> float:
        share = (value - self.lowest) / (self._highest - self.lowest)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _text(
    x: float, y: float, words: str, *, anchor: str = "middle", size: int = 13, turned: bool = False
) -> str:
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turn}>'
        f"{escape(words)}</text>"
    )
