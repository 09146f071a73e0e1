"""Lets megatron-core 0.16.1 run on CPUs: it names CUDA in places. Import it first."""

import functools

import torch


def _on_cpu(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return run


torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *args: None
torch.cuda.set_device = lambda *args: None
torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, *args: torch.set_rng_state(state)
torch.cuda.manual_seed = torch.manual_seed
torch.Tensor.cuda = lambda self, *args, **kwargs: self
torch.nn.Module.cuda = lambda self, *args: self
for _name in ("tensor", "zeros", "empty", "ones", "full", "zeros_like", "empty_like"):
    setattr(torch, _name, _on_cpu(getattr(torch, _name)))
torch.arange = _on_cpu(torch.arange)


class _FloatTensor:
    def __new__(cls, data):
        return torch.tensor(data, dtype=torch.float)


torch.cuda.FloatTensor = _FloatTensor

import megatron.core.optimizer as optimizers  # noqa: E402
import megatron.core.optimizer.clip_grads as clip_grads  # noqa: E402
import megatron.core.optimizer.optimizer as optimizer  # noqa: E402
import megatron.core.tensor_parallel.random as random  # noqa: E402

random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
_type = torch.Tensor.type


def _called_cuda(function):
    """Gradients must be torch.cuda.FloatTensor."""

    def name(self, *args, **kwargs):
        if args or kwargs:
            return _type(self, *args, **kwargs)
        return _type(self).replace("torch.", "torch.cuda.")

    @functools.wraps(function)
    def run(*args, **kwargs):
        torch.Tensor.type = name
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = _type

    return run


clip = _called_cuda(clip_grads.clip_grad_by_total_norm_fp32)
clip_grads.clip_grad_by_total_norm_fp32 = clip
optimizer.clip_grad_by_total_norm_fp32 = clip
optimizers.get_megatron_optimizer = _called_cuda(optimizers.get_megatron_optimizer)
