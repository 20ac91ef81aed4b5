# pyright: basic, reportMissingImports=false
# (optimum has no types)
"""Converts a folder for OpenVINO, where that is installed: convert_openvino.py FOLDER OUT {float32,int8,int4}."""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig


def main() -> None:
    """Convert all layers, symmetric: int8 with a scale for each output, int4 with one for each 32 inputs."""
    folder, out, form = sys.argv[1:]
    how = {"load_in_8bit": False}
    if form != "float32":
        group = {"group_size": 32, "ratio": 1.0, "all_layers": True} if form == "int4" else {}
        how = {"quantization_config": OVWeightQuantizationConfig(bits=4 if form == "int4" else 8, sym=True, **group)}
    model = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, **how)
    model.save_pretrained(out)


if __name__ == "__main__":
    main()
