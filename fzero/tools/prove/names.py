"""Overloads of ATen by their kind. Each line was looked at: pure, exact, and what its kind says.

Not here, and so not proved: what depends on strides (as_strided), what writes memory that its
schema does not name, whose result has a shape by values (nonzero), and what nobody has looked at.
"""

from __future__ import annotations

ELEMENTWISE = """
_conj_physical.default abs.default acos.default acosh.default addcdiv.default addcmul.default
angle.default asin.default asinh.default atan.default atan2.default atanh.default bitwise_and.Scalar
bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_or.Scalar bitwise_or.Tensor
bitwise_right_shift.Tensor bitwise_xor.Scalar bitwise_xor.Tensor ceil.default celu.default
clamp.Tensor clamp_max.Tensor clamp_max.default clamp_min.Tensor clamp_min.default
conj_physical.default copysign.Scalar copysign.Tensor cos.default cosh.default digamma.default
div.Scalar_mode div.Tensor_mode elu.default elu_backward.default eq.Scalar erf.default erfc.default
erfinv.default exp.default exp2.default expm1.default float_power.Scalar float_power.Tensor_Scalar
float_power.Tensor_Tensor floor.default floor_divide.default fmax.default fmin.default fmod.Scalar
fmod.Tensor frac.default ge.Scalar ge.Tensor gelu.default gelu_backward.default gt.Scalar gt.Tensor
hardshrink.default hardsigmoid.default hardsigmoid_backward.default hardswish.default
hardswish_backward.default hardtanh.default hardtanh_backward.default heaviside.default
hypot.default i0.default isfinite.default isinf.default isnan.default isneginf.default
isposinf.default ldexp.Tensor le.Scalar le.Tensor leaky_relu.default leaky_relu_backward.default
lerp.Scalar lerp.Tensor lgamma.default log.default log10.default log1p.default log2.default
log_sigmoid_backward.default logaddexp.default logaddexp2.default logical_and.default
logical_or.default logical_xor.default logit.default logit_backward.default lt.Scalar lt.Tensor
masked_fill.Scalar masked_fill.Tensor maximum.default minimum.default mish.default
mish_backward.default nan_to_num.default native_dropout_backward.default ne.Tensor polygamma.default
pow.Scalar pow.Tensor_Tensor reciprocal.default relu.default relu6.default remainder.Scalar
remainder.Scalar_Tensor remainder.Tensor round.decimals round.default rsqrt.default selu.default
sgn.default sigmoid.default sigmoid_backward.default sign.default signbit.default silu.default
silu_backward.default sin.default sinc.default sinh.default softplus.default
softplus_backward.default softshrink.default softshrink_backward.default special_entr.default
special_erfcx.default special_log_ndtr.default special_ndtri.default special_xlog1py.default
square.default tan.default tanh.default tanh_backward.default threshold.default
threshold_backward.default trunc.default xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
"""

OPAQUE = """
_adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d.default
_adaptive_avg_pool3d_backward.default _cdist_backward.default _cdist_forward.default
_embedding_bag.default _embedding_bag_backward.default _embedding_bag_dense_backward.default
_embedding_bag_forward_only.default _embedding_bag_per_sample_weights_backward.default
_fft_c2c.default _fft_c2r.default _fft_r2c.default _fused_rms_norm.default
_fused_rms_norm_backward.default _linalg_det.default _linalg_eigh.default _linalg_slogdet.default
_linalg_solve_ex.default _linalg_svd.default _log_softmax.default _log_softmax_backward_data.default
_pdist_backward.default _pdist_forward.default _prelu_kernel.default _prelu_kernel_backward.default
_safe_softmax.default _scaled_dot_product_cudnn_attention_backward.default
_scaled_dot_product_efficient_attention_backward.default
_scaled_dot_product_flash_attention_backward.default
_scaled_dot_product_flash_attention_for_cpu_backward.default _softmax.default
_softmax_backward_data.default _trilinear.default _unsafe_index.Tensor _unsafe_index_put.default
_unsafe_masked_index.default _unsafe_masked_index_put_accumulate.default
_weight_norm_interface.default _weight_norm_interface_backward.default adaptive_avg_pool1d.default
adaptive_max_pool2d.default adaptive_max_pool2d_backward.default adaptive_max_pool3d.default
adaptive_max_pool3d_backward.default addbmm.default addmm.default addmv.default addr.default
affine_grid_generator.default all.dim all.dims amax.default amin.default aminmax.default any.default
any.dim any.dims arange.default arange.start arange.start_step argmax.default argmin.default
argsort.default argsort.stable avg_pool1d.default avg_pool2d.default avg_pool2d_backward.default
avg_pool3d.default avg_pool3d_backward.default baddbmm.default binary_cross_entropy.default
binary_cross_entropy_backward.default binary_cross_entropy_with_logits.default block_diag.default
bmm.default bucketize.Tensor cholesky_inverse.default cholesky_solve.default col2im.default
constant_pad_nd.default convolution.default convolution_backward.default count_nonzero.default
count_nonzero.dim_IntList cummax.default cummin.default cumprod.default cumsum.default
diag_embed.default diagonal_backward.default diagonal_scatter.default dot.default embedding.default
embedding_dense_backward.default eye.default eye.m flip.default gather.default glu.default
glu_backward.default grid_sampler_2d.default grid_sampler_2d_backward.default
grid_sampler_3d.default grid_sampler_3d_backward.default histc.default huber_loss.default
huber_loss_backward.default im2col.default index.Tensor index_add.default index_copy.default
index_fill.int_Scalar index_fill.int_Tensor index_put.default index_select.default
index_select_backward.default isin.Tensor_Tensor kthvalue.default linalg_cholesky_ex.default
linalg_cross.default linalg_householder_product.default linalg_inv_ex.default
linalg_lu_factor_ex.default linalg_matrix_exp.default linalg_qr.default
linalg_solve_triangular.default linspace.default log_sigmoid_forward.default logcumsumexp.default
logspace.default logsumexp.default masked_scatter.default masked_scatter_backward.default
max.default max.dim max_pool2d_with_indices.default max_pool2d_with_indices_backward.default
max_pool3d_with_indices.default max_pool3d_with_indices_backward.default mean.default mean.dim
median.default median.dim min.default min.dim mm.default mode.default mse_loss.default
mse_loss_backward.default multi_margin_loss.default multi_margin_loss_backward.default
multilabel_margin_loss_backward.default multilabel_margin_loss_forward.default mv.default
nansum.default native_batch_norm_backward.default native_group_norm.default
native_group_norm_backward.default native_layer_norm.default native_layer_norm_backward.default
nll_loss2d_backward.default nll_loss2d_forward.default nll_loss_backward.default
nll_loss_forward.default norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype ormqr.default
pixel_shuffle.default pixel_unshuffle.default prod.default prod.dim_int put.default
reflection_pad1d.default reflection_pad1d_backward.default reflection_pad2d.default
reflection_pad2d_backward.default reflection_pad3d.default reflection_pad3d_backward.default
renorm.default repeat.default repeat_interleave.self_int replication_pad1d.default
replication_pad1d_backward.default replication_pad2d.default replication_pad2d_backward.default
replication_pad3d.default replication_pad3d_backward.default roll.default rot90.default scatter.src
scatter.value scatter_add.default scatter_reduce.two searchsorted.Tensor select_backward.default
select_scatter.default slice_backward.default slice_scatter.default smooth_l1_loss.default
smooth_l1_loss_backward.default soft_margin_loss.default soft_margin_loss_backward.default
sort.default sort.stable std.correction std_mean.correction sum.dim_IntList take.default
topk.default trace.default trace_backward.default triangular_solve.default tril.default
tril_indices.default triu.default triu_indices.default unfold_backward.default
upsample_bicubic2d.default upsample_bicubic2d.vec upsample_bicubic2d_backward.default
upsample_bilinear2d.default upsample_bilinear2d.vec upsample_bilinear2d_backward.default
upsample_linear1d.default upsample_linear1d.vec upsample_linear1d_backward.default
upsample_nearest1d.default upsample_nearest1d.vec upsample_nearest1d_backward.default
upsample_nearest2d.default upsample_nearest2d.vec upsample_nearest2d_backward.default
upsample_nearest3d.default upsample_nearest3d.vec upsample_nearest3d_backward.default
upsample_trilinear3d.default upsample_trilinear3d.vec upsample_trilinear3d_backward.default
value_selecting_reduction_backward.default var.correction var.dim var_mean.correction vdot.default
"""

DRAWS = """
_scaled_dot_product_cudnn_attention.default _scaled_dot_product_efficient_attention.default
_scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention_for_cpu.default
_standard_gamma.default bernoulli.default bernoulli.p binomial.default multinomial.default
native_dropout.default normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor
normal_functional.default poisson.default rand.default rand_like.default randint.default randint.low
randint_like.default randint_like.low_dtype randn.default randn_like.default randperm.default
rrelu_with_noise_functional.default
"""

WRITES_DRAWS = """
bernoulli_.Tensor bernoulli_.float cauchy_.default exponential_.default geometric_.default
log_normal_.default normal_.default random_.default random_.from random_.to uniform_.default
"""

WRITES_UNKNOWN = f"""
{WRITES_DRAWS} _native_batch_norm_legit.default addmm_.default addmv_.default addr_.default
baddbmm_.default cumsum_.default index_add_.default index_copy_.default index_fill_.int_Scalar
index_put_.default masked_scatter_.default scatter_.src scatter_.value scatter_add_.default
scatter_reduce_.two tril_.default triu_.default
"""

IN_PLACE = """
abs_.default add_.Scalar add_.Tensor addcdiv_.default addcmul_.default ceil_.default clamp_.default
clamp_max_.default clamp_min_.default cos_.default div_.Scalar div_.Tensor elu_.default exp_.default
floor_.default hardtanh_.default leaky_relu_.default lerp_.Scalar lerp_.Tensor log_.default
masked_fill_.Scalar masked_fill_.Tensor mul_.Scalar mul_.Tensor neg_.default reciprocal_.default
relu_.default round_.default rsqrt_.default sgn_.default sigmoid_.default sign_.default
silu_.default sin_.default sqrt_.default square_.default sub_.Scalar sub_.Tensor tanh_.default
"""

UNWRITTEN = """
empty.memory_format empty_like.default empty_strided.default new_empty.default
new_empty_strided.default
"""

VIEWS = """
_unsafe_view.default alias.default detach.default select.int slice.Tensor split.Tensor
split_with_sizes.default squeeze.default squeeze.dim squeeze.dims unsafe_split.Tensor
unsafe_split_with_sizes.default unsqueeze.default view.default
"""

MOVES = """
diagonal.default expand.default imag.default permute.default real.default t.default transpose.int
unbind.int unfold.default view_as_complex.default view_as_real.default
"""
