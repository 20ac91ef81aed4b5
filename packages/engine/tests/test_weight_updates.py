"""Updates of the weights of a CPU engine: afterwards it computes the bits of a new engine with the same tensors."""

# pyright: basic
# torch is typed in part only.

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewood.engine import LLM, AsyncLLM, SamplingParams
from pagewood.engine.api import Flush, Pause, Resume
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.models.stored.updated_tensors import INDICES, VALUES
from pagewood.engine.runner.cpu.drafts import drafting
from pagewood.engine.runner.cpu.drafts.drafting import exchanged
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.weight_commands import (
    CheckWeights,
    DropUpdate,
    FinishUpdate,
    JoinGroup,
    LeaveGroup,
    NameVersion,
    Received,
    Sleep,
    UpdateWeights,
)
from tiny_models import head_folder
from tiny_models import model_folder as tiny_model
from weight_bench import PROMPTS, Pair, WeightBench, fresh_scores, make_pair, tensors_of, trainer, write_tensors


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair("qwen3", tmp_path_factory.mktemp("pair"))


FORMS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "float32": {"weights": "float32"},
    "bfloat16": {"weights": "bfloat16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
}
FAMILIES = [
    "qwen3",
    "gpt-oss",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "llama",
            "gemma2",
            "qwen3-moe",
            "mixtral",
            "deepseek3",
            "gpt2",
            "granite-moe",
            "phi3-window",
            "olmo2",
        )
    ),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_replaces_all_forms_of_weights(form: str, pair: Pair) -> None:
    """In every form, there and back."""
    with WeightBench(pair.old, **FORMS[form]) as bench:
        before = bench.scores()
        assert bench.update(folder=str(pair.new), version="a") is None
        assert bench.scores() == fresh_scores(pair.new, **FORMS[form]) != before
        assert bench.update(folder=str(pair.old)) is None
        assert bench.scores() == before


@pytest.mark.parametrize("kind", FAMILIES)
def test_tensors_of_families_by_their_names_in_memory(kind: str, tmp_path: Path) -> None:
    """The parameters of `transformers`, some at a time; and those of the folder's files."""
    pair = make_pair(kind, tmp_path)
    expected = fresh_scores(pair.new)
    parameters = {name: one.detach().clone() for name, one in pair.model.named_parameters()}
    parameters |= {name: one.clone() for name, one in pair.model.named_buffers() if "correction" in name}
    names = sorted(parameters)
    with WeightBench(pair.old) as bench:
        before = bench.scores()
        half = write_tensors(tmp_path / "a.safetensors", {name: parameters[name] for name in names[::2]})
        rest = write_tensors(tmp_path / "b.safetensors", {name: parameters[name] for name in names[1::2]})
        assert bench.update(files=(half,)) is None
        assert bench.scores() not in (before, expected)
        assert bench.update(files=(rest,)) is None
        assert bench.scores() == expected
        assert bench.update(files=(str(pair.old / "model.safetensors"),)) is None
        assert bench.scores() == before


def test_some_elements_of_a_tensor(pair: Pair, tmp_path: Path) -> None:
    """Pairs of indices and values, after which the engine is one with the whole tensor."""
    tensors = tensors_of(pair.old)
    name = "model.layers.1.mlp.down_proj.weight"
    indices = torch.randperm(tensors[name].numel())[:200]
    values = torch.randn(200)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_bytes((pair.old / "config.json").read_bytes())
    changed = tensors[name].clone()
    changed.view(-1)[indices] = values
    write_tensors(whole / "model.safetensors", {**tensors, name: changed})
    sparse = write_tensors(tmp_path / "sparse.safetensors", {name + INDICES: indices, name + VALUES: values})
    for options in ({}, {"weights": "int8"}):
        with WeightBench(pair.old, **options) as bench:
            assert bench.update(files=(sparse,)) is None
            assert bench.scores() == fresh_scores(whole, **options)


@pytest.mark.parametrize("is_folder", [True, False])
def test_numbers_get_the_dtype_that_the_model_began_with(is_folder: bool, tmp_path: Path) -> None:
    """As in other engines, whose trainers send float32 to models of bfloat16."""
    pair = make_pair("qwen3", tmp_path, dtype=torch.bfloat16)
    tensors = tensors_of(pair.new)
    assert tensors["model.norm.weight"].dtype == torch.float32
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    (rounded / "config.json").write_bytes((pair.old / "config.json").read_bytes())
    write_tensors(rounded / "model.safetensors", {name: one.to(torch.bfloat16) for name, one in tensors.items()})
    place: dict[str, Any] = (
        {"folder": str(pair.new)} if is_folder else {"files": (str(pair.new / "model.safetensors"),)}
    )
    with WeightBench(pair.old) as bench:
        assert bench.update(**place) is None
        assert bench.scores() == fresh_scores(rounded)
    with WeightBench(pair.old, weights="float32") as bench:  # a form that does not come from the files: nothing is lost
        assert bench.update(**place) is None
        assert bench.scores() == fresh_scores(pair.new, weights="float32") != fresh_scores(rounded, weights="float32")


def wrong_updates(pair: Pair, folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    tensors = tensors_of(pair.new)
    name = "model.layers.1.mlp.down_proj.weight"
    index, value = torch.tensor([tensors[name].numel()]), torch.zeros(1)

    def file(label: str, **own: torch.Tensor) -> tuple[str, ...]:
        renamed = {key.replace("DOWN", name): one for key, one in own.items()}
        return (write_tensors(folder / f"{label}.safetensors", {**tensors, **renamed}),)

    broken = folder / "broken.safetensors"
    broken.write_bytes(b"{}")
    lacking = folder / "lacking"
    lacking.mkdir()
    (lacking / "config.json").write_bytes((pair.old / "config.json").read_bytes())
    write_tensors(lacking / "model.safetensors", {key: one for key, one in tensors.items() if key != name})
    return {
        "shape": ({"files": file("shape", DOWN=tensors[name][:-1])}, "down_proj.weight must have shape"),
        "dtype": ({"files": file("dtype", DOWN=tensors[name].to(torch.int32))}, "floating point"),
        "name": ({"files": file("name", **{"model.layers.9.x": value})}, "model.layers.9.x"),
        "index": ({"files": file("index", **{f"DOWN{INDICES}": index, f"DOWN{VALUES}": value})}, "must be in"),
        "no values": ({"files": file("values", **{f"DOWN{INDICES}": index})}, "must have indices and values"),
        "file": ({"files": (str(folder / "none.safetensors"),)}, "none.safetensors"),
        "broken": ({"files": (str(broken),)}, "not a whole safetensors file"),
        "folder": ({"folder": str(lacking)}, "lacks the tensor"),
    }


def test_a_wrong_update_leaves_the_old_weights(pair: Pair, tmp_path: Path) -> None:
    """All tensors but one are those of another model, so a part of them would show."""
    with WeightBench(pair.old, weights="int8") as bench:
        before = bench.scores()
        for label, (fields, words) in wrong_updates(pair, tmp_path).items():
            refusal = bench.update(**fields)
            assert refusal is not None, label
            assert words in refusal.message, f"{label}: {refusal.message}"
            assert bench.scores() == before, label


def test_an_exchange_that_fails_leaves_the_old_weights(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CPURunner, model: Any, parts: Any) -> None:
        raise MemoryError("no room")

    with WeightBench(pair.old) as bench:
        before = bench.scores()
        with monkeypatch.context() as patch:
            patch.setattr(CPURunner, "exchange_model", fail)
            refusal = bench.update(folder=str(pair.new), version="a")
        assert refusal is not None
        assert "no room" in refusal.message
        assert bench.scores() == before
        assert bench.run(bench.submit(PROMPTS[0]))[0].versions == [""] * 12
        assert bench.update(folder=str(pair.new)) is None
        assert bench.scores() == fresh_scores(pair.new)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"speculative": "ngram", "speculative_num_tokens": 3}], ids=["plain", "drafts"]
)
def test_running_requests_go_on(overlap: bool, options: dict[str, Any], pair: Pair) -> None:
    """With the old KV by default; the cache keeps nothing of them, and new requests begin anew."""
    with WeightBench(pair.old, overlap=overlap, **options) as bench:
        name = bench.submit(PROMPTS[0], num_tokens=60)
        while len(bench.known[name].versions if name in bench.known else ()) < 20:
            bench.step()
        assert bench.update(folder=str(pair.new), version="b") is None
        [mixed] = bench.run(name)
        at = mixed.versions.index("b")
        assert mixed.versions == [""] * at + ["b"] * (60 - at)
        assert 20 <= at < 60
        again = bench.run(bench.submit(PROMPTS[0]))[0]
        assert again.end is not None
        assert again.end.num_cached_tokens == 0
        assert again.scores == fresh_scores(pair.new)[0]
        hit = bench.run(bench.submit(PROMPTS[0]))[0]
        assert hit.end is not None
        assert hit.end.num_cached_tokens > 0
        assert hit.scores == again.scores


RANKS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "by request": {"tensor_parallel_size": 2, "enable_dp_attention": True},
}
STAGES, BY_REQUEST = RANKS["stages"], RANKS["by request"]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("draft", {}),
        ("mtp", {}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("eagle", {}), ("eagle", STAGES), ("draft", STAGES), ("eagle", BY_REQUEST))
        ),
    ],
)
def test_drafts_go_on_for_the_new_weights(
    kind: str, ranks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are accepted as in a new engine: all of a draft model that is the target then. Nothing is half done."""
    old, new = (
        tiny_model("glm4-moe" if kind == "mtp" else "llama", seed=seed, has_mtp=kind == "mtp") for seed in (0, 1)
    )
    drafter = {"draft": str(new), "eagle": str(head_folder("llama")), "mtp": None}[kind]
    options: dict[str, Any] = {
        "speculative": "draft" if kind == "draft" else "eagle", "speculative_model": drafter,
        "speculative_control": "fixed", "speculative_num_tokens": 3, "num_threads": 1 + bool(ranks), **ranks,
    }  # fmt: skip

    def answered(bench: WeightBench) -> list[tuple[Any, int]]:
        names = [bench.submit([token % 60 for token in prompt], num_tokens=40) for prompt in PROMPTS]
        return [(one.scores, -1 if one.end is None else one.end.num_accepted_tokens) for one in bench.run(*names)]

    with WeightBench(new, **options) as other:
        expected = answered(other)
        assert kind != "draft" or sum(num for _, num in expected) > 50
    with WeightBench(old, **options) as bench:
        before = answered(bench)
        assert before != expected
        if not ranks:
            with monkeypatch.context() as patch:
                patch.setattr(drafting, "exchanged", full_memory)
                refusal = bench.update(folder=str(new))
            assert refusal is not None
            assert "no room" in refusal.message
        running = bench.submit([token % 60 for token in PROMPTS[0]], num_tokens=60)
        while len(bench.known[running].versions if running in bench.known else ()) < 10:
            bench.step()
        assert bench.update(folder=str(new), version="b", old_kv="recompute") is None
        [mixed] = bench.run(running)
        at = mixed.versions.index("b")
        assert mixed.versions == [""] * at + ["b"] * (60 - at)
        assert mixed.scores[:at] == before[0][0][:at]
        assert answered(bench) == expected
        assert bench.update(folder=str(old)) is None
        assert answered(bench) == before
        assert bench.engine.violation() is None


def full_memory(drafter: drafting.ProgramDrafter, parts: drafting.DrafterParts, write: Callable[[], object]) -> object:
    """Do what `exchanged` does where there is no memory for the program."""
    del write

    def fail() -> object:
        raise MemoryError("no room")

    return exchanged(drafter, parts, fail)


def test_what_becomes_of_the_old_kv(pair: Pair) -> None:
    """recompute: what runs is as if the new weights had read its text; keep: later requests find the old KV."""
    with WeightBench(pair.old) as bench, WeightBench(pair.new) as other:
        for old_kv in ("recompute", "keep"):
            name = bench.submit(PROMPTS[0], num_tokens=40)
            while len(bench.known[name].versions if name in bench.known else ()) < 10:
                bench.step()
            assert bench.update(folder=str(pair.new), version=old_kv, old_kv=old_kv) is None
            [mixed] = bench.run(name)
            at = mixed.versions.index(old_kv)
            text = [*PROMPTS[0], *(token for token, _ in mixed.scores)]
            as_new = other.run(other.submit(text[: len(PROMPTS[0]) + at], num_tokens=40 - at))[0].scores
            assert (mixed.scores[at:] == as_new) == (old_kv == "recompute")
            found = bench.run(bench.submit(text[:-1]))[0].end
            assert found is not None
            assert found.num_cached_tokens > 0
            assert bench.update(folder=str(pair.old), version="back") is None


def test_versions_have_names(pair: Pair) -> None:
    with WeightBench(pair.old) as bench:
        assert bench.update(folder=str(pair.new)) is None
        assert bench.run(bench.submit(PROMPTS[0], num_tokens=2))[0].versions == ["1", "1"]
        bench.tell(NameVersion(request_id="name", version="best"))
        end = bench.run(bench.submit(PROMPTS[0], num_tokens=2))[0]
        assert end.versions == ["best", "best"]
        assert end.end is not None
        assert end.end.num_cached_tokens > 0
        bench.inbox.put(UpdateWeights(request_id="one", folder=str(pair.old)))
        refusal = bench.tell(UpdateWeights(request_id="two", folder=str(pair.old))).refusal
        assert refusal is not None
        assert refusal.code == "weights_busy"


@pytest.mark.parametrize("options", [{}, pytest.param({**RANKS["ranks"], "num_threads": 2}, marks=pytest.mark.slow)])
def test_an_update_waits_until_it_is_finished_or_dropped(options: dict[str, Any], pair: Pair, tmp_path: Path) -> None:
    """So that several engines change together, or none."""
    tensors = tensors_of(pair.old)
    part = write_tensors(tmp_path / "part.safetensors", dict(list(tensors.items())[::2]))
    whole = str(pair.old / "model.safetensors")
    with WeightBench(pair.old, **options) as bench:
        before, expected = bench.scores(), fresh_scores(pair.new, **options)

        def refused(command: Any) -> str | None:
            refusal = bench.tell(command).refusal
            return None if refusal is None else refusal.code

        update = UpdateWeights(request_id="one", folder=str(pair.new), version="a", waits=True)
        assert refused(update) is None
        assert bench.scores() == before
        assert refused(UpdateWeights(request_id="another", folder=str(pair.new))) == "weights_busy"
        assert refused(CheckWeights(request_id="check")) == refused(Sleep(request_id="sleep")) == "weights_busy"
        assert refused(FinishUpdate(request_id="wrong", update="another")) == "weights_lost"
        for name in ("first", "again"):
            assert bench.tell(FinishUpdate(request_id=name, update="one")).weights == "a"
        assert bench.scores() == expected
        assert refused(UpdateWeights(request_id="two", folder=str(pair.old), waits=True)) is None
        assert refused(DropUpdate(request_id="drop")) is None
        assert refused(FinishUpdate(request_id="late", update="two")) == "weights_lost"
        bench.inbox.put(UpdateWeights(request_id="read", folder=str(pair.old), waits=True))
        assert refused(DropUpdate(request_id="drop what is read")) is None
        assert refused(FinishUpdate(request_id="too late", update="read")) == "weights_lost"
        assert bench.update(files=(part,), is_last=False) is None
        assert refused(DropUpdate(request_id="drop parts")) is None
        for fields, text in (({}, "got none"), ({"files": (part,), "is_whole": True}, "all tensors")):
            refusal = bench.update(**fields)
            assert refusal is not None
            assert text in refusal.message
        assert bench.scores() == expected
        assert bench.update(files=(whole,), is_whole=True) is None
        assert bench.scores() == before
        with WeightBench(pair.old, **options) as other:  # what it has had before does not matter to its cache
            assert other.update(files=(whole,)) is None
            assert other.engine.weights[1] == bench.engine.weights[1] is not None
        assert bench.engine.violation() is None


def test_an_update_while_the_engine_is_paused(pair: Pair) -> None:
    """As trainers do: pause, update, go on."""
    with WeightBench(pair.old) as bench:
        name = bench.submit(PROMPTS[0], num_tokens=30)
        while name not in bench.known:
            bench.step()
        bench.tell(Pause(request_id="pause"))
        assert bench.update(folder=str(pair.new), version="c", old_kv="recompute") is None
        bench.tell(Flush(request_id="flush"))
        assert bench.known[name].end is None
        bench.tell(Resume(request_id="resume"))
        assert set(bench.run(name)[0].versions) == {"", "c"}


def test_what_cannot_be_combined_is_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    with WeightBench(pair.old, host_cache_gb=0.01) as bench:
        refusal = bench.update(folder=str(pair.new), old_kv="keep")
        assert refusal is not None
        assert "host cache" in refusal.message
    with pytest.raises(ValueError, match="not both or none"):
        UpdateWeights(request_id="", folder="a", files=("b",))
    with pytest.raises(ValueError, match="old_kv must be"):
        UpdateWeights(request_id="", folder="a", old_kv="mix")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["ranks", *(pytest.param(one, marks=pytest.mark.slow) for one in list(RANKS)[1:])])
def test_ranks_change_at_the_same_step(kind: str, pair: Pair, tmp_path: Path) -> None:
    options = {**RANKS[kind], "num_threads": 2}
    with WeightBench(pair.old, **options) as bench:
        before = bench.scores()
        name = bench.submit(PROMPTS[0], num_tokens=60)
        while name not in bench.known:
            bench.step()
        assert bench.update(folder=str(pair.new), version="a") is None
        assert set(bench.run(name)[0].versions) == {"", "a"}
        assert bench.scores() == fresh_scores(pair.new, **options)
        refusal = bench.update(**wrong_updates(pair, tmp_path)["shape"][0])
        assert refusal is not None
        old = str(pair.old / "model.safetensors")
        assert bench.update(files=(old,), version="b") is None
        assert bench.scores() == before


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def demo_tensors(factor: float) -> list[tuple[str, torch.Tensor]]:
    """The embedded model with its last norm scaled, which changes log probabilities."""
    tensors = tensors_of(model_folder(None))
    return [(name, one * factor) for name, one in tensors.items() if name == "model.norm.weight"]


def test_llm_takes_tensors_from_memory() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(max_total_tokens=1024, max_running=4) as llm:
        [before] = llm.generate("Hello", sampling)
        assert before.weight_versions == ()
        stream = llm.stream("Hello", SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True))
        next(stream)
        assert llm.update_weights(demo_tensors(0.5)) == "1"
        [after] = llm.generate("Hello", sampling)
        assert after.weight_versions == (("1", 0, 12),)
        assert after.logprobs != before.logprobs
        list(stream)
        assert stream.completion is not None
        assert [span.version for span in stream.completion.weight_versions] == ["default", "1"]
        assert stream.completion.weight_versions[-1].end == 600
        with pytest.raises(ValueError, match="must have tensors of the model, got x"):
            llm.update_weights([("x", torch.zeros(1))])
        with pytest.raises(TypeError, match="pairs of a name and a tensor"):
            llm.update_weights([("x", 1)])  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="must not be empty"):
            llm.update_weights([])
        assert llm.update_weights(demo_tensors(1.0), version="again") == "again"
        assert llm.generate("Hello", sampling)[0].logprobs == before.logprobs


def test_async_llm_updates_beside_its_steps() -> None:
    async def main() -> None:
        async with AsyncLLM(max_total_tokens=1024, max_running=4) as llm:
            stream = llm.stream("Hello", SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True))
            await anext(stream)
            assert await llm.update_weights(demo_tensors(0.5), version="half") == "half"
            async for _ in stream:
                pass
            assert stream.completion is not None
            assert [span.version for span in stream.completion.weight_versions] == ["default", "half"]
            with pytest.raises(ValueError, match="got x"):
                await llm.update_weights([("x", torch.zeros(1))])

    asyncio.run(main())
    assert not [one for one in threading.enumerate() if one.name.startswith("weight-reader")]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_sends_tensors_over_gloo(num_ranks: int, pair: Pair) -> None:
    """In two parts; nothing is computed with the first one alone."""
    options = {"tensor_parallel_size": num_ranks, "num_threads": num_ranks}
    file, names = pair.new / "model.safetensors", sorted(tensors_of(pair.new))
    wanted = [Received(name, str(one.dtype), tuple(one.shape)) for name, one in sorted(tensors_of(pair.new).items())]
    with trainer(file, world_size=1 + num_ranks) as port, WeightBench(pair.old, **options) as bench:
        before = bench.scores()
        fields: dict[str, Any] = {"address": "127.0.0.1", "port": port, "first_rank": 1, "world_size": 1 + num_ranks}
        refusal = bench.tell(JoinGroup(request_id="nccl", name="trainer", **fields, backend="nccl")).refusal
        assert refusal is not None
        assert "backend must be gloo" in refusal.message
        assert bench.tell(JoinGroup(request_id="join", name="trainer", **fields)).refusal is None
        half = len(names) // 2
        assert bench.update(group="trainer", received=tuple(wanted[:half]), is_last=False) is None
        assert bench.scores() == before
        assert bench.update(group="trainer", received=tuple(wanted[half:]), is_last=False) is None
        assert bench.update(version="sent") is None
        assert bench.scores() == fresh_scores(pair.new, **options)
        assert bench.tell(LeaveGroup(request_id="leave", name="trainer")).refusal is None
        refusal = bench.update(group="trainer", received=tuple(wanted))
        assert refusal is not None
        assert "one that was joined" in refusal.message
        refusal = bench.update()
        assert refusal is not None
        assert "must have tensors, got none" in refusal.message
