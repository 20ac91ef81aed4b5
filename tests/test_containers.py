"""The Dockerfiles, the compose file and the chart of deploy/ hold to their schemas and to what Pagewood takes."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewood.server.cli.options.engine import engine_config
from pagewood.server.cli.options.page import Page
from pagewood.server.cli.serve import add_options, configs_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "pagewood"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
KUBERNETES = "1.33"
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "model": "/models/mine",
        "args": ["--max-length=2048", "--weights=int8"],
        "modelsClaim": "models",
        "cacheClaim": "cache",
        "batches": {"enabled": True, "storageClassName": "fast"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    },
}


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments, each in one line."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def check_arguments(words: list[str], folder: Path) -> None:
    """Check that `pagewood serve` takes these options."""
    import argparse

    parser = argparse.ArgumentParser()
    add_options(Page(parser=parser))
    assert words[0] == "serve"
    options = parser.parse_args(words[1:])
    options.path = None
    if options.api_key_file is not None:
        options.api_key_file = folder / "keys"
    configs_of(options, [engine_config(options, model=None)], ["model"])


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_a_dockerfile(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (linter := shutil.which("hadolint")) is not None:
        found = subprocess.run([linter, str(file)], capture_output=True, text=True)
        assert (found.returncode, found.stdout) == (0, "")
    parts = instructions(file)
    named = {name for name, _ in parts}
    assert {"HEALTHCHECK", "USER", "EXPOSE", "ENTRYPOINT"} <= named
    assert dict(parts)["USER"] == "10001:10001"
    monkeypatch.setenv("PAGEWOOD_API_KEY", "x" * 16)
    command = yaml.safe_load(dict(parts)["CMD"])
    check_arguments([word for word in command if "cuda" not in word and word != "--device"], tmp_path)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [words.split()[0] for name, words in parts if name == "COPY" and "--from" not in words]
    sources += re.findall(r"type=bind,source=([^,]+)", file.read_text())
    assert {f"!{source}" for source in sources} <= {*ignored}
    assert all((ROOT / source).exists() for source in sources)


def test_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DEPLOY / "compose" / "compose.yaml"
    if (checker := shutil.which("check-jsonschema")) is not None:
        subprocess.run([checker, "--builtin-schema", "vendor.compose-spec", str(file)], check=True)
    services = yaml.safe_load(file.read_text())["services"]
    monkeypatch.setenv("PAGEWOOD_API_KEY", "x" * 16)
    check_arguments(services["pagewood"]["command"], tmp_path)
    for service in services.values():
        for volume in service["volumes"]:
            if volume.startswith("."):
                assert (file.parent / volume.split(":")[0]).is_file(), volume
    device = services["pagewood"]["build"]["dockerfile"].replace("${PAGEWOOD_DEVICE:-cpu}", "cpu")
    assert (ROOT / device) in DOCKERFILES
    scraped = yaml.safe_load((file.parent / "prometheus.yml").read_text())["scrape_configs"][0]
    [target] = scraped["static_configs"][0]["targets"]
    assert target == "pagewood:8000"
    assert "pagewood" in services["pagewood"]["command"]  # Prometheus comes by this host name


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart(values: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("helm_python")
    charts: Any = importlib.import_module("helm_python.chart")
    assert charts.lint(str(CHART), values, strict=True)["errors"] == []
    rendered = charts.Chart.load(str(CHART)).render(values, name="mine", namespace="here")
    documents = [one for text in rendered.values() for one in yaml.safe_load_all(text) if one]
    kinds = ["Deployment", *(["PersistentVolumeClaim"] if "batches" in values else []), "Service"]
    assert sorted(one["kind"] for one in documents) == kinds
    if (checker := shutil.which("kubernetes-validate")) is not None:
        file = tmp_path / "rendered.yaml"
        file.write_text(yaml.safe_dump_all(documents))
        subprocess.run([checker, "--strict", "-k", KUBERNETES, str(file)], check=True)
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    check_arguments([word for word in container["args"] if word != values.get("model")], tmp_path)
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_a_store_of_batches_has_one_server() -> None:
    pytest.importorskip("helm_python")
    charts: Any = importlib.import_module("helm_python.chart")
    with pytest.raises(Exception, match="replicas"):
        charts.Chart.load(str(CHART)).render({"replicas": 2, "batches": {"enabled": True}}, name="m", namespace="n")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it installs torch, and compiles all kernels
def test_the_steps_of_the_image_make_a_server(tmp_path: Path) -> None:
    """The steps with pip of the image for CPUs, in a virtual environment in place of its folders, and its command."""
    made = tmp_path / "image"
    venv.create(made, with_pip=True, symlinks=True)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PAGEWOOD"))},
        "PATH": f"{made}/bin:{os.environ['PATH']}",
        "PAGEWOOD_API_KEY": "x" * 16,
        "PAGEWOOD_CACHE": str(tmp_path / "cache"),
    }
    context = tmp_path / "src"
    ignore = shutil.ignore_patterns("tests", "benchmarks", "examples", "__pycache__", ".*")
    shutil.copytree(ROOT / "packages", context / "packages", ignore=ignore)
    shutil.copy(ROOT / "constraints.txt", context)
    file = DEPLOY / "docker" / "cpu.Dockerfile"
    for name, words in instructions(file):
        if name != "RUN" or "pip" not in words:
            continue
        step = re.sub(r"--mount=\S+", "", words).replace('--extra-index-url "${TORCH_INDEX}"', "")
        for inside, here in (("/src/", f"{context}/"), ("/build/constraints.txt", f"{context}/constraints.txt")):
            step = step.replace(inside, here)
        step = step.replace("/build/wheels", str(tmp_path / "wheels")).replace(" /wheels ", f" {tmp_path}/wheels ")
        subprocess.run(step, shell=True, check=True, env=env, cwd=tmp_path)
    command = yaml.safe_load(dict(instructions(file))["CMD"])
    words = [*yaml.safe_load(dict(instructions(file))["ENTRYPOINT"]), *command, "--port", "0"]
    with subprocess.Popen(words, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any(line.startswith("Pagewood serves pagewood-demo") for line in server.stdout)
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0
    assert sys.prefix not in subprocess.check_output(["pagewood", "doctor"], env=env, cwd=tmp_path, text=True)
