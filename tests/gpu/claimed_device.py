"""A GPU of the imagination: tensors in the CPU's memory that claim to lie on a CUDA device, and code that may not mix.

Where there is no GPU, code for one can be run all the same: under `ClaimedDevice`, whoever makes a tensor on "cuda"
gets one that says so, and whatever is computed from it says so too. An operation on such a tensor and an ordinary one
fails; a GPU fails too, or copies the ordinary one each time. Numbers, and tensors without dimensions, may be mixed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)
TO_PYTHON = {"tolist", "item", "__len__", "__bool__", "__int__", "__float__", "__index__"}


class MixedDevices(RuntimeError):
    """An operation on tensors of two devices."""


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors among arguments, also in lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def claim(value: object) -> object:
    """Let every tensor in a value say that it lies on the GPU. Changes: these tensors."""
    for tensor in tensors_in(value):
        tensor.claims_gpu = True
    return value


def claims(tensor: torch.Tensor) -> bool:
    """Whether a tensor says that it lies on the GPU."""
    return getattr(tensor, "claims_gpu", False)


def is_gpu(device: object) -> bool:
    """Whether a device argument names a GPU."""
    return device is not None and torch.device(device).type == "cuda"


class ClaimedDevice(TorchFunctionMode):
    """While it is active, "cuda" is a device; see above.

    Attributes:
        num_launched: kernels that `launching` has let through.
    """

    num_launched = 0

    def __torch_function__(self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None):
        """Call func, and keep account of who claims what. Errors: MixedDevices."""
        with torch._C.DisableTorchFunction():
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Callable, args: tuple, kwargs: dict) -> object:
        """As above; nothing in here is taken account of again."""
        name, owner = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        found = list(tensors_in((args, kwargs)))
        there = [tensor for tensor in found if claims(tensor)]
        if there and name == "__get__" and owner in ("device", "is_cuda"):
            return GPU if owner == "device" else True
        if name in TO_PYTHON:
            return func(*args, **kwargs)
        wanted = kwargs.get("device")
        if is_gpu(wanted):
            kwargs["device"] = "cpu"
        here = [tensor for tensor in found if not claims(tensor) and tensor.dim()]
        if there and here and name != "copy_":
            raise MixedDevices(f"{name} of shapes {[*map(shape_of, there)]} on the GPU, {[*map(shape_of, here)]} not")
        out = func(*args, **kwargs)
        if name == "cpu" or (wanted is not None and not is_gpu(wanted)):
            return out.clone()
        if is_gpu(wanted) and isinstance(out, torch.Tensor):
            out = out.clone()  # a tensor that was as it should be is returned itself, and lies where it lay
        return claim(out) if there or is_gpu(wanted) else out

    def launching(self, kernel):
        """A Triton kernel that is launched if every tensor is on the GPU."""
        mode = self

        class Launched:
            """The kernel, with the same way of calling it."""

            def __getitem__(self, grid: tuple):
                def launch(*args, **options):
                    here = [shape_of(tensor) for tensor in tensors_in(args) if not claims(tensor)]
                    if here:
                        raise MixedDevices(f"a kernel was given tensors that are not on the GPU: {here}")
                    mode.num_launched += 1
                    with torch._C.DisableTorchFunction():
                        kernel[grid](*args, **options)

                return launch

        return Launched()


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A shape, to be printed."""
    return tuple(tensor.shape)
