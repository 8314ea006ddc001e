"""Tensors that lie in files without a name: there a model is made and gathered that no rank has the memory for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

SMALLEST = 2**20  # bytes; many files of fewer would save little


def in_file(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` on the CPU whose memory is a file's: the kernel writes it out where memory is short.

    The file lies in Python's folder for temporary files, and goes with the tensor. A tensor below 1 MiB, or one that
    the disk has no room for, is copied to memory.
    """
    tensor = tensor.detach()
    if tensor.nbytes < SMALLEST:
        return tensor.to("cpu", copy=True)
    try:
        with tempfile.NamedTemporaryFile(prefix="sparkdl-") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk would kill whoever writes to the mapping
            mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except OSError:
        return tensor.to("cpu", copy=True)
    return mapped.view(tensor.shape).copy_(tensor)


def lies_in_file(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is what ``in_file`` gave, or a part of it."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


@contextmanager
def parameters_in_files() -> Iterator[None]:
    """Let each parameter lie in a file that a module is given inside, as ``Linear`` is before it draws its weights.

    What a model changes later the whole of, as ``half()`` does, lies in memory again.
    """

    def move(module: torch.nn.Module, name: str, parameter: Any) -> None:
        is_plain = type(parameter) is torch.nn.Parameter and parameter.layout == torch.strided
        if is_plain and parameter.device.type == "cpu" and parameter.is_contiguous() and not lies_in_file(parameter):
            parameter.data = in_file(parameter.data)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def in_memory(model: torch.nn.Module) -> None:
    """Give every parameter of ``model`` that lies in a file memory of its own, as large as this rank's part of it."""
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                if lies_in_file(parameter):
                    parameter.data = parameter.data.clone()
            elif lies_in_file(local := parameter.to_local().detach()):
                layout = parameter.device_mesh, parameter.placements
                shape, stride = parameter.shape, parameter.stride()
                part = DTensor.from_local(local.clone(), *layout, run_check=False, shape=shape, stride=stride)
                setattr(module, name, torch.nn.Parameter(part, parameter.requires_grad))
