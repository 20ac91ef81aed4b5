"""Functions that numba compiles once, for one signature, and caches on disk."""

# pyright: basic
# numba has no types, and its cache can only be changed by subclassing.

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numba
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserWideCacheLocator
from numba.core.runtime.nrt import rtsys
from numba.misc.appdirs import AppDirs

from pagewood.engine.core.messages.sampling_table import SamplingColumn

_log = logging.getLogger(__name__)
_PATIENCE_S = 120.0
"""How long a process waits for another one that compiles the same, which may be stopped."""
_COMPILED = Path(__file__).parents[1]
"""The folder of all compiled functions."""

REASSOCIATE = frozenset({"contract", "reassoc", "nsz", "arcp"})
"""Lets a sum become a vector of sums. Infinities and NaNs keep their meaning."""

# Symbols are named by numbers that numba gives to the functions of a process. Code that two processes have compiled may
# be loaded into a third, where equal names would lead to the wrong code. So no two processes count alike.
FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(6), "little"))  # not ours


class _Locator(UserWideCacheLocator):
    """Places compiled code in the user's cache folder, because an installation may be read-only or shared.

    Code is valid until a source file in `compiled` or in the function's folder changes, because kernels call functions
    of other files, or until the columns of the sampling parameters do, which are part of the code.
    """

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        super().__init__(py_func, py_file)
        sources = hashlib.sha256()
        for path in sorted({*_COMPILED.rglob("*.py"), *Path(py_file).parent.glob("*.py")}):
            sources.update(path.read_bytes())
        sources.update(repr(list(SamplingColumn)).encode())
        self._stamp = sources.hexdigest()
        root = Path(AppDirs(appname="pagewood", appauthor=False).user_cache_dir)
        self._cache_path = str(root / "kernels" / self._stamp[:16])

    def get_source_stamp(self) -> str:
        return self._stamp

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        """Return the place of a function's code, whether it can be written or not: code may be there already."""
        return cls(py_func, py_file)


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes: ClassVar = [_Locator]


class _Cache(FunctionCache):
    """Identifies a variant by its number; numba would hash its closure, which differs in every process."""

    _impl_class = _CacheImpl

    def __init__(self, function: Callable[..., Any], variant: int) -> None:
        super().__init__(function)
        self._variant = variant
        self.name = function.__name__
        self.error: OSError | None = None  # written by: save_overload
        """Why the code could not be stored."""
        self.patience_s = 0.0  # written by: Kernel._compile
        self._reserved: int | None = None  # written by: _reserve, release

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load compiled code, or reserve the function so that other processes wait until this one has compiled it.

        numba's own version first sets up all that it can compile, which takes 0.2 s.

        Raises:
            BlockingIOError: another process compiles it, and there is no patience.
        """
        rtsys.initialize(target_context)  # the memory management that compiled code calls
        found = self._load(sig, target_context)
        if found is None and self._reserve():
            found = self._load(sig, target_context)  # another process may have stored it meanwhile
        return found

    def _reserve(self) -> bool:
        """Return whether no other process compiles a variant of this function until `release`."""
        end_s = time.monotonic() + self.patience_s
        try:
            Path(self.cache_path).mkdir(parents=True, exist_ok=True)
            self._reserved = os.open(Path(self.cache_path, f"{self._impl.filename_base}.lock"), os.O_RDWR | os.O_CREAT)
            while True:
                try:
                    fcntl.flock(self._reserved, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    if time.monotonic() >= end_s:
                        break
                    time.sleep(0.02)
        except OSError:  # a folder that cannot be written: each process compiles for itself
            return False
        if not self.patience_s:
            raise BlockingIOError(f"another process compiles {self.name}")
        return False

    def release(self) -> None:
        """Let other processes go on. A process that ends does so, too."""
        if self._reserved is not None:
            with suppress(OSError):
                fcntl.flock(self._reserved, fcntl.LOCK_UN)  # a child may have a copy of it
            os.close(self._reserved)
            self._reserved = None

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._load_overload(sig, target_context)
        except OSError:  # `save_overload` will find out too
            return None
        except Exception as error:  # damaged code is noticed in many ways
            _log.warning(
                "%s is compiled again, because its code in %s is damaged: %s", self.name, self.cache_path, error
            )
            with suppress(OSError):
                for path in Path(self.cache_path).glob(f"{self._impl.filename_base}.*"):
                    path.unlink()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store compiled code. If that fails, the next start compiles it again."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self.error = error
            with suppress(OSError):  # the index may be written, and then must not refer to older code of that name
                name = self._cache_file._load_index().get(self._index_key(sig, data.codegen))  # not ours
                if name is not None:
                    Path(self.cache_path, name).unlink()

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._variant


class Kernel:
    """A function that is compiled for one signature. Invariant: it is never compiled for another."""

    __slots__ = ("_cache", "_dispatcher", "_is_compiled", "_lock", "_signature", "_variant", "name")

    def __init__(self, function: Callable[..., Any], signature: str, *, variant: int, is_long: bool) -> None:
        self.name = function.__name__
        self._variant = variant
        self._signature = signature
        decorate = numba.njit(nogil=is_long, fastmath=set(REASSOCIATE), error_model="numpy")
        self._dispatcher: Any = decorate(function)
        self._cache: _Cache | None = None  # written by: _compile
        self._is_compiled = False  # written by: _compile
        self._lock = Lock()

    def compile(self, *, waits: bool = True) -> bool:
        """Load the compiled code from disk, or compile it and store it there; a second call does nothing.

        Args:
            waits: whether to wait while another process compiles it, and load its code.

        Returns:
            Whether it is compiled.
        """
        with self._lock:  # ranks may be threads
            return self._is_compiled or self._compile(_PATIENCE_S if waits else 0.0)

    def _compile(self, patience_s: float) -> bool:
        if self._cache is None:
            with suppress(RuntimeError):  # NUMBA_CACHE_LOCATOR_CLASSES names places that cannot be used
                self._cache = _Cache(self._dispatcher.py_func, self._variant)
                self._dispatcher._cache = self._cache  # not ours
        cache = self._cache
        if cache is not None:
            cache.patience_s = patience_s
        try:
            self._dispatcher.compile(self._signature)
        except BlockingIOError:
            return False
        finally:
            if cache is not None:
                cache.release()
        self._dispatcher.disable_compile()
        self._is_compiled = True
        return True

    @property
    def loaded(self) -> bool:
        """Whether the compiled code came from disk."""
        return bool(self._dispatcher.stats.cache_hits)

    @property
    def not_kept(self) -> tuple[str, OSError] | None:
        """The folder in which the compiled code could not be stored, and why; None: it is there."""
        return None if self._cache is None or self._cache.error is None else (self._cache.cache_path, self._cache.error)

    @property
    def address(self) -> int:
        """Where the compiled code begins, as a C function with the types of the signature; valid as long as this is."""
        (compiled,) = self._dispatcher.overloads.values()
        return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)

    def __call__(self, *args: Any) -> Any:
        """Run it.

        Raises:
            TypeError: the arguments do not have the types of the signature.
            RuntimeError: `compile` has not been called.
        """
        if not self._is_compiled:
            raise RuntimeError(f"{self.name} must be compiled before it is called")
        return self._dispatcher(*args)


def kernel(signature: str, *, variant: int = 0, is_long: bool = False) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a `Kernel`; nothing is compiled before `Kernel.compile`.

    Args:
        signature: the types of its arguments.
        variant: distinguishes functions with the same source and different closures.
        is_long: whether it runs without the interpreter's lock. A call of a few microseconds should keep it: another
            thread that takes the lock gives it back when it waits for something, or after 5 ms.
    """
    return lambda function: Kernel(function, signature, variant=variant, is_long=is_long)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from kernels, as a part of them."""
    return numba.njit(nogil=True, fastmath=set(REASSOCIATE), error_model="numpy", forceinline=True)(function)


def exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from kernels, whose sums keep their written order."""
    return numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy", forceinline=True)(function)


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `exact`, but compiled once in each kernel, however often it is called there; for long functions."""
    return numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")(function)


def strict(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from kernels, whose arithmetic is exactly as written: nothing fused, nothing reordered.

    numba gives the flags of a function to all its instructions, those of intrinsics included, and a function without
    flags takes its caller's. So intrinsics whose result must be the same bits in two places are called from functions
    like this one.
    """
    return numba.njit(nogil=True, fastmath=False, error_model="numpy", forceinline=True)(function)
