"""Tools and calls: as objects of the OpenAI API, and as the text that the chat template makes of them."""

import json
from dataclasses import dataclass

Message = dict[str, object]
"""A message of the OpenAI chat API; the arguments of its calls are mappings, as chat templates expect them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the user offers.

    `parameters` and `optional` map names to kinds: a JSON type, or the values of an enum joined with "|".
    """

    name: str
    parameters: dict[str, str]
    optional: dict[str, str]
    description: str

    def line(self) -> str:
        """Return the line of the system turn: what the tool is for comes before the name that a call copies."""
        shown = [f"{name}: {kind}" for name, kind in self.parameters.items()]
        shown += [f"{name}?: {kind}" for name, kind in self.optional.items()]
        described = f"{self.description.rstrip('.')}: " if self.description else ""
        return f"{described}{self.name}({', '.join(shown)})"

    def declaration(self) -> Message:
        """Return the object of the list `tools` of a request."""
        properties = {name: _schema(kind) for name, kind in {**self.parameters, **self.optional}.items()}
        parameters = {"type": "object", "properties": properties, "required": [*self.parameters]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that the model writes."""

    name: str
    arguments: dict[str, str]

    def text(self) -> str:
        call = {"name": self.name, "arguments": self.arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def system_text(system: str | None, tools: list[Tool]) -> str | None:
    """Return the text of the system turn, or None if there is none."""
    listed = "\n".join(["Tools:", *(tool.line() for tool in tools)]) if tools else None
    return "\n\n".join(part for part in (system and system.strip(), listed) if part) or None


def results_text(results: list[str]) -> str:
    """Return the text of the user turn that holds the results of the calls of one answer."""
    return "\n".join(f"<tool_response>\n{result.strip()}\n</tool_response>" for result in results)


def _schema(kind: str) -> Message:
    return {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}
