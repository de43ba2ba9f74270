"""Running the comparison cases on any device, through the seam."""

import numpy as np
from instruction_cases import BITS, inputs

from fp4rt.device import LaunchConfig

_DTYPES = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def launch_case(device, module, case):
    """Return the result array of one instruction case, as unsigned integers."""
    buffers = [device.upload(array) for array in inputs(case)]
    out = device.alloc(case.count, _DTYPES[BITS[case.out]])
    addresses = [b.address for b in buffers] + [0] * (3 - len(buffers)) + [out.address]
    threads = min(case.count, 256)
    config = LaunchConfig((case.count // threads, 1, 1), (threads, 1, 1))
    kernel = module.kernel(case.entry)
    device.stream.launch(kernel, config, np.array(addresses, np.uint64).tobytes())
    result = out.to_numpy()
    for buffer in [*buffers, out]:
        buffer.close()
    return result
