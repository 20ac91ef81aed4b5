"""The tokenizer stage: prompts become ids, and a request that cannot become one is refused, in its order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import Abort, Command, Refusal, Refuse, SetPriority, Submit
from pagewood.engine.text import ChatTemplateError, Tokenizer
from pagewood.server import wire
from pagewood.server.links import Receiver, Sender


def run_tokenizer(tokenizer: Tokenizer, inbox: Receiver, outbox: Sender, *, stopped: Callable[[], bool]) -> None:
    """Serve until `stopped`."""
    while not stopped():
        for message in wire.read(wire.to_tokenizer, inbox.receive(timeout_s=None)):
            outbox.send(wire.encode(wire.to_engine(command(tokenizer, message))))


def command(tokenizer: Tokenizer, message: wire.ToTokenizer) -> Command:
    """Return what the engine is told because of `message`; never raises, a request that fails becomes a `Refuse`."""
    match message:
        case wire.Cancel():
            return Abort(request_id=message.request_id)
        case wire.Prioritize():
            return SetPriority(request_id=message.request_id, priority=message.priority)
        case wire.Generate():
            try:
                return _submit(tokenizer, message)
            except ChatTemplateError as error:
                refusal = Refusal(message=str(error), param="prompt", code="invalid_messages")
            except Exception as error:  # whatever a tokenizer makes of a text, only its own request may fail
                refusal = Refusal(
                    message=f"the prompt cannot be tokenized: {error}", param="prompt", code="invalid_prompt"
                )
            return Refuse(request_id=message.request_id, refusal=refusal)


def _submit(tokenizer: Tokenizer, message: wire.Generate) -> Command:
    tokens = _tokens(tokenizer, message.prompt)
    if not len(tokens):
        refusal = Refusal(message="the prompt must hold at least one token, got 0", param="prompt", code="empty_prompt")
        return Refuse(request_id=message.request_id, refusal=refusal)
    options = wire.TextOptions(stop=message.stop, prefix=_echo(tokenizer, message, tokens))
    return Submit(
        request_id=message.request_id,
        tokens=tokens.astype("<i4", copy=False).tobytes(),
        sampling=message.sampling,
        priority=message.priority,
        carry=wire.encode(options),
    )


def _tokens(tokenizer: Tokenizer, prompt: wire.Prompt) -> NDArray[np.int32]:
    """Return the ids of a prompt, [num_tokens] int32."""
    match prompt:
        case wire.ChatPrompt():
            return tokenizer.encode_chat(prompt.messages)
        case wire.TextPrompt():
            return tokenizer.encode(prompt.text)
        case wire.TokenPrompt():
            return np.frombuffer(prompt.tokens, dtype="<i4")


def _echo(tokenizer: Tokenizer, message: wire.Generate, tokens: NDArray[np.int32]) -> str:
    """Return the text that goes before the answer: the prompt as it was sent, or what its ids say."""
    match message:
        case wire.Generate(echo=False):
            return ""
        case wire.Generate(prompt=wire.TextPrompt(text=text)):
            return text
        case _:
            return tokenizer.decode(tokens)
