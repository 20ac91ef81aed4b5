"""An engine as trainers call it: partial answers that go on, weights that change, sleep; in the words of verl."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from families.case import build
from families.registry import CASES
from pagewood.engine.integrations.rollout import RolloutServer
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.offline.weight_files import TensorFolder

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
LONG = {**GREEDY, "max_tokens": 600, "ignore_eos": True}
PROMPT = [5, 6, 7, 8, 9]


@asynccontextmanager
async def serving() -> AsyncGenerator[RolloutServer]:
    options = {"max_total_tokens": 2048, "max_length": 1024, "num_threads": 1}
    server = RolloutServer(SimpleNamespace, options, prompt_length=64, response_length=16)
    await server.launch_server()
    try:
        yield server
    finally:
        await server.close()


async def aborted(server: RolloutServer) -> Any:
    """Return an answer that was aborted after some of its tokens."""
    wait_s = 0.01
    while True:
        running = asyncio.create_task(server.generate(PROMPT, LONG, "a"))
        await asyncio.sleep(wait_s)
        await server.abort_all_requests()
        found = await running
        await server.resume_generation()
        if 0 < len(found.token_ids) < 600:
            return found
        wait_s = wait_s / 2 if found.token_ids else wait_s * 1.5


def test_answers_around_aborts() -> None:
    """A partial answer goes on with the tokens and scores of a whole one; what comes meanwhile waits or ends."""

    async def main() -> None:
        async with serving() as server:
            whole = await server.generate(PROMPT, LONG, "a")
            assert whole.stop_reason == "completed"
            assert len(whole.token_ids) == len(whole.log_probs) == 600
            part = await aborted(server)
            assert part.stop_reason == "aborted"
            left = {**LONG, "max_tokens": 600 - len(part.token_ids)}
            rest = await server.generate([*PROMPT, *part.token_ids], left, "b", priority=1)
            assert part.token_ids + rest.token_ids == whole.token_ids
            assert part.log_probs + rest.log_probs == whole.log_probs

            expected = await server.generate(PROMPT, GREEDY, "c")
            assert len(expected.token_ids) <= 16
            await server.abort_all_requests()
            waiting = asyncio.create_task(server.generate(PROMPT, GREEDY, "d"))
            await asyncio.sleep(0)
            await server.abort_all_requests(reject_request=True)
            turned_away = await server.generate(PROMPT, GREEDY, "e")
            assert (turned_away.token_ids, turned_away.stop_reason) == ([], "aborted")
            await server.resume_generation()
            assert (await waiting).token_ids == expected.token_ids
            await server.clear_kv_cache()
            assert (await server.generate(PROMPT, GREEDY, "f")).extra_fields["num_cached_tokens"] == 0

    asyncio.run(main())


def test_answers_have_experts(tmp_path: Path) -> None:
    """All tokens but the last have experts, and no position comes from the cache."""
    build(CASES["qwen3-moe"], tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((model_folder(None) / "tokenizer.json").read_bytes())

    async def main() -> None:
        options = {"model": str(tmp_path), "max_total_tokens": 512, "num_threads": 1}
        server = RolloutServer(SimpleNamespace, options, prompt_length=64, response_length=16, has_experts=True)
        await server.launch_server()
        once, twice = [await server.generate(PROMPT, {**GREEDY, "ignore_eos": True}, name) for name in "ab"]
        await server.close()
        assert once.routed_experts.shape == (len(PROMPT) + 15, 3, 3)
        assert (once.routed_experts == twice.routed_experts).all()
        assert twice.extra_fields["num_cached_tokens"] == 0

    asyncio.run(main())


def test_weights_that_slept_come_from_the_trainer() -> None:
    """They are forgotten while the trainer has the device, and all come in files; KV alone sleeps, too."""

    async def main() -> None:
        async with serving() as server:
            expected = await server.generate(PROMPT, GREEDY, "a")
            await server.sleep()
            await server.wake_up(["weights"])
            folder = TensorFolder()
            try:
                for name, tensor in load_file(model_folder(None) / "model.safetensors").items():
                    folder.add(name, tensor)
                files = folder.files()
                await server.update_weights(files, 7)
            finally:
                folder.close()
            assert not any(Path(one).exists() for one in files)
            await server.wake_up(["kv_cache"])
            found = await server.generate(PROMPT, GREEDY, "b")
            assert (found.token_ids, found.extra_fields["global_steps"]) == (expected.token_ids, 7)
            await server.release_kv_cache()
            await server.resume_kv_cache()
            assert (await server.generate(PROMPT, GREEDY, "c")).token_ids == expected.token_ids
            with pytest.raises(ValueError, match=r"sampling_params must be some of .*got 'best_of'"):
                await server.generate(PROMPT, {**GREEDY, "best_of": 2}, "d")
            with pytest.raises(ValueError, match="at most 1023 tokens, got 1024"):
                await server.generate(PROMPT[:1] * 1024, GREEDY, "e")
            with pytest.raises(ValueError, match="image_data must be empty"):
                await server.generate(PROMPT, GREEDY, "f", image_data=[1])

    asyncio.run(main())
