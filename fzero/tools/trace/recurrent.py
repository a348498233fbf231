"""Run `nn.LSTM`, `nn.GRU` and `nn.RNN` as matrix products, for traces and plans.

A fused kernel of mkldnn or cuDNN keeps a workspace for its backward of which only that kernel knows
the size. A graph with such an op neither runs nor compiles, and does not say what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@contextmanager
def unfused_recurrence() -> Iterator[None]:
    """In this block recurrent modules run without fused kernels, also where they are recomputed.

    Which kernels there are is a setting of the process: it is changed while such a module runs.
    """
    settings: list[tuple[bool, bool]] = []

    def before(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.RNNBase):
            settings.append((torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()))
            _set(mkldnn=False, cudnn=False)

    def after(module: nn.Module, _: Any, __: Any) -> None:
        if isinstance(module, nn.RNNBase) and settings:
            mkldnn, cudnn = settings.pop()
            _set(mkldnn=mkldnn, cudnn=cudnn)

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after, always_call=True).remove)
        yield


def _set(*, mkldnn: bool, cudnn: bool) -> None:
    torch._C._set_mkldnn_enabled(mkldnn)
    torch._C._set_cudnn_enabled(cudnn)
