"""A suffix automaton over many growing texts: every context that occurred, and how often each token followed it.

Shape legend: S states.
"""

from __future__ import annotations

ROOT = 0  # the empty context
_NO_STATE = -1
# Occurrences of a token are counted in this many contexts, longest first. Ordinary text has a few; only text that loops (T tokens
# of period s are T / s nested contexts) has more, and there the shortest contexts' counts do not matter.
_MAX_COUNTED_CONTEXTS = 128


class SuffixAutomaton:
    """Online generalised suffix automaton (Blumer et al. 1985; several texts as in Mohri, Moreno & Weinstein 2009).

    A state stands for the contexts (substrings) that end at the same places of the texts; ``lengths[s]`` is the longest of
    them, ``links[s]`` the state of its longest suffix that ends at more places, ``next_states[s]`` maps a following token to the
    state after it, and ``weights[s]`` is the total weight of those places. At most 2 states and 3 transitions a token.

    The state of a text's whole prefix always has that prefix as its longest context, so a writer may keep it across other
    writers' insertions; its links lead through ever shorter suffixes of the text, each of which occurred elsewhere too.
    """

    def __init__(self) -> None:
        self.next_states: list[dict[int, int]] = [{}]  # [S]
        self.links: list[int] = [_NO_STATE]  # [S]
        self.lengths: list[int] = [0]  # [S]
        self.weights: list[float] = [0.0]  # [S]

    def extend(self, last: int, token: int, weight: float) -> int:
        """Append a token to the text whose prefix state is ``last`` (ROOT: a new text) and return the longer prefix's state.

        Amortised O(1). ``weight`` is added for this occurrence to the state and, along the links, to all its suffixes.
        """
        state = self.next_states[last].get(token)
        if state is None:
            state = self._append(last, token)
        elif self.lengths[state] != self.lengths[last] + 1:
            state = self._split(last, token, state)
        links, weights = self.links, self.weights
        suffix = state
        for _ in range(_MAX_COUNTED_CONTEXTS):
            if suffix == ROOT:
                break
            weights[suffix] += weight
            suffix = links[suffix]
        return state

    def scale_weights(self, factor: float) -> None:
        """Multiply all weights seen so far: how older occurrences are made to count less. O(S)."""
        self.weights = [weight * factor for weight in self.weights]

    def _append(self, last: int, token: int) -> int:
        """A new state for a prefix that occurred nowhere yet."""
        state = self._new_state(length=self.lengths[last] + 1, weight=0.0, next_states={})
        next_states, links = self.next_states, self.links
        parent = last
        while parent != _NO_STATE and token not in next_states[parent]:
            next_states[parent][token] = state
            parent = links[parent]
        if parent == _NO_STATE:
            links[state] = ROOT
            return state
        known = next_states[parent][token]
        links[state] = known if self.lengths[known] == self.lengths[parent] + 1 else self._split(parent, token, known)
        return state

    def _split(self, parent: int, token: int, state: int) -> int:
        """Divide ``state``: contexts up to length(parent) + 1 now end at one place more than the longer ones."""
        short = self._new_state(length=self.lengths[parent] + 1, weight=self.weights[state], next_states=dict(self.next_states[state]))
        next_states, links = self.next_states, self.links
        links[short] = links[state]
        links[state] = short
        while parent != _NO_STATE and next_states[parent].get(token) == state:
            next_states[parent][token] = short
            parent = links[parent]
        return short

    def _new_state(self, *, length: int, weight: float, next_states: dict[int, int]) -> int:
        self.next_states.append(next_states)
        self.links.append(ROOT)
        self.lengths.append(length)
        self.weights.append(weight)
        return len(self.lengths) - 1
