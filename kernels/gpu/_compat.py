"""Where jax 0.11 and jax 0.12 name the same things of Pallas Mosaic GPU differently."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# As Any: to mypy the first is not exported, and the transforms are abstract.
_GPU: Any = plgpu
ACC = _GPU.ACC


def swizzled(swizzle_bytes: int, itemsize: int) -> tuple[Any, Any]:
    """The transforms of a matrix in shared memory that wgmma reads."""
    return _GPU.TilingTransform((8, swizzle_bytes // itemsize)), _GPU.SwizzleTransform(swizzle_bytes)


def store(ref: Any, value: Any) -> None:
    """`ref[...] = value`, in whatever layout the value has. jax 0.11 has no name for it."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def interpret_params(interpret: Any) -> Any:
    """What `plgpu.kernel` takes as `interpret`, from a bool or the interpreter's parameters."""
    return plgpu.InterpretGPUParams() if interpret is True else interpret or None


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that is compiled for: an H100's or H200's, where there is none here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.num_cores:
        return device.num_cores
    return getattr(_local_gpu(), "core_count", None) or 132


def local_capability() -> str | None:
    """The compute capability of the GPU here; None where there is none, and kernels are compiled for elsewhere."""
    capability = getattr(_local_gpu(), "compute_capability", None)
    return None if capability is None else str(capability)


def _local_gpu() -> Any:
    return jax.local_devices()[0] if jax.default_backend() == "gpu" else None


def reset_interpreter() -> None:
    """Forgets an interpreted kernel that failed, which would make the next one fail too."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()
