"""Give the branches of a snapshot their text, in the detokenizer process."""

from __future__ import annotations

import dataclasses

import msgspec

from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import ids_of

_MAX_CHARS = 240


def with_text(tokenizer: Tokenizer, snapshot: wire.Snapshot) -> wire.Snapshot:
    """Return a snapshot whose branches have the text of their first tokens, and no token ids."""
    tree = snapshot.view.tree
    if tree is None or not any(branch.tokens for branch in tree.branches):
        return snapshot
    branches = tuple(
        dataclasses.replace(
            branch, tokens=b"", text=tokenizer.decode(ids_of(branch.tokens), skip_special_tokens=False)[:_MAX_CHARS]
        )
        for branch in tree.branches
    )
    view = dataclasses.replace(snapshot.view, tree=dataclasses.replace(tree, branches=branches))
    return msgspec.structs.replace(snapshot, view=view)
