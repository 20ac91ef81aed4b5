"""Checks of models that see images, on the whole engine, with their tower on the device."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from gpu_checks.host import TOLERANCE, Failed, Host, Skipped
from pagewood.engine.assembly.cuda.build import build_on

_DTYPE = "float16"
_LARGEST = 8.0
"""Log probabilities of these models are about as large; float16 in plain torch changes them by 0.04."""
_WAYS: tuple[dict[str, Any], ...] = ({}, {"cuda_graph": False, "chunked_prefill_size": 13}, {"batch_invariant": True})


def check_images(host: Host) -> str:
    """Random models with every kind of tower have the log probabilities of `transformers`, beside each other and after
    hits, whole and in chunks."""
    for package in ("transformers", "PIL"):
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"the package {package} is not installed")
    from pictured import KINDS, pictured, pictures
    from pictured_engine import Driven, check, conversation, submit

    found: list[str] = []
    num_answers = 0
    build = partial(build_on, host.device, host.flashinfer)
    for kind in KINDS:
        model = pictured(kind, head_dim=64)
        shown = {str(count): pictures(count, seed=count) for count in range(4)}
        asked = {name: conversation(model, own) for name, own in shown.items()}
        for options in _WAYS:
            try:
                own = Driven(model, build=build, device="cuda", dtype=_DTYPE, page_size=16, **options)
                for _ in range(2):  # the second time from the cache
                    answers = own.answers([submit(name, *one) for name, one in asked.items()])
                    for name, deltas in answers.items():
                        check(model, asked[name][0], shown[name], deltas, atol=2 * TOLERANCE[_DTYPE] * _LARGEST)
                        num_answers += 1
                own.engine.close()
            except Exception as error:  # the remaining kinds still run
                found.append(f"{kind} with {options}: {type(error).__name__}: {error}")
                print(found[-1], flush=True)
    if found:
        raise Failed(f"{len(found)} of {len(KINDS) * len(_WAYS)}: " + "; ".join(one[:300] for one in found))
    return f"{len(KINDS)} models, {num_answers} answers"
