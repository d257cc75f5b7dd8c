"""Say in one line where a model would run."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch

from ..estimator.batches import free_memory
from ..models.loading import pick_device, pick_dtype
from ..models.runtime import device_name


def report_device(
    device: str | torch.device | None = None, dtype: torch.dtype | str | None = None
) -> str:
    """Describe in one line where a model would run: device, dtype, free memory, torch version.

    Warns:
        RuntimeWarning: the machine has an NVIDIA GPU that this torch cannot use. Everything still
            works then, but about a hundred times slower.
    """
    target = pick_device(device)
    name, chosen = device_name(target), pick_dtype(target, dtype, demo=False)
    used = str(chosen).removeprefix("torch.")
    if chosen == "auto":
        used = "float32 for the demo model, else the checkpoint's dtype"
    free = free_memory(target)
    if target.type == "cpu":
        name = f"CPU, {torch.get_num_threads()} threads"
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            warnings.warn(
                f"THIS MACHINE HAS AN NVIDIA DRIVER, BUT TORCH {torch.__version__} CANNOT USE A "
                "GPU: the CPU will be used. Install a CUDA build of torch, or check `nvidia-smi`.",
                RuntimeWarning,
                stacklevel=2,
            )
    return f"{name}; {used}; {free / 1e9:.1f} GB free; torch {torch.__version__}"
