r"""Finds the answer in what a model wrote, and says whether it is right.

The last \boxed{} that holds one counts, else the last 'answer: ...', else (numbers and letters
only) what stands alone at the end. What was thought before </think> does not count. Pure.
"""

from __future__ import annotations

import re
from fractions import Fraction

from eval.question import Kind

_THOUGHT_ENDS = "</think>"
_MARK = r"(?:final |exact |correct |right )*(?:answer|choice|option)\W{0,6}(?:is|are|=|:)"
_MARKED = re.compile(rf"{_MARK}[:\s]*([^\n]+)", re.IGNORECASE)
_WRAPPED = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|mbox|operatorname)\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_LETTER = re.compile(r"^[\s(\[*$_\"'`]*([A-Za-z])(?![A-Za-z0-9^_'])")
_ALONE = re.compile(r"^[\s(\[*$]*([A-Z])[)\].:*$\s]*$")
_INTEGER = re.compile(r"(?<![\w.,/^-])(?<!\^\{)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0+)?(?![\w/^]|[.,]\d)")


def extract(text: str, kind: Kind) -> str | None:
    """The answer in a form that is compared as it is; None if there is none to be found."""
    said = text.rpartition(_THOUGHT_ENDS)[2]
    box = _last_box(said)
    marked = _MARKED.findall(said)
    match kind:
        case "integer":
            if box is not None and (in_box := _integer(box)):
                return in_box
            from_mark = next((n for one in reversed(marked) if (n := _integer(one))), None)
            return from_mark or _integer(said)
        case "choice":
            if box is not None and (in_box := _letter(box)):
                return in_box
            from_mark = next((n for one in reversed(marked) if (n := _letter(one))), None)
            return from_mark or _letter_alone(said)
        case "exact":
            found = box if box is not None else (marked[-1] if marked else None)
            return None if found is None else normal(found) or None


def is_right(found: str | None, answer: str, kind: Kind) -> bool:
    """Of an extracted answer; numbers are compared as numbers."""
    if found is None:
        return False
    match kind:
        case "integer":
            return int(found) == int(answer)
        case "choice":
            return found == (_letter(answer) or answer.upper())
        case "exact":
            expected = normal(answer)
            return found == expected or (
                (number := _number(found)) is not None and number == _number(expected)
            )


def normal(text: str) -> str:
    """Without what does not change the meaning: case, spaces, marks of mathematics, a last dot."""
    text = _plain(text).strip().strip("*_`\"'").strip()
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"\s+", " ", text).rstrip(".;,").strip()
    return text.casefold()


def _last_box(text: str) -> str | None:
    r"""What is in the last \boxed{} or \fbox{}, braces and all; None if none is closed."""
    for start in reversed([found.end() for found in re.finditer(r"\\f?box(?:ed)?\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return None


def _plain(text: str) -> str:
    """Mathematics without its dress."""
    while (bare := _WRAPPED.sub(r"\1", text)) != text:
        text = bare
    text = _FRACTION.sub(r"\1/\2", text)
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|!|quad|\(|\)|\[|\])", "", text)
    return re.sub(r"\^\s*\{?\\circ\}?|\\%|\\\$|\$", "", text)


def _integer(text: str) -> str | None:
    """The last one in it, without leading zeros."""
    found = _INTEGER.findall(_plain(text))
    return str(int(found[-1].replace(",", ""))) if found else None


def _letter(text: str) -> str | None:
    """The one that it begins with."""
    found = _LETTER.match(_plain(text))
    return found[1].upper() if found else None


def _letter_alone(text: str) -> str | None:
    """On the last line that is not empty, if there is nothing else on it."""
    lines = [line for line in text.splitlines() if line.strip()]
    found = _ALONE.match(_plain(lines[-1])) if lines else None
    return found[1] if found else None


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return None
