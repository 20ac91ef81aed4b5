# pyright: basic
# (torch and transformers are untyped where it matters)
"""Prefix reuse in transformers returns the tokens of the plain model, and computes fewer of them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the integration needs torch")
transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from pagewood.radixcache.integrations.transformers import CachedGenerator  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_prefix_cache.py"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """With operations this small, more threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(torch.float64).eval()


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 400), (4, 100), (4, 12), (16, 4)])
def test_the_output_is_the_same_and_fewer_tokens_are_computed(model, page_size: int, num_pages: int) -> None:
    generator = CachedGenerator(model, num_pages=num_pages, page_size=page_size)
    computed: list[int] = []
    rng = np.random.default_rng(1)
    system = rng.integers(3, 64, 24).tolist()
    prompts = [[*system[:shared], *rng.integers(3, 64, 5).tolist()] for shared in (24, 24, 10, 24, 0, 24)]
    answer = generator.generate(prompts[0], max_new_tokens=8, do_sample=False)[0]
    total_saved = 0
    for prompt in [*prompts, prompts[0], [*answer, 7, 8], [*answer, 9]]:
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        with model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].numel())):
            output, num_saved = generator.generate(prompt, max_new_tokens=8, do_sample=False)
        assert output == expected[0].tolist()
        assert computed == [len(prompt) - num_saved, *([1] * 7)]
        generator.cache.check()
        assert generator.cache.num_locked == 0
        assert generator.cache.num_pages + len(generator.free) == num_pages
        computed.clear()
        total_saved += num_saved
    assert total_saved > len(system)


@pytest.mark.slow
def test_the_example_is_short_and_runs() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 30
    command = [sys.executable, "-W", "error", EXAMPLE]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=one_thread)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[1].split()[0] for line in done.stdout.splitlines()] == ["0", "992", "992", "992", "992"]


def test_namespaces_share_nothing_and_wrong_arguments_are_refused(model) -> None:
    generator = CachedGenerator(model, num_pages=20, page_size=4)
    prompt = list(range(3, 24))
    options = {"max_new_tokens": 4, "do_sample": False}
    first = generator.generate(prompt, **options)
    assert (first[1], generator.generate(prompt, namespace="adapter", **options)[1]) == (0, 0)
    assert generator.generate(prompt, **options) == (first[0], 20)
    with pytest.raises(ValueError, match="prompt must have at least 1 token"):
        generator.generate([])
    with pytest.raises(ValueError, match="num_beams must be 1, got 2"):
        generator.generate(prompt, num_beams=2)
    with pytest.raises(ValueError, match="num_pages must be >= 1, got 0"):
        CachedGenerator(model, num_pages=0)
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"must attend to all tokens in every layer, got sliding_attention"):
        CachedGenerator(transformers.Gemma3ForCausalLM(config), num_pages=4)
