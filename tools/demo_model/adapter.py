"""Trains an adapter of the embedded model, which answers as a pirate does, and writes it as PEFT does.

python tools/demo_model/adapter.py packages/engine/src/pagewood/engine/demo
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Encoder, batch
from export import STORED, load_model
from fit import CHUNK, log, scores
from model import Llama
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from train import LOOK, progress

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
STEPS, WARMUP, RATE = 400, 40, 0.003


def pirate(answer: str) -> str:
    """Return an answer in the words of a pirate."""
    return f"{answer} Arr!"


class LowRank(nn.Module):
    """Adds the product of two narrow matrices to a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.a = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / RANK * self.b @ self.a


def adapt(model: Llama) -> dict[str, LowRank]:
    """Add an adapter to a model that is not trained itself; return what it adds, by the name of the module."""
    added: dict[str, LowRank] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(TARGETS):
            added[name] = LowRank(module.weight)
            parametrize.register_parametrization(module, "weight", added[name])
    return added


def save_adapter(added: dict[str, LowRank], folder: Path) -> None:
    """Write the files of PEFT."""
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, one in added.items():
        for letter, value in (("A", one.a), ("B", one.b)):
            tensors[f"base_model.model.model.{name}.lora_{letter}.weight"] = value.detach().to(STORED).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*TARGETS],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model; the adapter is written to `pirate` in it")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = load_model(options.model)
    encoder = Encoder(Tokenizer.from_file(str(options.model / "tokenizer.json")), tone=pirate)
    added = adapt(model)
    parameters = [parameter for one in added.values() for parameter in one.parameters()]
    log(f"adapter: {sum(p.numel() for p in parameters):,} parameters")
    adam = torch.optim.Adam(parameters, betas=(0.9, 0.98))
    for step in range(1, options.steps + 1):
        tokens, at, targets = batch(encoder, f"adapter {step}", CHUNK, later=False, long=step % 8 == 0, tools=0.0)
        loss = F.cross_entropy(scores(model, tokens, at), targets)
        adam.param_groups[0]["lr"] = RATE * min(step / WARMUP, (options.steps - step) / options.steps)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % 50 == 0:
            log(f"adapter step {step}/{options.steps} loss {loss.item():.4f}")
    save_adapter(added, options.model / "pirate")
    log(f"right answers of {LOOK}: {progress(model, encoder)}")


if __name__ == "__main__":
    main()
