"""The tokenizer process: `python -m pagewood.server.processes.tokenizer_process`, started by the server."""

from __future__ import annotations

import os
from pathlib import Path

from pagewood.engine.images.prompts import image_prompts
from pagewood.engine.text import Tokenizer
from pagewood.server.messages.links import ZmqReceiver, ZmqSender, address
from pagewood.server.processes.child import ParentWatch, Settings, errors_in_one_line, run_child
from pagewood.server.processes.stuck import end_when_stuck
from pagewood.server.stages.pictures import Pictures
from pagewood.server.stages.tokenizing import run_tokenizer


def serve(settings: Settings, inbox: ZmqReceiver, outbox: ZmqSender, stopped: ParentWatch) -> None:
    """Turn prompts into ids until the parent ends it."""
    with errors_in_one_line(settings):
        tokenizer = Tokenizer.from_folder(settings.model_folder)
        prompts = image_prompts(settings.model_folder, tokenizer)
    end_when_stuck()
    folder = Path(settings.folder)
    run_tokenizer(
        tokenizer,
        inbox,
        outbox,
        stopped=stopped,
        route=lambda stage: outbox.reconnect(address(folder, stage)),
        pictures=None if prompts is None else Pictures(prompts=prompts, limits=settings.images),
        block_size=settings.engine.page_size if settings.is_routed else None,
    )


if __name__ == "__main__":
    run_child(serve)
    # A thread may still be tokenizing a long prompt. The end of the interpreter would wait for it, or abort.
    os._exit(0)
