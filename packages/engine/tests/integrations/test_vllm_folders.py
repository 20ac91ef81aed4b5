# pyright: basic, reportMissingImports=false
# (vLLM is not a dependency of this package)
"""vLLM's own layers choose a scheme for the folders that we quantise, and load their tensors."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open

pytest.importorskip("vllm", reason="needs vLLM; nox -s integrations installs it")

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # no platform is found without a GPU

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.linear import ReplicatedLinear  # noqa: E402
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E402
    CompressedTensorsConfig,
)

from pagewood.engine.quantise import Scheme, quantise_model  # noqa: E402

SCHEMES = {"int8": "CompressedTensorsW8A8Int8", "int4": "CompressedTensorsWNA16"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The configuration of vLLM, whose layers need a group of processes: here of one."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo",
            distributed_init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}",
        )  # fmt: skip
        initialize_model_parallel()
        yield config
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_layer_of_vllm_loads_every_matrix(form, config, tmp_path):
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(sizes).bfloat16().save_pretrained(tmp_path / "plain")
    quantise_model(
        tmp_path / "plain", tmp_path / "made", Scheme(format=form, group_size=64 if form == "int4" else None)
    )
    written = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    theirs = CompressedTensorsConfig.from_config(written)
    [file] = (tmp_path / "made").glob("*.safetensors")
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    with safe_open(file, "pt") as tensors:
        for name, module in plain.named_modules():
            if not isinstance(module, torch.nn.Linear) or name == "lm_head":
                continue
            layer = ReplicatedLinear(
                module.in_features, module.out_features, bias=False, params_dtype=torch.bfloat16, quant_config=theirs,
                prefix=name,
            )  # fmt: skip
            assert type(layer.scheme).__name__ == SCHEMES[form]
            parameters = dict(layer.named_parameters())
            stored = {key.removeprefix(f"{name}."): key for key in tensors.keys() if key.startswith(f"{name}.")}  # noqa: SIM118
            assert parameters.keys() == stored.keys()
            for suffix, key in stored.items():
                parameter, tensor = parameters[suffix], tensors.get_tensor(key)
                parameter.weight_loader(parameter, tensor)
                assert parameter.is_floating_point() == tensor.is_floating_point()
                assert parameter.data.equal(tensor.to(parameter.dtype))  # int8's scales are kept as float32
