"""Small charts as inline SVG: lines, points and stacked bars. No script, no font, no network."""

import html
import math
from collections.abc import Callable, Sequence

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569")
_WIDTH, _HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 34, 48

Series = tuple[str, Sequence[tuple[float, float]]]
"""(label, points)"""
Format = Callable[[float], str]


class _Axis:
    """Maps values to pixels, linear or logarithmic."""

    def __init__(self, values: Sequence[float], first: float, last: float, log: bool) -> None:
        self.log = log and min(values) > 0
        low, high = min(values), max(values)
        if not self.log:
            low = min(low, 0.0)
        if low == high:
            low, high = (low / 2, high * 2) if self.log else (low, low + 1.0)
        self.low, self.high = (math.log10(low), math.log10(high)) if self.log else (low, high)
        self.first, self.last = first, last

    def pixel(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        return self.first + (at - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if not self.log:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
            step *= next((m for m in (1, 2, 5) if (self.high - self.low) / (m * step) <= 6), 10)
            return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        found = [
            m * 10.0**k
            for k in range(math.floor(self.low), math.ceil(self.high) + 1)
            for m in (1, 2, 5)
            if self.low - 1e-9 <= math.log10(m) + k <= self.high + 1e-9
        ]
        return found if len(found) <= 7 else [t for t in found if math.log10(t) % 1 < 1e-9] or found[::3]


def short(value: float) -> str:
    """1234567 -> 1.23M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def lines(title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_x: bool = False,
          joined: bool = True, marks: Format = short) -> str:  # fmt: skip
    """Lines through the points of each series, or points alone (`joined=False`)."""
    points = [point for _, line in series for point in line]
    if not points:
        return ""
    x = _Axis([p[0] for p in points], _LEFT, _WIDTH - _RIGHT, log_x)
    y = _Axis([p[1] for p in points], _HEIGHT - _BOTTOM, _TOP, False)
    parts = [_frame(title, x_label, y_label), _x_ticks(x, marks), _y_ticks(y)]
    for index, (label, line) in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        placed = [(x.pixel(a), y.pixel(b)) for a, b in sorted(line)]
        if joined:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (a, b), (value_x, value_y) in zip(placed, sorted(line)):
            hint = html.escape(f"{label}: {marks(value_x)}, {value_y:.4g}")
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"><title>{hint}</title></circle>')
    return _svg([*parts, _legend([label for label, _ in series])])


def stacked(title: str, y_label: str, bars: Sequence[str], parts: Sequence[tuple[str, Sequence[float]]]) -> str:
    """One bar a case, one colour a part: `parts` is (label, a value per bar)."""
    if not bars:
        return ""
    totals = [sum(values[i] for _, values in parts) for i in range(len(bars))]
    y = _Axis([0.0, *totals], _HEIGHT - _BOTTOM, _TOP, False)
    room = (_WIDTH - _RIGHT - _LEFT) / len(bars)
    drawn = [_frame(title, "", y_label), _y_ticks(y)]
    for index, name in enumerate(bars):
        base = 0.0
        left = _LEFT + room * (index + 0.15)
        for colour, (label, values) in zip(COLOURS, parts):
            top, bottom = y.pixel(base + values[index]), y.pixel(base)
            hint = html.escape(f"{name}, {label}: {values[index]:.4g}")
            drawn.append(f'<rect x="{left:.1f}" y="{top:.1f}" width="{room * 0.7:.1f}" height="{bottom - top:.1f}" '
                         f'fill="{colour}"><title>{hint}</title></rect>')  # fmt: skip
            base += values[index]
        drawn.append(_text(left + room * 0.35, _HEIGHT - _BOTTOM + 16, name if len(bars) <= 8 else str(index + 1)))
    return _svg([*drawn, _legend([label for label, _ in parts])])


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
    return f'{head}font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{html.escape(text)}</text>'


def _frame(title: str, x_label: str, y_label: str) -> str:
    middle_y = (_HEIGHT - _BOTTOM + _TOP) / 2
    box = (f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _RIGHT - _LEFT}" height="{_HEIGHT - _BOTTOM - _TOP}" '
           'fill="none" stroke="#999"/>')  # fmt: skip
    return (
        box
        + _text(_LEFT, 20, title, "start", 'font-weight="bold"')
        + _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_label)
        + _text(16, middle_y, y_label, extra=f'transform="rotate(-90 16 {middle_y})"')
    )


def _x_ticks(axis: _Axis, marks: Format) -> str:
    return "".join(
        f'<line x1="{axis.pixel(t):.1f}" x2="{axis.pixel(t):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#eee"/>'
        + _text(axis.pixel(t), _HEIGHT - _BOTTOM + 16, marks(t))
        for t in axis.ticks()
    )


def _y_ticks(axis: _Axis) -> str:
    return "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{axis.pixel(t):.1f}" y2="{axis.pixel(t):.1f}" stroke="#eee"/>'
        + _text(_LEFT - 6, axis.pixel(t) + 4, short(t), "end")
        for t in axis.ticks()
    )


def _legend(labels: Sequence[str]) -> str:
    left = _WIDTH - _RIGHT + 12
    return "".join(
        f'<rect x="{left}" y="{_TOP + 18 * i}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
        + _text(left + 16, _TOP + 9 + 18 * i, label, "start")
        for i, label in enumerate(labels)
    )
