"""The detokenizer process: `python -m pagewood.server.processes.detokenizer_process`, started by the server."""

from __future__ import annotations

from pagewood.engine.text import Tokenizer
from pagewood.server.messages.links import ZmqReceiver, ZmqSender
from pagewood.server.processes.child import ParentWatch, Settings, errors_in_one_line, run_child
from pagewood.server.stages.detokenizing import run_detokenizer


def serve(settings: Settings, inbox: ZmqReceiver, outbox: ZmqSender, stopped: ParentWatch) -> None:
    """Turn tokens into text until the parent ends it."""
    with errors_in_one_line(settings):
        tokenizer = Tokenizer.from_folder(settings.model_folder)
    run_detokenizer(tokenizer, inbox, outbox, stopped=stopped, incarnation=settings.incarnation)


if __name__ == "__main__":
    run_child(serve)
