"""The names, order and defaults of FlashInfer's arguments: installed, declared, and in the stand-in."""

# pyright: basic
# FlashInfer has no types.

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest

from pagewood.engine.runner.cuda.kernels.flashinfer_api import DecodeWrapper, FlashInfer, LatentWrapper, PrefillWrapper
from stand_ins import flashinfer_torch

FUNCTIONS = [name for name in vars(FlashInfer) if not name.startswith("_")]
WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
    "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper,
    "BatchMLAPagedAttentionWrapper": LatentWrapper,
}


@pytest.fixture(scope="module")
def flashinfer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("flashinfer")
        except ImportError as error:
            pytest.skip(f"flashinfer-python is not installed: {error}")


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


def assert_accepts(function: Any, declared: Any) -> None:
    """Check that every call that the declaration allows has the same meaning for `function`."""
    offered = parameters(function)
    names = list(offered)
    for place, (name, wanted) in enumerate(parameters(declared).items()):
        assert name in offered, f"{function.__qualname__} has no {name}, only {names}"
        if wanted.kind is not inspect.Parameter.KEYWORD_ONLY and wanted.default is inspect.Parameter.empty:
            assert names[place] == name
        if wanted.default is not inspect.Parameter.empty and name != "q_data_type":  # by name there, by dtype here
            assert offered[name].default == wanted.default, name


def decode_plan(flashinfer: Any) -> Any:
    """Return the method that `plan` of the decode wrapper calls, in which the options have names."""
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper._plan_impl


@pytest.mark.parametrize("name", FUNCTIONS)
def test_installed_functions_accept_what_is_declared(flashinfer: Any, name: str) -> None:
    assert_accepts(getattr(flashinfer, name), getattr(FlashInfer, name))


def test_installed_wrappers_accept_what_is_declared(flashinfer: Any) -> None:
    assert_accepts(decode_plan(flashinfer), DecodeWrapper.plan)
    assert_accepts(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan, PrefillWrapper.plan)
    assert_accepts(flashinfer.BatchMLAPagedAttentionWrapper.plan, LatentWrapper.plan)
    for name, wrapper in WRAPPERS.items():
        assert_accepts(getattr(flashinfer, name).run, wrapper.run)


def test_installed_wrappers_use_the_memory_given_for_their_plans(flashinfer: Any) -> None:
    for name in WRAPPERS:
        source = inspect.getsource(getattr(flashinfer, name))
        assert "self._pin_memory_int_workspace_buffer = torch.empty(" in source
        assert "                self._pin_memory_int_workspace_buffer,\n" in source  # an argument that plan passes on


def test_installed_wrappers_read_the_mask_that_is_set_after_a_plan(flashinfer: Any) -> None:
    source = inspect.getsource(flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    assert "if self._custom_mask_buf is not None" in source.split("    def run(")[-1]
    assert "                    self._custom_mask_buf,\n                    self._mask_indptr_buf,\n" in source


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stand_in_accepts_what_is_declared(name: str) -> None:
    assert_accepts(getattr(flashinfer_torch, name), getattr(FlashInfer, name))
    if name in WRAPPERS:
        assert_accepts(getattr(flashinfer_torch, name).plan, WRAPPERS[name].plan)
        assert_accepts(getattr(flashinfer_torch, name).run, WRAPPERS[name].run)
