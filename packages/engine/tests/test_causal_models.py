"""Each causal class of `transformers`: through its attention interface, over a cache in pages, or refused and why."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families.case import randomise
from families.causal import CAUSAL, config_of
from pagewood.engine.models.families.registry import FAMILIES
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.transformers.host_device import HostDevice
from pagewood.engine.runner.transformers.load import FoundModel, load
from pagewood.engine.runner.transformers.model import TransformersModel
from pagewood.engine.runner.transformers.pages import PagedAttention
from pagewood.engine.runner.transformers.shape import FoundShape
from pagewood.kvpool.storage import KVStorage
from row_driver import RowDriver

PAGE_SIZE = 4
TEXT = [(index * 37 + 5) % 97 or 1 for index in range(70)]
"""Without token 0, which pads."""


def test_the_table_has_every_class_and_no_other() -> None:
    found = {
        name
        for one in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in (one if isinstance(one, tuple) else (one,))
    }
    assert found - set(FAMILIES) == set(CAUSAL) - set(FAMILIES)
    assert set(CAUSAL) <= found


def logits_in_parts(model: TransformersModel, shape: FoundShape) -> Tensor:
    """The logits of the text in chunks of 7, each beside a chunk of its reverse."""
    storage = KVStorage(shape.layout(page_size=PAGE_SIZE, dtype="float32"), 61)
    device, attention = HostDevice(free_bytes=1 << 30), PagedAttention(storage)
    runner = CUDARunner(model, storage, None, device, max_rows=2, max_length=80, attention=attention)
    driver, parts = RowDriver(runner, num_pages=60, page_size=PAGE_SIZE), list[Tensor]()
    text, other = driver.add(TEXT), driver.add(TEXT[::-1])
    while text.num_computed < len(TEXT):
        parts.append(runner.forward(driver.batch([(other, 7), (text, 7)]))[7:])
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_a_class_is_computed_as_the_table_says(name: str, tmp_path: Path) -> None:
    expected, config = CAUSAL[name], config_of(name)
    config.save_pretrained(tmp_path)
    reason = ""
    try:
        assert FoundModel.of(tmp_path).num_parameters < 10_000_000
        torch.manual_seed(7)
        reference: Any = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
        randomise(reference)
        reference.save_pretrained(tmp_path)
        model, shape = load(FoundModel.of(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    except ValueError as error:
        reason = str(error)
    assert ("refused" if reason else "cache" if model.attends_by_itself else "interface") == expected.way, reason
    if reason:
        assert expected.reason in reason
        assert name in reason or "config.json" in reason
    else:
        with torch.inference_mode():
            logits = reference(torch.tensor([TEXT]), use_cache=False).logits[0]
        torch.testing.assert_close(logits_in_parts(model, shape), logits, atol=1e-4, rtol=0)
