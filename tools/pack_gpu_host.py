"""Packs what a GPU host without a network needs to run Pagewood: `python tools/pack_gpu_host.py HOST_PACKAGES OUT`.

HOST_PACKAGES is a file with the output of `python -m pip list --format=freeze` on the host (names without versions are
enough). OUT becomes a folder with our wheels, the wheels that they require and the host lacks, FlashInfer's folder as a
tar.xz (about 600 MB of sources), the GPU check and the benchmark. On the host, one command unpacks it:

    python3 OUT/unpack.py SITE && PYTHONPATH=SITE python3 OUT/gpu_check.py

FlashInfer compiles its kernels on the host, which then needs nvcc, ninja and several minutes. With `--compile-for 9.0a`
the kernels of the check, of the benchmark and of `--models` are compiled here instead, with a CUDA toolkit from PyPI
(half an hour on two cores). This also shows that no source is missing in the pack. torch and FlashInfer must be
importable here.
"""

from __future__ import annotations

import argparse
import email
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("radixcache", "kvpool", "schedpolicy", "engine", "server")
SHIPPED = (
    "tools/gpu_host/unpack.py",
    "tools/gpu_check.py",
    "tools/gpu_checks",
    "packages/engine/tests/support/stand_ins",
    "packages/engine/tests/support/scenarios",
    "packages/engine/tests/support/families",
    "packages/engine/tests/support/encoded_runner.py",
    "packages/engine/tests/support/thread_ranks.py",
    "packages/engine/tests/support/row_driver.py",
    "packages/engine/tests/support/pictured.py",
    "packages/engine/tests/support/pictured_engine.py",
    "packages/engine/tests/support/scratch.py",
    "benchmarks/gpu.py",
    "benchmarks/on_gpu",
)
FLASHINFER = "flashinfer-python"
FLASHINFER_NEEDS = (
    "apache-tvm-ffi", "click", "einops", "filelock", "jinja2", "ninja", "numpy", "nvidia-ml-py", "packaging",
    "requests", "tabulate", "torch", "tqdm",
)  # fmt: skip
"""What importing it and compiling our kernels requires; its other declared requirements serve other kernels."""
MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pack; return 0 if it is small enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host_packages", type=Path, help="file with the output of pip list --format=freeze on the host")
    parser.add_argument("out", type=Path, help="the folder to create")
    parser.add_argument("--python", default="3.12", help="version of the host's Python (default: %(default)s)")
    parser.add_argument(
        "--also", nargs="*", default=["openai"], help="further packages to include (default: %(default)s)"
    )
    parser.add_argument("--limit-mib", type=float, default=60, help="maximum size, MiB (default: %(default)s)")
    parser.add_argument(
        "--compile-for", metavar="ARCH", help="compile kernels for this compute capability, such as 9.0a for an H100"
    )
    parser.add_argument(
        "--cuda", default="13.0", help="CUDA version of the host's torch, for --compile-for (default: %(default)s)"
    )
    parser.add_argument(
        "--models", nargs="*", default=[], type=Path, help="folders of models whose kernels --compile-for compiles, too"
    )
    options = parser.parse_args(arguments)
    shutil.rmtree(options.out, ignore_errors=True)
    wheels = options.out / "wheels"
    wheels.mkdir(parents=True)
    build_wheels(wheels)
    fetcher = Fetcher(host=read_host(options.host_packages.read_text()), python=options.python, wheels=wheels)
    for wheel in sorted(wheels.glob("*.whl")):
        fetcher.fetch_needs_of(wheel, extras={"cuda"})
    for name in options.also:
        fetcher.fetch(Requirement(name))
    flashinfer = next(wheels.glob("flashinfer_python-*.whl"))
    pack_wheel(flashinfer, options.out / "flashinfer.tar.xz")
    flashinfer.unlink()
    if options.compile_for:
        pack_kernels(options.out, arch=options.compile_for, cuda=options.cuda, models=options.models)
    copy_scripts(options.out)
    size = report(options.out)
    if size > options.limit_mib * MIB:
        print(f"the pack must have at most {options.limit_mib:.0f} MiB, got {size / MIB:.1f}", file=sys.stderr)
        return 1
    return 0


def copy_scripts(out: Path) -> None:
    """Copy the check, the benchmark, and what they import beside our packages, side by side into `out`."""
    for path in map(ROOT.joinpath, SHIPPED):
        if path.is_dir():
            shutil.copytree(path, out / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, out)


def build_wheels(folder: Path) -> None:
    """Build the wheels of our packages into `folder`."""
    for package in PACKAGES:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder.resolve())]
        subprocess.run(command, cwd=ROOT / "packages" / package, check=True, stdout=subprocess.DEVNULL)


def read_host(text: str) -> dict[str, Version | None]:
    """Return the packages of a host by name; the version is None if a line of `text` has only a name."""
    host: dict[str, Version | None] = {}
    for line in text.split():
        name, _, version = line.partition("==")
        host[canonicalize_name(name)] = Version(version) if version else None
    return host


class Fetcher:
    """Downloads wheels for another host. Invariant: what `host` has, or was downloaded, is not downloaded again."""

    def __init__(self, *, host: Mapping[str, Version | None], python: str, wheels: Path) -> None:
        self._host = host
        self._python = python
        self._wheels = wheels
        self._fetched = {canonicalize_name(f"pagewood-{package}") for package in PACKAGES}
        self._pins = {
            canonicalize_name(name): version
            for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().split())
            if version
        }

    def fetch(self, need: Requirement) -> None:
        """Download the wheel of `need` and of its requirements, except what the host has."""
        name = canonicalize_name(need.name)
        if name in self._fetched or self._has(need):
            return
        self._fetched.add(name)
        pin = self._pins.get(name)
        wanted = f"{name}=={pin}" if pin and need.specifier.contains(pin) else f"{name}{need.specifier}"
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(self._command(wanted, folder), check=True)
            wheel = shutil.move(next(Path(folder).glob("*.whl")), self._wheels)
        print(f"fetched {Path(wheel).name}", flush=True)
        self.fetch_needs_of(Path(wheel), extras=need.extras)

    def fetch_needs_of(self, wheel: Path, *, extras: set[str]) -> None:
        """Download the requirements of a wheel."""
        for need in self._needs(wheel):
            if need.marker is None or any(need.marker.evaluate(self._environment(e)) for e in ("", *extras)):
                self.fetch(need)

    def _needs(self, wheel: Path) -> Iterator[Requirement]:
        with zipfile.ZipFile(wheel) as archive:
            path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(path))
        if canonicalize_name(metadata["Name"]) == FLASHINFER:
            yield from map(Requirement, FLASHINFER_NEEDS)
        else:
            yield from map(Requirement, metadata.get_all("Requires-Dist", []))

    def _has(self, need: Requirement) -> bool:
        name = canonicalize_name(need.name)
        if name not in self._host:
            return False
        version = self._host[name]
        return version is None or need.specifier.contains(version, prereleases=True)

    def _environment(self, extra: str) -> dict[str, str]:
        return {
            "python_version": self._python, "python_full_version": f"{self._python}.0", "sys_platform": "linux",
            "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix", "extra": extra,
            "implementation_name": "cpython", "platform_python_implementation": "CPython",
        }  # fmt: skip

    def _command(self, wanted: str, folder: str) -> list[str]:
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
        platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
        return [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--dest", folder,
            "--python-version", self._python, "--implementation", "cp",
            *(argument for platform in platforms for argument in ("--platform", platform)), wanted,
        ]  # fmt: skip


def pack_wheel(wheel: Path, target: Path) -> None:
    """Write the files of a wheel to a tar.xz."""
    with zipfile.ZipFile(wheel) as archive:
        pack(((name, archive.read(name)) for name in sorted(archive.namelist())), target)


def pack_kernels(out: Path, *, arch: str, cuda: str, models: Sequence[Path]) -> None:
    """Compile kernels from the sources in the pack, and add them to it."""
    with tempfile.TemporaryDirectory() as name:
        site = Path(name)
        with tarfile.open(out / "flashinfer.tar.xz") as packed:
            packed.extractall(site, filter="data")
        command = [sys.executable, str(ROOT / "tools" / "gpu_host" / "kernels.py"), "--arch", arch, "--site", str(site)]
        command += ["--cuda", cuda, "--models", *map(str, models)]
        subprocess.run(command, check=True)
        libraries = sorted((site / "flashinfer" / "data" / "aot").rglob("*.so"))
        files = ((str(path.relative_to(site)), path.read_bytes()) for path in libraries)
        pack(files, out / f"kernels-{arch}.tar.xz")


def pack(files: Iterable[tuple[str, bytes]], target: Path) -> None:
    """Write files, given by name and content, to a tar.xz; without times, so that equal files give equal archives."""
    with tarfile.open(target, "w:xz", preset=6) as packed:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))


def report(folder: Path) -> int:
    """Print the files of a pack by size; return the total in bytes."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    for path in files:
        print(f"{path.stat().st_size / MIB:8.2f} MiB  {path.relative_to(folder)}")
    size = sum(path.stat().st_size for path in files)
    print(f"{size / MIB:8.2f} MiB  {folder}")
    return size


if __name__ == "__main__":
    raise SystemExit(main())
