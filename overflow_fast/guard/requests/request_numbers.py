"""The numbers of requests, forwards and tokens, which several threads count."""

from __future__ import annotations

from threading import Lock


class RequestNumbers:
    """Counts requests.

    Attributes:
        are_judged: Forwards are judged as requests.
        num_requests, num_forwards, num_tokens: What ran so far.
        num_bad: The number of bad requests.
        num_left_out: The number of requests that a schedule has left out.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # a forward needs it, and a replay waits for the forward
        self.are_judged = False
        self.num_requests = self.num_forwards = self.num_tokens = 0
        self.num_bad = self.num_left_out = 0

    def __deepcopy__(self, memo: object) -> RequestNumbers:
        return self  # a lock has no copy

    def go_on_from(self, before: RequestNumbers) -> None:
        """Counts on from where others have ended."""
        self.num_requests, self.num_bad = before.num_requests, before.num_bad
        self.num_forwards, self.num_tokens = before.num_forwards, before.num_tokens
        self.num_left_out = before.num_left_out

    def begin(self) -> int:
        """Counts a request that begins; returns its number, from 0."""
        with self._lock:
            self.num_requests += 1
            return self.num_requests - 1

    def note_left_out(self) -> None:
        """Counts a request that a schedule leaves out."""
        with self._lock:
            self.num_left_out += 1

    def note_forward(self, num_tokens: int) -> None:
        """Counts a forward that has ended."""
        with self._lock:
            self.num_forwards += 1
            self.num_tokens += num_tokens

    def metrics(self) -> dict[str, float]:
        """The numbers, for exporters; none where no forward is judged as a request."""
        if not self.are_judged:
            return {}
        return {
            "requests_total": self.num_requests,
            "bad_requests_total": self.num_bad,
            "forwards_total": self.num_forwards,
            "tokens_total": self.num_tokens,
        }
