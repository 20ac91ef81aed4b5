import pytest

from pagewood.engine.api import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("max_tokens", 0, "max_tokens must be >= 1, got 0"),
        ("temperature", -0.1, r"temperature must be in \[0, 100\], got -0.1"),
        ("temperature", float("nan"), "temperature must be"),
        ("top_k", -1, "top_k must be >= 0, got -1"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("min_p", 1.5, r"min_p must be in \[0, 1\], got 1.5"),
        ("seed", 2**63, "seed must fit in 64 signed bits"),
    ],
)
def test_sampling_out_of_range_names_argument_rule_and_value(field: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
        ({"max_running": 0}, "max_running must be >= 1, got 0"),
        ({"max_total_tokens": 8, "page_size": 16}, "max_total_tokens must hold at least one page of 16, got 8"),
        ({"schedule_conservativeness": 0.0}, "schedule_conservativeness must be > 0, got 0.0"),
        ({"num_threads": 0}, "num_threads must be >= 1, got 0"),
    ],
)
def test_a_wrong_configuration_names_argument_rule_and_value(options: dict[str, float], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        EngineConfig(**options)  # pyright: ignore[reportArgumentType]


def test_what_is_left_open_depends_on_the_device() -> None:
    here, there = EngineConfig(), EngineConfig(device="cuda")
    assert (here.num_rows, here.max_chunk_tokens) == (64, 512)
    assert (there.num_rows, there.max_chunk_tokens) == (256, 2048)
    chosen = EngineConfig(device="cuda", max_running=3, chunked_prefill_size=7)
    assert (chosen.num_rows, chosen.max_chunk_tokens) == (3, 7)
    with pytest.raises(ValueError, match="max_running must be >= 1, got 0"):
        EngineConfig(max_running=0)
    with pytest.raises(ValueError, match="chunked_prefill_size must be >= 1, got 0"):
        EngineConfig(chunked_prefill_size=0)
