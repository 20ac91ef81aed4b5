"""The values of a program: texts that are being computed, and the errors that are raised where they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from pagewood.engine.program.backend import Answer

Launch = Callable[[], None]


class VariableError(RuntimeError):
    """A variable has no value; the cause is attached. `name` is that of the variable whose request failed."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class ProgramCancelledError(RuntimeError):
    """The program was cancelled before this was computed."""


class DeadlineExceededError(ProgramCancelledError):
    """The program was not complete at its deadline."""


class Variable:
    """A text that a backend computes. Invariant: it is settled once, with an answer or with an error.

    Args:
        name: given by the program.
        place: where it is, for errors: "" or " of branch 2".
    """

    __slots__ = ("_answer", "_changed", "_failure", "_followers", "_pieces", "_place", "is_read", "name")

    def __init__(self, name: str, *, place: str) -> None:
        self.name = name
        self._place = place
        self._changed = threading.Condition()
        self._answer: Answer | None = None  # written by: settle
        self._failure: tuple[Variable, BaseException] | None = None
        """The variable whose request failed, this one or one before it, and the exception."""  # written by: fail, then
        self._pieces: list[str] = []
        """The text so far, if it is streamed."""  # written by: add
        self._followers: list[tuple[Variable, Launch]] = []
        """Variables that follow it in their text, with the functions that request them."""  # written by: then, _close
        self.is_read = False
        """Whether its error has been raised."""  # written by: answer

    def __str__(self) -> str:
        """Return its name and place."""
        return f"{self.name!r}{self._place}"

    @property
    def settled(self) -> Answer | None:
        """The answer, if it is known; None before, and after an error."""
        return self._answer

    @property
    def has_unread_error(self) -> bool:
        """Whether it is settled with an error that was never raised."""
        return self._failure is not None and not self._failure[0].is_read

    def add(self, piece: str) -> None:
        """Append a piece of the text."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    def settle(self, answer: Answer) -> None:
        """Set the answer, and request the variables that follow."""
        with self._changed:
            self._answer = answer
        for _, launch in self._close():
            launch()

    def fail(self, cause: BaseException) -> None:
        """Set the error, also of all variables that follow."""
        # A loop and no recursion, because thousands of variables may follow each other.
        self._failure = (self, cause)
        open_ = self._close()
        while open_:
            variable, _ = open_.pop()
            variable._failure = self._failure
            open_ += variable._close()

    def then(self, follower: Variable, launch: Launch) -> None:
        """Request a variable that follows this one, as soon as this one has its answer."""
        with self._changed:
            if not self._is_settled:
                self._followers.append((follower, launch))
                return
        if self._failure is None:
            launch()
        else:
            follower._failure = self._failure
            follower._close()

    def wait(self) -> None:
        """Wait until it is settled."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled)

    def answer(self) -> Answer:
        """Return the answer; waits for it.

        Raises:
            VariableError: its request failed, or that of a variable before it.
        """
        self.wait()
        if self._answer is not None:
            return self._answer
        assert self._failure is not None
        failed, cause = self._failure
        failed.is_read = True
        message = f"variable {failed} failed: {cause}"
        if failed is not self:
            message = f"variable {self} was not computed, because {message}"
        raise VariableError(message, name=failed.name) from cause

    def stream(self) -> Iterator[str]:
        """Yield the text in pieces: all that was computed since the last one. Raises what `answer` raises."""
        num_pieces, length = 0, 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled or len(self._pieces) > num_pieces)  # noqa: B023
                piece = "".join(self._pieces[num_pieces:])
                num_pieces, is_settled = len(self._pieces), self._is_settled
            if is_settled:
                piece = self.answer().text[length:]
            length += len(piece)
            if piece:
                yield piece
            if is_settled:
                return

    @property
    def _is_settled(self) -> bool:
        return self._answer is not None or self._failure is not None

    def _close(self) -> list[tuple[Variable, Launch]]:
        """Wake the readers of a settled variable; return the variables that follow it."""
        with self._changed:
            followers, self._followers = self._followers, []
            self._changed.notify_all()
        return followers
