"""Finds stop strings in a text that grows one character at a time: Aho and Corasick's automaton.

One step a character whatever the number of strings, so how the text is cut into pieces changes
nothing. Knows nothing of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Nodes are the beginnings of the strings; node 0 is the empty one.

    In node s, `depth[s]` characters at the end of the text could still become a stop string, and
    `found[s]` is the length of the longest stop string that ends here, 0 if none does.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the longest proper ending of this node that is a node too
        self.depth = [0]
        self.found = [0]
        for string in strings:
            self._add(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, node: int, character: str) -> int:
        """Where a character leads."""
        while node and character not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(character, 0)

    def _add(self, string: str) -> None:
        node = 0
        for character in string:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[node] + 1)
                self.found.append(0)
            node = self._next[node][character]
        self.found[node] = len(string)

    def _link(self) -> None:
        """Breadth first: a node's shorter endings are complete before it needs them."""
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                self._shorter[child] = self.step(self._shorter[node], character)
                self.found[child] = self.found[child] or self.found[self._shorter[child]]
                waiting.append(child)
