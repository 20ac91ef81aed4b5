# pyright: basic
"""Lets the real engines be imported without a GPU: what only their kernels need is replaced by empty modules."""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

CUDA_ONLY = ("flashinfer", "modelscope", "quack", "sgl_kernel", "torchvision")


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else cls

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__


class _EmptyModule(types.ModuleType):
    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in CUDA_ONLY:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if importlib.util.find_spec("sglang") or importlib.util.find_spec("minisgl"):
    from transformers.utils import import_utils

    for _name in [name for name in dir(import_utils) if name.startswith("is_") and name.endswith("_available")]:
        with contextlib.suppress(Exception):  # transformers must decide what is installed before they exist
            getattr(import_utils, _name)()
    sys.meta_path.append(_Finder())  # last: a module that is installed is used
