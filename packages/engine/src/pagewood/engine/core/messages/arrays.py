"""The array types that modules exchange."""

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
"""Token ids, page ids, rows and positions."""
