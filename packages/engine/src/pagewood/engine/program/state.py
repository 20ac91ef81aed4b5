"""The state of a program: a text that grows by the writing of the program and of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pagewood.engine.api import Grammar
from pagewood.engine.program.backend import Answer
from pagewood.engine.program.execution import Ask, Execution
from pagewood.engine.program.options import check_choices, sampling
from pagewood.engine.program.text import Text
from pagewood.engine.program.variable import Variable


class State:
    """A text that grows, and the variables in it. Invariant: a variable continues the text as it was at its call.

    `gen` and `select` do not wait: they ask for a text, and reading it waits. So the branches of `fork` run at the
    same time. The requests of one state follow each other, because each continues the text of the one before.

    A state has roles or plain text. With roles, the text is what the model's chat template makes of the turns. What
    `add`, `gen` and `select` append belongs to the assistant's turn: that of `with state.assistant()`, or one that
    begins there and ends with the next role.

    One thread uses a state. Programs get one; they are not made otherwise.
    """

    __slots__ = ("_execution", "_path", "_text", "_variables")

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._path = ""
        """Numbers of the forks that made it: "2" or "2.0"."""  # written by: fork
        self._text = Text()  # written by: fork
        self._variables: dict[str, Variable] = {}
        """Those of its text, by name."""  # written by: fork; contents written by: _compute

    @property
    def text(self) -> str:
        """The whole text, with the roles as the chat template renders them; waits for its variables.

        Raises:
            VariableError: a variable has no value.
            ChatTemplateError: it has roles, and the model has no chat template or its template rejects the turns.
        """
        return self._execution.backend.render(self._text.snapshot(is_continued=False).prompt())

    def add(self, text: str) -> None:
        """Append plain text, or a piece of the assistant's turn.

        Raises:
            TypeError: it is not text.
        """
        self._text.add(_checked("text", text))

    def system(self, text: str) -> None:
        """Append the turn with instructions for the whole conversation.

        Raises:
            TypeError: it is not text.
            ValueError: plain text comes before it, or it is inside `with state.assistant()`.
        """
        self._text.turn("system", _checked("text", text))

    def user(self, text: str) -> None:
        """Append a turn of the user. Raises what `system` raises."""
        self._text.turn("user", _checked("text", text))

    def tool(self, text: str) -> None:
        """Append a turn with the result of a call. Raises what `system` raises."""
        self._text.turn("tool", _checked("text", text))

    def assistant(self) -> AbstractContextManager[None]:
        """Return a block whose `add`, `gen` and `select` are one turn of the assistant.

        Within the turn, its text is continued exactly. Once it is complete, the chat template renders it as any other
        turn, and may strip it.

        Raises:
            ValueError: plain text comes before it, or it is inside another such block.
        """
        return self._text.block()

    def gen(
        self,
        name: str,
        *,
        max_tokens: int = 128,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_regex: str | Sequence[str] = (),
        regex: str | None = None,
        json_schema: Mapping[str, Any] | str | None = None,
        choice: Sequence[str] | None = None,
        grammar: Grammar | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
    ) -> None:
        """Append a text that the model generates, and call it `name`. Does not wait for it.

        Args:
            name: new in this state.
            max_tokens: most tokens of it.
            temperature: 0: greedy; None: what the model recommends, as for the three below.
            top_p: share of the probability that is drawn from.
            top_k: number of tokens that are drawn from.
            seed: makes the draws repeatable.
            stop: strings before which it ends.
            stop_regex: expressions of RE2 before whose matches it ends.
            regex: an expression in Rust's syntax that it matches.
            json_schema: a schema that it follows, an object or its JSON text.
            choice: texts of which it is one. `select` compares whole texts instead of drawing token by token.
            grammar: any other grammar that it follows.
            tools: functions as in OpenAI's API, which the chat template shows to the model; the text must have roles.
                `answer(name).calls` has what the model calls. Later requests show them only if they get them, too.
            tool_choice: "auto": the model calls or not; "required": it calls; or the name of the one that it calls.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of its range, several say what the text may be, or the name is not new.
            ProgramCancelledError: the program was cancelled.
        """
        chosen = sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            stop_regex=stop_regex,
            grammars={
                "regex": None if regex is None else Grammar.regex(regex),
                "json_schema": None if json_schema is None else Grammar.json_schema(json_schema),
                "choice": None if choice is None else Grammar.choice(check_choices(choice)),
                "grammar": grammar,
            },
            tools=tools,
            tool_choice=tool_choice,
        )
        execution, before = self._execution, self._text.snapshot(is_continued=True)
        offered = () if chosen.offer is None else chosen.offer.tools
        if offered and not before.is_conversation:
            raise ValueError("tools must come with roles, because the chat template shows them; got them in plain text")
        self._compute(
            name,
            lambda on_text: execution.backend.complete(
                before.prompt(tools=offered), chosen, execution.priority, on_text=on_text
            ),
        )

    def select(self, name: str, choices: Sequence[str]) -> None:
        """Append the choice with the best score, and call it `name`. Does not wait for it.

        The score is the mean of the log probabilities of a choice's tokens after the text so far, so that long choices
        are not worse than short ones. All choices are scored together. `answer(name).scores` has the scores.

        Args:
            name: new in this state.
            choices: texts; of equal scores the first wins.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: there is no choice, one is empty or double, or the name is not new.
            ProgramCancelledError: the program was cancelled.
        """
        checked = check_choices(choices)
        execution, before = self._execution, self._text.snapshot(is_continued=True)
        self._compute(name, lambda _: execution.backend.score(before.prompt(), checked, execution.priority))

    def fork(self, count: int) -> list[State]:
        """Return branches: states that begin with this text and its variables, and go on by themselves.

        Their requests run at the same time, and the text that they share is computed once.

        Raises:
            ValueError: `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        return [self._branch(index) for index in range(count)]

    def join(self, branches: Sequence[State]) -> None:
        """Wait for all variables of branches. Their texts are not added: read them and add the wanted parts.

        Raises:
            VariableError: a variable has no value.
        """
        for branch in branches:
            branch._wait()

    def answer(self, name: str) -> Answer:
        """Return the text of a variable with why it ended, its tokens, and its scores; waits for it.

        Raises:
            KeyError: this state has no such variable.
            VariableError: the variable has no value.
        """
        return self.variable(name).answer()

    def __getitem__(self, name: str) -> str:
        """Return the text of a variable; waits for it. Raises what `answer` raises."""
        return self.answer(name).text

    def __contains__(self, name: str) -> bool:
        """Return whether this state has such a variable, settled or not."""
        return name in self._variables

    def variable(self, name: str) -> Variable:
        """Return a variable, which may not be settled yet.

        Raises:
            KeyError: this state has no such variable.
        """
        found = self._variables.get(name)
        if found is None:
            raise KeyError(f"name must be a variable of this state ({', '.join(self._variables)}), got {name!r}")
        return found

    def _branch(self, index: int) -> State:
        branch = State(self._execution)
        branch._path = f"{self._path}.{index}" if self._path else str(index)
        branch._text = self._text.copy()
        branch._variables = dict(self._variables)
        return branch

    def _wait(self) -> None:
        for variable in self._variables.values():
            variable.answer()

    def _compute(self, name: str, ask: Ask) -> None:
        if not _checked("name", name):
            raise ValueError("name must not be empty, got ''")
        if name in self._variables:
            raise ValueError(f"name must be new in this state, got {name!r} again")
        variable = Variable(name, place=f" of branch {self._path}" if self._path else "")
        previous = self._text.last
        self._variables[name] = variable
        self._text.add(variable)
        self._execution.compute(variable, previous, ask)


def _checked(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {value!r:.100}")
    return value
