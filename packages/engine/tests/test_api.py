import pytest

from pagewood.engine.api import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("max_tokens", 0, "max_tokens must be >= 1, got 0"),
        ("temperature", -0.1, r"temperature must be in \[0, 100\], got -0.1"),
        ("temperature", float("nan"), "temperature must be"),
        ("top_k", -1, r"top_k must be in \[0, 2\*\*31\), got -1"),
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
        ({"schedule_conservativeness": float("nan")}, "schedule_conservativeness must be > 0, got nan"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"host_cache_gb": float("nan")}, "host_cache_gb must be > 0, got nan"),
        ({"page_size": 1.5}, "page_size must be an int, got 1.5"),
        ({"max_running": "4"}, "max_running must be an int, got '4'"),
        ({"num_threads": 0}, "num_threads must be >= 1, got 0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size must be >= 1, got 0"),
    ],
)
def test_a_wrong_configuration_names_argument_rule_and_value(options: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        EngineConfig(**options)  # pyright: ignore[reportArgumentType]


def test_a_resolved_configuration_has_the_defaults_of_its_device() -> None:
    def resolved(**options: object) -> tuple[object, ...]:
        config = EngineConfig(**options).resolved()  # pyright: ignore[reportArgumentType]
        assert config.resolved() == config
        assert (config.num_rows, config.max_chunk_tokens) == (config.max_running, config.chunked_prefill_size)
        return config.device, config.dtype, config.kv_cache_dtype, config.max_running, config.chunked_prefill_size

    assert resolved() == ("cpu", "float32", "float32", 64, 512)
    assert resolved(kv_cache_dtype="int8") == ("cpu", "float32", "int8", 64, 512)
    assert resolved(device="cuda") == ("cuda", "bfloat16", "bfloat16", 256, 2048)
    chosen = resolved(device="cuda", dtype="float16", max_running=3, chunked_prefill_size=7)
    assert chosen == ("cuda", "float16", "float16", 3, 7)
