"""Patterns over tensor names, and matching that no pattern makes slow.

A pattern is compiled to a machine of states that reads a name once; which sets
of states there are is found as names are read, and kept. What has few wildcards
goes by a regular expression instead, which is faster then, and slow otherwise:
with 50 of them, backtracking would not end.
"""

from __future__ import annotations

import re
from itertools import pairwise

from tensorio.errors import escaped

__all__ = ["Pattern"]

# With two wildcards, a regular expression takes at most the square of a name's length.
WILD_MAX = 2
# Steps that are kept; real names need a few hundred.
KEPT = 1 << 14

_ANY, _NO_DOT = "any", "no dot"  # what a step may read, besides a character


class Pattern:
    """What `tensorio.tp` says of patterns.

    Parameters
    ----------
    text : str

    Raises
    ------
    ValueError
        A brace that is not closed, or ``**`` beside something else than dots.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._steps: list[list[tuple[str, int]]] = [[]]
        self._free: list[int] = [0]  # for each state, those it goes on to without reading
        self._regex: re.Pattern[str] | None = None
        self._wild = 0
        self._known: dict[tuple[int, str], int] = {}
        self._expression, at = "", 0
        while at < len(text):
            part, at = self._part(at)
            self._expression += part
        if self._wild <= WILD_MAX:
            self._regex = re.compile(self._expression, re.DOTALL)
        for state in reversed(range(len(self._free))):  # they only lead to later ones
            onward = self._free[state]
            for later in _bits(onward):
                onward |= self._free[later]
            self._free[state] = onward | 1 << state

    def fits(self, name: str) -> bool:
        """Tell whether all of a name is what the pattern says.

        Notes
        -----
        O(characters of the name times those of the pattern), and about 2 us for a usual name; 0.4 us with few
        wildcards.
        """
        if self._regex is not None:
            return self._regex.fullmatch(name) is not None
        states = self._free[0]
        for char in name:
            after = self._known.get((states, char))
            states = self._after(states, char) if after is None else after
            if not states:
                return False
        return bool(states >> (len(self._steps) - 1) & 1)

    def _after(self, states: int, char: str) -> int:
        out = 0
        for state in _bits(states):
            for reads, then in self._steps[state]:
                if reads in (char, _ANY) or (reads == _NO_DOT and char != "."):
                    out |= self._free[then]
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[states, char] = out
        return out

    # ------------------------------------------------------------------ compiling

    def _state(self) -> int:
        self._steps.append([])
        self._free.append(0)
        return len(self._steps) - 1

    def _part(self, at: int) -> tuple[str, int]:
        """Append the states of what is at a place; its regular expression, and the place behind it."""
        last = len(self._steps) - 1
        if self.text.startswith("**", at):
            return self._levels(last, at)
        char = self.text[at]
        if char == "{":
            return self._either(last, at)
        if char == "*":
            self._wild += 1
            self._steps[last].append((_NO_DOT, last))
            return "[^.]*", at + 1
        self._steps[last].append((_NO_DOT if char == "?" else char, self._state()))
        return "[^.]" if char == "?" else re.escape(char), at + 1

    def _levels(self, last: int, at: int) -> tuple[str, int]:
        text = self.text
        if (at and text[at - 1] != ".") or text[at + 2 : at + 3] not in ("", "."):
            raise ValueError(f"pattern {escaped(text)}: ** stands for whole levels, between dots")
        self._wild += 1
        if at + 2 == len(text):
            self._steps[last].append((_ANY, self._state() if at else last))
            self._steps[-1].extend([(_ANY, len(self._steps) - 1)] if at else [])
            return ".+" if at else ".*", at + 2
        level = self._state()
        self._steps[last].append((_NO_DOT, level))
        self._steps[level] += [(_NO_DOT, level), (".", last)]
        self._free[last] |= 1 << self._state()
        return r"(?:[^.]+\.)*", at + 3

    def _either(self, last: int, at: int) -> tuple[str, int]:
        end = self.text.find("}", at)
        inner = self.text[at + 1 : end]
        if end < 0 or "{" in inner:
            raise ValueError(f"pattern {escaped(self.text)}: {{ without its }}")
        words = list(dict.fromkeys(inner.split(",")))
        ordered = sorted(words)
        self._wild += any(after.startswith(word) for word, after in pairwise(ordered))
        ends = [self._word(last, word) for word in words]
        join = self._state()
        for state in ends:
            self._free[state] |= 1 << join
        return f"(?:{'|'.join(map(re.escape, words))})", end + 1

    def _word(self, state: int, word: str) -> int:
        for char in word:
            then = self._state()
            self._steps[state].append((char, then))
            state = then
        return state


def _bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out
