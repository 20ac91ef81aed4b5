"""Progress of a long replay, on a terminal or in a log."""

from collections.abc import Iterator, Sequence
from typing import TextIO, TypeVar

T = TypeVar("T")


class Progress:
    """Reports on a stream which of `num_steps` steps is running, and on a terminal also how far it is.

    Invariant: a terminal shows one line, which is rewritten and finally erased; a log gets one line at the start of
    each step.
    """

    __slots__ = ("_is_terminal", "_num_started", "_num_steps", "_stream")

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._num_steps = num_steps
        self._num_started = 0  # written by: start

    def start(self, label: str) -> str:
        """Start the next step and return its line."""
        self._num_started += 1
        line = f"[{self._num_started}/{self._num_steps}] {label}"
        self._write(line)
        return line

    def track(self, label: str, items: Sequence[T]) -> Iterator[T]:
        """Start the next step, and iterate over `items` while reporting progress."""
        line = self.start(label)
        stride = max(1, len(items) // 100)
        for index, item in enumerate(items):
            if self._is_terminal and index % stride == 0:
                self._write(f"{line}: {index / len(items):.0%}")
            yield item

    def finish(self) -> None:
        """Erase the line on a terminal."""
        if self._is_terminal:
            self._write("")

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()
