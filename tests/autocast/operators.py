"""An example for each operator that autocast has a rule for, and for others that call some.

Each is a function of a parameter `w` [4, 4], positive definite (of those in `SMALL` it is below 1),
and of a constant `x` [4, 4].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Case = Callable[[Tensor, Tensor], Any]

LEFT_OUT = {
    # no kernel on CPU
    "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
    "cudnn_convolution", "cudnn_convolution_transpose",
    # what nn.LSTM and nn.MultiheadAttention call, which are below
    "mkldnn_rnn_layer", "_cudnn_rnn", "_native_multi_head_attention",
    # a name from before linalg_lu, which is not here any more
    "_lu_with_info",
    # their inputs are integers, or none is a parameter
    "_grid_sampler_2d_cpu_fallback",
}  # fmt: skip


def names(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


_UNARY = names("""acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan
cholesky cholesky_inverse inverse pinverse qr svd trace prod sum geqrf""")
_FFT = names("fft fft2 fftn hfft ifft ifft2 ifftn ihfft irfft irfft2 irfftn rfft rfft2 rfftn")
_LINALG = names("""cholesky cholesky_ex cond eig eigh eigvals eigvalsh inv inv_ex matrix_norm
matrix_rank qr svd svdvals vector_norm""")
_LOSSES = names("""binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss
mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss hinge_embedding_loss""")


SMALL = {"acos", "asin", "erfinv", "linalg.matrix_exp", "exp", "expm1", *_LOSSES}


def _unary(name: str) -> Case:
    return lambda w, x: getattr(torch, name)(w)


def _mapped(fn: Callable[..., Any]) -> Case:
    return lambda w, x: fn(w)


def _loss(name: str) -> Case:
    return lambda w, x: getattr(F, name)(w, x.sigmoid())


def _image(w: Tensor) -> Tensor:
    return w.view(1, 1, 4, 4)


def _volume(w: Tensor) -> Tensor:
    return w.view(1, 1, 2, 2, 4)


LABELS, SIGNS = torch.tensor([0, 3, 1, 2]), torch.tensor([1.0, -1.0, 1.0, -1.0])
ODD = torch.tensor([1.0, 0.5, 0.25, 2.0])

CASES: dict[str, Case] = {
    **{name: _unary(name) for name in _UNARY},
    **{f"fft_{name}": _mapped(getattr(torch.fft, name)) for name in _FFT},
    **{f"linalg_{name}": _mapped(getattr(torch.linalg, name)) for name in _LINALG},
    **{name: _loss(name) for name in _LOSSES},
    # products
    "matmul": lambda w, x: torch.matmul(w, x),
    "mm": lambda w, x: torch.mm(w, x),
    "dist": lambda w, x: torch.dist(w, x),
    "dot": lambda w, x: torch.dot(w[0], x[0]),
    "vdot": lambda w, x: torch.vdot(w[0], x[0]),
    "linalg_vecdot": lambda w, x: torch.linalg.vecdot(w, x),
    "mv": lambda w, x: torch.mv(w, x[0]),
    "addmv": lambda w, x: torch.addmv(w[0], w, x[0]),
    "addr": lambda w, x: torch.addr(w, x[0], x[1]),
    "addmm": lambda w, x: torch.addmm(w, x, w),
    "_addmm_activation": lambda w, x: torch._addmm_activation(w[0], x, w),
    "bmm": lambda w, x: torch.bmm(w[None], x[None]),
    "addbmm": lambda w, x: torch.addbmm(w, x[None], w[None]),
    "baddbmm": lambda w, x: torch.baddbmm(w[None], x[None], w[None]),
    "chain_matmul": lambda w, x: torch.chain_matmul(x, w, x),
    "linalg_multi_dot": lambda w, x: torch.linalg.multi_dot([x, w, x]),
    "linear": lambda w, x: F.linear(x, w, w[0]),
    "einsum": lambda w, x: torch.einsum("ij,jk,ik->i", x, w, x),
    "tensordot": lambda w, x: torch.tensordot(x, w, 1),
    "bilinear": lambda w, x: F.bilinear(x, x, torch.stack([w, w + 1]), w[0, :2]),
    "a bilinear weight": lambda w, x: F.bilinear(x, x, w[None]),
    "cross": lambda w, x: torch.cross(w[:3], x[:3], 0),
    "scaled_dot_product_attention": lambda w, x: F.scaled_dot_product_attention(w, x, w),
    "prelu": lambda w, x: F.prelu(x, w[0]),
    # convolutions and pictures
    "conv1d": lambda w, x: F.conv1d(x[None], w[..., None], w[0]),
    "conv2d": lambda w, x: F.conv2d(_image(x), w.view(4, 1, 2, 2), w[0]),
    "conv3d": lambda w, x: F.conv3d(_volume(x), w.view(1, 1, 2, 2, 4)),
    "conv1d.padding": lambda w, x: F.conv1d(x[None], w[..., None], padding="same"),
    "conv2d.padding": lambda w, x: F.conv2d(_image(x), w.view(4, 1, 2, 2), padding="same"),
    "conv3d.padding": lambda w, x: F.conv3d(_volume(x), w.view(1, 1, 2, 2, 4), padding="same"),
    "conv_transpose1d": lambda w, x: F.conv_transpose1d(x[None], w[..., None]),
    "conv_transpose2d": lambda w, x: F.conv_transpose2d(_image(x), w.view(1, 4, 2, 2)),
    "conv_transpose3d": lambda w, x: F.conv_transpose3d(_volume(x), w.view(1, 1, 2, 2, 4)),
    "conv_tbc": lambda w, x: torch.conv_tbc(x[:, None], w[None], w[0]),
    "convolution": lambda w, x: aten.convolution(
        _image(x), w.view(4, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "_convolution": lambda w, x: torch._convolution(
        _image(x), w.view(4, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False,
        False, False, False,
    ),
    "avg_pool3d": lambda w, x: F.avg_pool3d(_volume(w), 2),
    "adaptive_avg_pool3d": lambda w, x: F.adaptive_avg_pool3d(_volume(w), 1),
    "adaptive_max_pool3d": lambda w, x: F.adaptive_max_pool3d(_volume(w), 1),
    "max_pool3d": lambda w, x: F.max_pool3d(_volume(w), 2),
    "fractional_max_pool2d": lambda w, x: F.fractional_max_pool2d(_image(w), 2, output_size=2),
    "fractional_max_pool3d": lambda w, x: F.fractional_max_pool3d(
        w.view(1, 1, 2, 2, 4), 1, output_size=1
    ),
    "max_unpool2d": lambda w, x: F.max_unpool2d(
        w[None, None, :2, :2], LABELS.view(1, 1, 2, 2), [2, 2]
    ),
    "max_unpool3d": lambda w, x: F.max_unpool3d(
        w[:2, :2].reshape(1, 1, 1, 2, 2), LABELS.view(1, 1, 1, 2, 2), [2, 2, 2]
    ),
    **{f"reflection_pad{n}d": lambda w, x, n=n: F.pad(_image(w)[0] if n == 1 else _image(w),
                                                    (1,) * (2 * n), "reflect") for n in (1, 2)},
    **{f"replication_pad{n}d": lambda w, x, n=n: F.pad(
        {1: w[None], 2: _image(w), 3: _volume(w)}[n], (1,) * (2 * n), "replicate"
    ) for n in (1, 2, 3)},
    **{name: lambda w, x: F.grid_sample(_image(w), x[:2, :2].reshape(1, 1, 2, 2).sigmoid(),
                                        align_corners=False)
       for name in ("grid_sampler", "grid_sampler_2d")},
    "grid_sampler_3d": lambda w, x: F.grid_sample(
        _volume(w), x[0, :3].view(1, 1, 1, 1, 3).sigmoid(), align_corners=False
    ),
    **{f"upsample_{mode}1d": lambda w, x, mode=mode: F.interpolate(w[None], 8, mode=mode)
       for mode in ("nearest", "linear")},
    **{f"upsample_{mode}2d": lambda w, x, mode=mode: F.interpolate(_image(w), 8, mode=mode)
       for mode in ("nearest", "bilinear", "bicubic")},
    **{f"upsample_{mode}3d": lambda w, x, mode=mode: F.interpolate(_volume(w), 8, mode=mode)
       for mode in ("nearest", "trilinear")},
    **{f"_upsample_nearest_exact{n}d": lambda w, x, n=n: F.interpolate(
        {1: w[None], 2: _image(w), 3: _volume(w)}[n], 8, mode="nearest-exact"
    ) for n in (1, 2, 3)},
    **{f"_upsample_{mode}2d_aa": lambda w, x, mode=mode: F.interpolate(
        _image(w), 8, mode=mode, antialias=True
    ) for mode in ("bilinear", "bicubic")},
    "stft": lambda w, x: torch.stft(w.reshape(-1), 4, window=x[0].sigmoid(), return_complex=True),
    "view_as_complex": lambda w, x: torch.view_as_complex(w.view(4, 2, 2)),
    "polar": lambda w, x: torch.polar(w, x),
    # norms and losses
    "layer_norm": lambda w, x: F.layer_norm(x, (4,), w[0], w[1]),
    "native_layer_norm": lambda w, x: torch.native_layer_norm(x, [4], w[0], w[1], 1e-5)[0],
    "group_norm": lambda w, x: F.group_norm(x, 2, w[0], w[1]),
    "rms_norm": lambda w, x: F.rms_norm(x, (4,), w[0]),
    "norm": lambda w, x: torch.norm(w, dim=0),
    "norm.Scalar": lambda w, x: aten.norm.Scalar(w, 2),
    "frobenius_norm": lambda w, x: torch.norm(w, p="fro", dim=(0, 1)),
    "nuclear_norm": lambda w, x: torch.norm(w, p="nuc"),
    "renorm": lambda w, x: torch.renorm(w, 2, 0, 1.0),
    "softmax": lambda w, x: w.softmax(0),
    "log_softmax": lambda w, x: w.log_softmax(0),
    "logsumexp": lambda w, x: torch.logsumexp(w, 0),
    "softplus": lambda w, x: F.softplus(w),
    "cosine_similarity": lambda w, x: F.cosine_similarity(w, x),
    "cosine_embedding_loss": lambda w, x: F.cosine_embedding_loss(w, x, SIGNS),
    "cross_entropy_loss": lambda w, x: F.cross_entropy(w, LABELS),
    "nll_loss": lambda w, x: F.nll_loss(w, LABELS),
    "nll_loss2d": lambda w, x: F.nll_loss(w.view(1, 4, 2, 2), LABELS.view(1, 2, 2)),
    "multi_margin_loss": lambda w, x: F.multi_margin_loss(w, LABELS),
    "multilabel_margin_loss": lambda w, x: F.multilabel_margin_loss(w, LABELS.expand(4, 4)),
    "multilabel_margin_loss_forward": lambda w, x: aten.multilabel_margin_loss_forward(
        w, LABELS.expand(4, 4), 1
    )[0],
    "margin_ranking_loss": lambda w, x: F.margin_ranking_loss(w[0], x[0], SIGNS),
    "triplet_margin_loss": lambda w, x: F.triplet_margin_loss(w, x, x.roll(1)),
    "ctc_loss": lambda w, x: F.ctc_loss(
        w.log_softmax(1)[:, None], LABELS[None, 1:3], torch.tensor([4]), torch.tensor([2])
    ),
    # distances
    "cdist": lambda w, x: torch.cdist(w, x),
    "cdist by products": lambda w, x: torch.cdist(
        w, x, compute_mode="use_mm_for_euclid_dist"
    ),
    "pdist": lambda w, x: F.pdist(w),
    # of several tensors
    "cat": lambda w, x: torch.cat([w, x.bfloat16()]),
    "stack": lambda w, x: torch.stack([w, x.bfloat16()]),
    "index_copy": lambda w, x: w.index_copy(0, LABELS, x),
    "index_put": lambda w, x: w.index_put((LABELS,), x),
    "scatter_add": lambda w, x: w.scatter_add(0, LABELS.expand(4, 4), x),
    "addcdiv": lambda w, x: torch.addcdiv(w, x, x + 3),
    "addcmul": lambda w, x: torch.addcmul(w, x, x),
    "atan2": lambda w, x: torch.atan2(w, x),
    "pow": lambda w, x: (w.pow(2), w.pow(x.sigmoid()), 2**w),
    "cumsum": lambda w, x: w.cumsum(0),
    "cumprod": lambda w, x: w.cumprod(0),
    "quantile": lambda w, x: torch.quantile(w, 0.3, 0),
    "nanquantile": lambda w, x: torch.nanquantile(w, torch.tensor(0.3)),
    "fake_quantize_per_tensor_affine": lambda w, x: torch.fake_quantize_per_tensor_affine(
        w, 0.1, 0, -128, 127
    ),
    # linear algebra of two
    "cholesky_solve": lambda w, x: torch.cholesky_solve(x, w),
    "linalg_solve": lambda w, x: torch.linalg.solve(w, x),
    "linalg_lstsq": lambda w, x: torch.linalg.lstsq(w, x).solution,
    "linalg_householder_product": lambda w, x: torch.linalg.householder_product(w, x[0]),
    "linalg_tensorinv": lambda w, x: torch.linalg.tensorinv(w.view(2, 2, 2, 2)),
    "linalg_tensorsolve": lambda w, x: torch.linalg.tensorsolve(w, x[0]),
    "lu_solve": lambda w, x: torch.lu_solve(x, w, torch.arange(1, 5, dtype=torch.int32)),
    "orgqr": lambda w, x: torch.orgqr(w, x[0]),
    "ormqr": lambda w, x: torch.ormqr(w, ODD, x),
    "triangular_solve": lambda w, x: torch.triangular_solve(x, w)[0],
    # recurrent ones
    "rnn_tanh_cell": lambda w, x: torch.rnn_tanh_cell(x, x, w, w),
    "rnn_relu_cell": lambda w, x: torch.rnn_relu_cell(x, x, w, w),
    "gru_cell": lambda w, x: torch.gru_cell(x, x, w.repeat(3, 1), w.repeat(3, 1)),
    "lstm_cell": lambda w, x: torch.lstm_cell(x, [x, x], w.repeat(4, 1), w.repeat(4, 1))[0],
    # without a rule, and their kernels call what has one
    "linalg.matrix_exp": lambda w, x: torch.linalg.matrix_exp(w),
    "linalg.matrix_power": lambda w, x: torch.linalg.matrix_power(w, 3),
    "corrcoef": lambda w, x: torch.corrcoef(w),
    "weight_norm": lambda w, x: torch._weight_norm(w, w[:, :1]),
    "embedding": lambda w, x: F.embedding(LABELS, w) @ x,
    "a custom operator": lambda w, x: product(w, x),
}  # fmt: skip


@torch.library.custom_op("fzero_tests::product", mutates_args=())
def product(w: Tensor, x: Tensor) -> Tensor:
    """A kernel in Python, as users write them."""
    return (x @ w).float() + w


@product.register_kernel("cpu")
def _(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).float() + w


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, dy: Tensor) -> Any:
    return ctx.saved_tensors[0].t() @ dy + dy, None


product.register_autograd(_backward, setup_context=_save)


def listed(kind: str) -> set[str]:
    """The operators that autocast has a rule for on this kind of device, by their names."""
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    every: Any = torch._C._dispatch_get_all_op_names()
    names = [name for name in every if has(name, f"Autocast{kind}")]
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("aten::")}
