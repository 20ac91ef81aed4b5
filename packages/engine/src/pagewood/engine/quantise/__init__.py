"""Rounds the weights of a folder to int8 or int4, and writes a folder of compressed-tensors that other engines read."""

from pagewood.engine.quantise.calibration import Calibration, read_calibration
from pagewood.engine.quantise.model import QuantisedMatrix, Summary, quantise_model
from pagewood.engine.quantise.scheme import Scheme

__all__ = ["Calibration", "QuantisedMatrix", "Scheme", "Summary", "quantise_model", "read_calibration"]
