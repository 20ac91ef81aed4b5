"""Run the unit tests of SGLang or vLLM, from a checkout of theirs, against their own class and against ours.

    python tools/peer_tests.py sglang CHECKOUT/test/registered/unit/mem_cache/test_radix_cache_unit.py
    python tools/peer_tests.py vllm CHECKOUT

Prints the tests that pass with their class and not with ours. Take the tests of the installed version, or of the
nearest one: what fails with their class as well says nothing about ours. `nox -s integrations --` takes the same
arguments, and has the engines installed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STUBS = ROOT / "packages/radixcache/tests/integrations/conftest.py"

SGLANG_OURS = """
import pagewood.radixcache.integrations.sglang as _ours
from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class RadixCache(_ours.PagewoodRadixCache):
    @classmethod
    def create_simulated(cls, disable=False, mock_allocator=None, page_size=1, enable_kv_cache_events=False, **more):
        return cls(CacheInitParams(disable=disable, req_to_token_pool=None, token_to_kv_pool_allocator=mock_allocator,
            page_size=page_size, enable_kv_cache_events=enable_kv_cache_events, **more))


"""
VLLM_TESTS = (
    "test_scheduler",
    "test_async_scheduler",
    "test_priority_preemption_bug",
    "test_priority_scheduler_random",
)
VLLM_PLUGIN = """
import os
import vllm.platforms
import vllm.v1.core.sched.async_scheduler as async_scheduler
import vllm.v1.core.sched.diffusion_scheduler
import vllm.v1.core.sched.scheduler as scheduler

vllm.platforms.current_platform.device_type = "cpu"  # no platform is found without a GPU
if os.environ["PEER_TESTS"] == "ours":
    from pagewood.schedpolicy.integrations import vllm as ours

    scheduler.Scheduler, async_scheduler.AsyncScheduler = ours.OrderedScheduler, ours.OrderedAsyncScheduler
"""
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu", "bos_token_id": 2,
    "eos_token_id": 2, "pad_token_id": 1, "do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768,
    "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "torch_dtype": "float16",
    "vocab_size": 50272, "word_embed_proj_dim": 768,
}  # fmt: skip
"""The config.json of facebook/opt-125m, which vLLM's tests would download."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("path", type=Path, help="the test file of SGLang, or the checkout of vLLM")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = run_sglang if arguments.engine == "sglang" else run_vllm
        theirs, ours = (run(arguments.path.resolve(), Path(folder), side) for side in ("theirs", "ours"))
    print(f"{len(theirs)} tests pass with the class of {arguments.engine}, {len(ours)} with ours; only with theirs:")
    print(*sorted(theirs - ours), sep="\n")
    return 0 if theirs else 1


def run_sglang(path: Path, folder: Path, side: str) -> set[str]:
    """Run the tests of SGLang's radix cache; what its interface was called before 0.5.23 is renamed."""
    text = re.sub(r"(result\w*)\.device_indices", r"cache.path_device_indices(\1.last_device_node)", path.read_text())
    text = re.sub(r"from sglang\.srt\.mem_cache\.mamba_radix_cache import .*", "MambaTreeNode = None", text)
    if side == "ours":
        text = text.replace("\nclass TestRadixKey", SGLANG_OURS + "\nclass TestRadixKey", 1)
    (folder / "test_peer.py").write_text(text)
    shutil.copy(STUBS, folder)
    return passed(folder, side, ["test_peer.py", "-k", "not memory_allocated"])


def run_vllm(path: Path, folder: Path, side: str) -> set[str]:
    """Run the tests of vLLM's scheduler; those that need other models than OPT fail."""
    if not (folder / "tests").exists():
        (folder / "tests").symlink_to(path / "tests")
        for name in ("facebook/opt-125m", "facebook/opt-350m"):
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(OPT))
        (folder / "peer_plugin.py").write_text(VLLM_PLUGIN)
    files = [f"tests/v1/core/{name}.py" for name in VLLM_TESTS]
    return passed(folder, side, ["--noconftest", "-p", "peer_plugin", *files])


def passed(folder: Path, side: str, arguments: list[str]) -> set[str]:
    """Run pytest; return the names of the tests that pass, all of their subtests included."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PEER_TESTS": side, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=line", "-rA"]
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    print(side, done.stdout.strip().splitlines()[-1])
    failed = set(re.findall(r"^(?:SUBFAILED\S*|SUBFAIL\S*|FAILED)(?:\(.*?\))? (\S+)", done.stdout, re.MULTILINE))
    return set(re.findall(r"^PASSED (\S+)", done.stdout, re.MULTILINE)) - failed


if __name__ == "__main__":
    sys.exit(main())
