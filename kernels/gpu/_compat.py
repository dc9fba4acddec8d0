"""Where jax 0.11 and jax 0.12 name the same things of Pallas Mosaic GPU differently."""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# As Any: to mypy the first is not exported, and the transforms are abstract.
_GPU: Any = plgpu
ACC = _GPU.ACC
_NEW_NAMES = "out_type" in inspect.signature(plgpu.kernel).parameters


def kernel(body: Any, *, out_type: Any, scratch_types: Any, **options: Any) -> Any:
    """`plgpu.kernel`."""
    if _NEW_NAMES:
        return plgpu.kernel(body, out_type=out_type, scratch_types=scratch_types, **options)
    return plgpu.kernel(body, out_shape=out_type, scratch_shapes=scratch_types, **options)


def swizzled(swizzle_bytes: int, itemsize: int) -> tuple[Any, Any]:
    """The transforms of a matrix in shared memory that wgmma reads."""
    return _GPU.TilingTransform((8, swizzle_bytes // itemsize)), _GPU.SwizzleTransform(swizzle_bytes)


def transposed(ref: Any) -> Any:
    """A view of a matrix in shared memory with its axes exchanged."""
    return ref.transpose((1, 0)) if hasattr(type(ref), "transpose") else plgpu.transpose_ref(ref, (1, 0))


def interpret_params(interpret: Any) -> Any:
    """What `plgpu.kernel` takes as `interpret`, from a bool or the interpreter's parameters."""
    return interpreter_type()() if interpret is True else interpret or None


def interpreter_type() -> Any:
    """`InterpretGPUParams`."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams


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
