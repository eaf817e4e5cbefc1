"""The error message if an OpenCL compiler rejects a kernel."""

from __future__ import annotations

import pytest

from localllm.backends import BackendError

pytest.importorskip("pyopencl")


def test_a_kernel_that_does_not_compile_is_told_by_its_compilers_words() -> None:
    from localllm.backends.opencl.backend import OpenClDevice
    from localllm.backends.opencl.devices import opencl_devices

    try:
        found = opencl_devices()
    except BackendError as error:
        pytest.skip(str(error))
    with pytest.raises(BackendError) as raised:
        OpenClDevice(found[0], None).compile("kernel void broken(", "broken")
    said = str(raised.value)
    assert "its compiler refuses a kernel: " in said
    assert "error" in said.partition("its compiler refuses a kernel: ")[2]
    assert "BUILD_PROGRAM_FAILURE" not in said
    assert "\\n" not in said
