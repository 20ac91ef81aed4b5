"""StarCoder 2."""

from __future__ import annotations

from families.case import Case

_ENDS = {"eos_token_id": 0, "bos_token_id": 0}
CASES = {
    "starcoder2": Case(kind="Starcoder2", extra=_ENDS),
    "starcoder2-window": Case(
        kind="Starcoder2", extra={**_ENDS, "sliding_window": 9, "use_bias": False, "tie_word_embeddings": False}
    ),
}
