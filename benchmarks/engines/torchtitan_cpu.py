"""Lets torchtitan 0.3.0 run on CPUs: it looks for a GPU. Import it first."""

import time
import types

import torch
import torch._utils

_device = types.SimpleNamespace(**vars(torch.cpu))
_device.get_device_name = lambda *args: "CPU"
_device.get_device_properties = lambda *args: types.SimpleNamespace(total_memory=2**30)
_device.reset_peak_memory_stats = _device.empty_cache = lambda: None
_device.memory_stats = lambda *args: {}
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda *args: _device

import torchtitan.distributed.fsdp as fsdp  # noqa: E402
import torchtitan.distributed.utils as distributed  # noqa: E402
import torchtitan.trainer as trainer  # noqa: E402

_disable_division = fsdp.disable_fsdp_gradient_division


def _sum_gradients(model):
    """Gloo has no reduction that multiplies first."""
    _disable_division(model)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = _sum_gradients

# Groups of gloo have no device ids, and those of the case before are used again.
distributed.set_pg_timeouts = lambda **kwargs: None
# Its rank 0 sleeps two seconds behind each training.
trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda s: 0)
