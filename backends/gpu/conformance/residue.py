"""Fill the local memory of a device with a bit pattern, to detect kernels that read what an earlier kernel left."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.backends.gpu.device import Device
from localllm.backends.gpu.kernels.signatures import source_text

NAN, ODD = 0x7FC00000, 0x41973C5A  # bit patterns for memory that no kernel may read: NaN, then 18.9


class Residue:
    """Fills the local memory of a device with a bit pattern for the next kernel to find."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._groups = 16 if device.facts.compute == "CPU" else GROUPS
        kernel = device.compile(*residue_kernel(device))
        self._buffers: list[Any] = []  # the input pattern and the output
        try:
            for length in (4, 4 * GROUPS):
                self._buffers.append(device.alloc(length, "a check"))
            self._launch = device.prepare(kernel, 128, _filled(device), self._buffers)
        except BaseException:
            self.close()
            raise

    def leave(self, bits: int) -> None:
        self._device.upload(self._buffers[0], 0, np.array([bits], np.uint32))
        self._launch((self._groups, 1, 1))

    def close(self) -> None:
        for buffer in self._buffers:
            self._device.free(buffer)


def _filled(device: Device) -> int:
    """Return the number of local memory bytes to fill."""
    return min(device.facts.local_memory, LOCAL)


def residue_kernel(device: Device) -> tuple[str, str]:
    """Return the source and the name of the kernel that fills local memory."""
    return f"#define COUNT {_filled(device) // 4}\n{source_text('prelude')}{LEAVE}", "leave"


GROUPS = 1024  # more work-groups than any GPU runs at a time
LOCAL = 48 << 10  # maximum bytes to fill
LEAVE = """
KERNEL(128, leave)(GLOBAL const int *number, GLOBAL int *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL int *s = (LOCAL int *)local_memory;
  for (int i = ITEM; i < COUNT; i += 128) s[i] = number[0];
  BARRIER();
  if (s[(37 * ITEM + GROUP_X) % COUNT] != number[0]) y[GROUP_X] = 1;  // so that no compiler leaves out the stores
}
"""
