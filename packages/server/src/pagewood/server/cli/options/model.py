"""Options for the model and the way it is computed."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagewood.server.cli.options.page import Page
from pagewood.server.requests.adapters import NAME


def add_model_options(page: Page) -> None:
    """Add the group."""
    model = page.group("model")
    model.add(
        "path",
        nargs="?",
        metavar="MODEL",
        help="the model, as with --model",
    )
    model.add(
        "--model",
        "--model-path",
        action="append",
        metavar="PATH",
        help="Hugging Face folder or name, or GGUF file (default: embedded)",
        more="The folder has config.json, *.safetensors and tokenizer.json. A name, such as Qwen/Qwen3-0.6B, is looked "
        "up in the Hugging Face cache, and downloaded if it is not there. The embedded model is a small one that "
        "ships with Pagewood. It may be repeated: several models are loaded when requests need them.",
    )
    model.add(
        "--offline",
        action="store_true",
        help="download nothing, as with HF_HUB_OFFLINE=1",
        more="A model that is given by its name must be in the Hugging Face cache then.",
    )
    model.add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="clients' name of the model (default: name of its folder)",
        more="In a Hugging Face cache the default is the name of the repository. Of several models each has one, "
        "in the same order.",
    )
    model.setting(
        "--model-impl",
        metavar="IMPL",
        help="what computes it: native, transformers (default: auto)",
        more="auto: transformers for an architecture that Pagewood has no table for, native for all others. "
        "transformers needs pagewood-engine[transformers], and is slower.",
    )
    model.add(
        "--adapter",
        action="append",
        type=_adapter,
        default=[],
        dest="adapters",
        metavar="NAME=FOLDER",
        help="a LoRA adapter that clients may name; repeatable",
        more="A folder of PEFT. Clients write the name in place of the model, or MODEL:NAME. It needs --max-adapters.",
    )
    model.setting(
        "--max-adapters",
        metavar="N",
        help="adapters used at the same time (default: 0, no adapters)",
        more="More may be loaded; their requests take turns.",
    )
    model.setting(
        "--max-adapter-rank",
        metavar="R",
        help="largest rank of an adapter (default: %(default)s)",
    )
    model.setting(
        "--max-adapter-expert-rank",
        metavar="R",
        help="largest rank of an adapter in experts on CUDA (default: 0, none)",
        more="There, each of --max-adapters takes memory for all experts. On a CPU it means nothing.",
    )
    model.add(
        "--adapter-folder",
        action="append",
        type=Path,
        default=[],
        dest="adapter_folders",
        metavar="FOLDER",
        help="admins may load adapters from below it by request; may be repeated",
        more="By /v1/load_lora_adapter or /load_lora_adapter. Without it, they may load none.",
    )
    model.add(
        "--update-folder",
        action="append",
        type=Path,
        default=[],
        dest="update_folders",
        metavar="FOLDER",
        help="admins may update the weights from files below it by request; may be repeated",
        more="By /update_weights_from_disk or /update_weights_from_files. Without it, they may not.",
    )
    model.add(
        "--merge-adapter",
        type=Path,
        metavar="FOLDER",
        help="serve the model with this LoRA adapter in its weights",
        more="For one adapter that serves all requests, on any device. The merged model is kept in ~/.cache/pagewood.",
    )
    model.setting(
        "--device",
        help="where it runs (default: auto, which is the CPU)",
        more="cuda needs pagewood-engine[cuda].",
    )
    model.setting(
        "--threads",
        metavar="N",
        dest="num_threads",
        help="compute threads of a CPU (default: one per physical core)",
        more="They are divided among the processes of this host that compute the model.",
    )
    model.setting(
        "--tensor-parallel-size",
        metavar="N",
        help="processes that compute the model together (default: 1)",
        more="Each has a part of every matrix and of the KV memory, on cores of its own, or on a CUDA device. For "
        "machines with several sockets or devices; N must divide the sizes of the model.",
    )
    model.setting(
        "--nnodes",
        metavar="N",
        help="hosts with as many of these processes each (default: 1)",
        more="Start the same command on each host, with its --node-rank. Host 0 has the server; the others "
        "compute, and wait for the next group when one has ended.",
    )
    model.setting(
        "--node-rank",
        metavar="R",
        help="number of this host, from 0 on (default: 0)",
    )
    model.add(
        "--master-addr",
        metavar="HOST:PORT",
        help="where host 0 listens for the other hosts",
        more="It must be an address of host 0, as this host reaches it.",
    )
    model.add(
        "--node-secret-file",
        metavar="FILE",
        help="secret that hosts prove to each other",
        more="At least 16 bytes, the same on all hosts, in a file with mode 0600. It is needed unless --master-addr is "
        "a loopback address.",
    )
    model.add(
        "--insecure-no-node-secret",
        action="store_true",
        help="let everyone take part who reaches --master-addr",
        more="They can then read and change what the model computes.",
    )
    model.setting(
        "--pipeline-parallel-size",
        metavar="N",
        help="stages of layers that are computed one after the other (default: 1)",
        more="Each has --tensor-parallel-size processes of its own, and computes other requests at the same time. "
        "For models that do not fit one memory node or device; with --nnodes, stages may be on different hosts. Not "
        "with a decision log.",
    )
    model.add(
        "--expert-parallel",
        "--enable-expert-parallel",
        action="store_true",
        help="divide experts among these processes as wholes",
        more="Otherwise each has a part of the inner size of all experts. For experts whose inner size cannot be "
        "divided, or would become small.",
    )
    model.add(
        "--expert-map",
        metavar="FILE",
        help="JSON: which processes have which experts (default: consecutive)",
        more='As in {"layers": {"3": [0, 1, [0, 1]]}}: of a layer, the process of each expert, or those that have a '
        "copy of it. It needs --expert-parallel.",
    )
    model.add(
        "--enable-dp-attention",
        action="store_true",
        help="divide attention among these processes by request",
        more="Each then has all weights of attention, and the KV memory of its own requests, instead of a part of all "
        "heads. For latent attention (DeepSeek), whose KV memory every process would otherwise hold.",
    )
    model.setting(
        "--expert-load",
        metavar="WHAT",
        help="count rows of experts: off, ranks, experts (default: off)",
        more="ranks: /metrics has them by process, and their imbalance. experts: also by layer and expert, which are "
        "many. On a CPU only.",
    )
    model.setting(
        "--expert-kernels",
        metavar="WHAT",
        help="kernels of experts on CUDA: triton, flashinfer (default: triton)",
        more="flashinfer: its fused kernels, which were not run on a GPU yet and take many minutes to compile the "
        "first time. Where they cannot be used the log says why, and triton is.",
    )
    _add_number_formats(page)


def add_pool_options(page: Page) -> None:
    """Add the group of several models."""
    pool = page.group("several models: those that requests need are loaded, each with processes of its own")
    pool.add(
        "--models-dir",
        type=Path,
        metavar="FOLDER",
        help="serve all models in its folders and GGUF files",
        more="Each has the name of its folder or file. Further ones may be given by --model.",
    )
    pool.add(
        "--pin-model",
        action="append",
        default=[],
        dest="pinned",
        metavar="NAME",
        help="load this model at the start, and keep it; repeatable",
    )
    pool.setting(
        "--models-max",
        dest="max_loaded",
        metavar="N",
        help="most models that are loaded at a time (default: what fits)",
        more="When another one is needed, the one that was used least recently is unloaded, after its running requests "
        "have ended.",
    )
    pool.setting(
        "--models-memory-gb",
        dest="memory_gb",
        metavar="GB",
        help="memory for all loaded models (default: what is free at the start)",
        more="GB are 1e9 bytes. A model that cannot fit is refused, and no other is unloaded for it.",
    )
    pool.setting(
        "--model-idle-seconds",
        "--sleep-idle-seconds",
        dest="idle_s",
        metavar="S",
        help="unload a model unused for so long (default: never)",
        more="Requests may say otherwise for their model: `keep_alive` of Ollama's protocol, `ttl` of LM Studio's. "
        "Where there are API keys, only admins may.",
    )
    pool.add(
        "--no-models-autoload",
        action="store_false",
        dest="loads_on_demand",
        help="only admins load models, by POST /models/load",
    )


def _add_number_formats(page: Page) -> None:
    formats = page.group("formats of numbers")
    formats.setting(
        "--weights",
        metavar="FORMAT",
        help="weights on a CPU: float32, bfloat16, int8, int4 (default: auto)",
        more="auto is as precise as the checkpoint. int8 takes a quarter of the memory of float32 and int4 a sixth, "
        "and tokens come faster by as much. They are quantised once, and kept in ~/.cache/pagewood. CUDA keeps weights "
        "in --dtype.",
    )
    formats.setting(
        "--activations",
        metavar="FORMAT",
        help="what a CPU multiplies them with: float32, bfloat16 (default: auto)",
        more="auto: bfloat16 where weights are bfloat16 and the processor has AVX-512 BF16, eight bits where they are "
        "int8 or int4, otherwise float32. float32 rounds only the weights, and takes longer: choose it for the logits "
        "of a float32 computation. bfloat16, for bfloat16 weights only, gives every processor the results of one with "
        "AVX-512 BF16. CUDA computes in --dtype.",
    )
    formats.setting(
        "--dtype",
        metavar="FORMAT",
        help="what CUDA computes in: bfloat16, float16 (default: bfloat16)",
        more="auto is that default. On CUDA it is the format of weights, activations and, unless --kv-cache-dtype "
        "says otherwise, KV. On a CPU it is always float32, and --weights and --activations choose.",
    )
    formats.setting(
        "--kv-cache-dtype",
        metavar="FORMAT",
        help="KV memory: int8 on a CPU, fp8_e4m3 on CUDA (default: auto)",
        more="auto is --dtype. int8 with a scale per token and head takes a little over a quarter of float32; fp8_e4m3 "
        "takes half of --dtype. Choose them for more or longer requests in the same memory.",
    )
    formats.add(
        "--batch-invariant",
        action="store_true",
        help="on CUDA, the same logits in every batch, to the last bit; slower",
        more="On a CPU they always are the same.",
    )


def _adapter(text: str) -> tuple[str, str]:
    """Return the name and the folder of an adapter."""
    name, _, folder = text.partition("=")
    if not NAME.fullmatch(name) or not folder:
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, NAME of letters, digits and ._@/+-, got {text!r}")
    return name, folder
