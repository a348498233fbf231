"""Overloads of ATen by their kind. Each line was looked at: pure, exact, and what its kind says.

Not here, and so not proved: what depends on strides (as_strided), what writes memory that its
schema does not name, whose result has a shape by values (nonzero), and what nobody has looked at.
"""

from __future__ import annotations

ELEMENTWISE = """
_conj_physical abs acos acosh addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and.Scalar
bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_or.Scalar bitwise_or.Tensor
bitwise_right_shift.Tensor bitwise_xor.Scalar bitwise_xor.Tensor ceil celu clamp.Tensor
clamp_max.Tensor clamp_max clamp_min.Tensor clamp_min conj_physical copysign.Scalar copysign.Tensor
cos cosh digamma div.Scalar_mode div.Tensor_mode elu elu_backward eq.Scalar erf erfc erfinv exp exp2
expm1 float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor floor floor_divide fmax
fmin fmod.Scalar fmod.Tensor frac ge.Scalar ge.Tensor gelu gelu_backward gt.Scalar gt.Tensor
hardshrink hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
heaviside hypot i0 isfinite isinf isnan isneginf isposinf ldexp.Tensor le.Scalar le.Tensor
leaky_relu leaky_relu_backward lerp.Scalar lerp.Tensor lgamma log log10 log1p log2
log_sigmoid_backward logaddexp logaddexp2 logical_and logical_or logical_xor logit logit_backward
lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor maximum minimum mish mish_backward
nan_to_num native_dropout_backward ne.Tensor polygamma pow.Scalar pow.Tensor_Tensor reciprocal relu
relu6 remainder.Scalar remainder.Scalar_Tensor remainder.Tensor round.decimals round rsqrt selu sgn
sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus softplus_backward
softshrink softshrink_backward special_entr special_erfcx special_log_ndtr special_ndtri
special_xlog1py square tan tanh tanh_backward threshold threshold_backward trunc xlogy.Scalar_Other
xlogy.Scalar_Self xlogy.Tensor
"""

OPAQUE = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
_adaptive_avg_pool3d_backward _cdist_backward _cdist_forward _embedding_bag _embedding_bag_backward
_embedding_bag_dense_backward _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward
_fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _fused_rms_norm_backward _linalg_det _linalg_eigh
_linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax _log_softmax_backward_data _pdist_backward
_pdist_forward _prelu_kernel _prelu_kernel_backward _safe_softmax
_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
_softmax _softmax_backward_data _trilinear _unsafe_index.Tensor _unsafe_index_put
_unsafe_masked_index _unsafe_masked_index_put_accumulate _weight_norm_interface
_weight_norm_interface_backward adaptive_avg_pool1d adaptive_max_pool2d adaptive_max_pool2d_backward
adaptive_max_pool3d adaptive_max_pool3d_backward addbmm addmm addmv addr affine_grid_generator
all.dim all.dims amax amin aminmax any any.dim any.dims arange arange.start arange.start_step argmax
argmin argsort argsort.stable avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d
avg_pool3d_backward baddbmm binary_cross_entropy binary_cross_entropy_backward
binary_cross_entropy_with_logits block_diag bmm bucketize.Tensor cholesky_inverse cholesky_solve
col2im constant_pad_nd convolution convolution_backward count_nonzero count_nonzero.dim_IntList
cummax cummin cumprod cumsum diag_embed diagonal_backward diagonal_scatter dot embedding
embedding_dense_backward eye eye.m flip gather glu glu_backward grid_sampler_2d
grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward histc huber_loss
huber_loss_backward im2col index.Tensor index_add index_copy index_fill.int_Scalar
index_fill.int_Tensor index_put index_select index_select_backward isin.Tensor_Tensor kthvalue
linalg_cholesky_ex linalg_cross linalg_householder_product linalg_inv_ex linalg_lu_factor_ex
linalg_matrix_exp linalg_qr linalg_solve_triangular linspace log_sigmoid_forward logcumsumexp
logspace logsumexp masked_scatter masked_scatter_backward max max.dim max_pool2d_with_indices
max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward mean
mean.dim median median.dim min min.dim mm mode mse_loss mse_loss_backward multi_margin_loss
multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward mv nansum
native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype ormqr pixel_shuffle pixel_unshuffle prod
prod.dim_int put reflection_pad1d reflection_pad1d_backward reflection_pad2d
reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward renorm repeat
repeat_interleave.self_int replication_pad1d replication_pad1d_backward replication_pad2d
replication_pad2d_backward replication_pad3d replication_pad3d_backward roll rot90 scatter.src
scatter.value scatter_add scatter_reduce.two searchsorted.Tensor select_backward select_scatter
slice_backward slice_scatter smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
soft_margin_loss_backward sort sort.stable std.correction std_mean.correction sum.dim_IntList take
topk trace trace_backward triangular_solve tril tril_indices triu triu_indices unfold_backward
upsample_bicubic2d upsample_bicubic2d.vec upsample_bicubic2d_backward upsample_bilinear2d
upsample_bilinear2d.vec upsample_bilinear2d_backward upsample_linear1d upsample_linear1d.vec
upsample_linear1d_backward upsample_nearest1d upsample_nearest1d.vec upsample_nearest1d_backward
upsample_nearest2d upsample_nearest2d.vec upsample_nearest2d_backward upsample_nearest3d
upsample_nearest3d.vec upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d.vec
upsample_trilinear3d_backward value_selecting_reduction_backward var.correction var.dim
var_mean.correction vdot
"""

DRAWS = """
_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _standard_gamma
bernoulli bernoulli.p binomial multinomial native_dropout normal.Tensor_Tensor normal.Tensor_float
normal.float_Tensor normal_functional poisson rand rand_like randint randint.low randint_like
randint_like.low_dtype randn randn_like randperm rrelu_with_noise_functional
"""

WRITES_DRAWS = """
bernoulli_.Tensor bernoulli_.float cauchy_ exponential_ geometric_ log_normal_ normal_ random_
random_.from random_.to uniform_
"""

WRITES_UNKNOWN = f"""
{WRITES_DRAWS} _native_batch_norm_legit addmm_ addmv_ addr_ baddbmm_ cumsum_ index_add_ index_copy_
index_fill_.int_Scalar index_put_ masked_scatter_ scatter_.src scatter_.value scatter_add_
scatter_reduce_.two tril_ triu_
"""

IN_PLACE = """
abs_ add_.Scalar add_.Tensor addcdiv_ addcmul_ ceil_ clamp_ clamp_max_ clamp_min_ cos_ div_.Scalar
div_.Tensor elu_ exp_ floor_ hardtanh_ leaky_relu_ lerp_.Scalar lerp_.Tensor log_
masked_fill_.Scalar masked_fill_.Tensor mul_.Scalar mul_.Tensor neg_ reciprocal_ relu_ round_ rsqrt_
sgn_ sigmoid_ sign_ silu_ sin_ sqrt_ square_ sub_.Scalar sub_.Tensor tanh_
"""

UNWRITTEN = """
empty.memory_format empty_like empty_strided new_empty new_empty_strided
"""

VIEWS = """
_unsafe_view alias detach select.int slice.Tensor split.Tensor split_with_sizes squeeze squeeze.dim
squeeze.dims unsafe_split.Tensor unsafe_split_with_sizes unsqueeze view
"""

MOVES = """
diagonal expand imag permute real t transpose.int unbind.int unfold view_as_complex view_as_real
"""
