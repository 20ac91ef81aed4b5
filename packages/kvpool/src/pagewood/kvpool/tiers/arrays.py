"""The array types that cross the borders of the tiers."""

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Bytes = NDArray[np.uint8]
