"""The operator families that reports count by, as data."""

from __future__ import annotations

import functools
from collections.abc import Mapping

OTHER = "other"
"""The family of an operator that is not listed: one that a newer torch brought."""

_FAMILIES: Mapping[str, str] = {
    "pointwise": """
        abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
        bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min complex conj conj_physical copysign
        cos cosh deg2rad div eq exp exp2 expm1 fill float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gt
        heaviside hypot imag isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp le lerp log log10 log1p
        log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked.logaddexp masked_fill
        maximum minimum mul nan_to_num ne neg nextafter polar positive pow rad2deg real reciprocal remainder
        resolve_conj resolve_neg round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub tan tanh
        true_divide trunc where xlogy
        __radd__ __rand__ __rdiv__ __rmod__ __rmul__ __ror__ __rpow__ __rsub__ __rxor__
        jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref
        jiterator_unary
    """,
    "type conversion": """
        bfloat16 bool byte cdouble cfloat chalf char double float half int item long short to
    """,
    "activations": """
        nn.functional.celu nn.functional.elu nn.functional.gelu nn.functional.glu nn.functional.hardshrink
        nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.leaky_relu
        nn.functional.logsigmoid nn.functional.mish nn.functional.prelu nn.functional.relu nn.functional.relu6
        nn.functional.rrelu nn.functional.selu nn.functional.silu nn.functional.softplus nn.functional.softshrink
        nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold
    """,
    "softmax": """
        _softmax_backward_data log_softmax masked.log_softmax masked.softmax masked.softmin nn.functional.softmin
        softmax torch.ops.aten._safe_softmax.default
    """,
    "reduction": """
        all allclose amax amin aminmax any argmax argmin corrcoef count_nonzero cov equal hash_tensor logsumexp
        masked.amax masked.amin masked.argmax masked.argmin masked.logsumexp masked.mean masked.norm masked.prod
        masked.std masked.sum masked.var max mean min nanmean nansum norm prod std std_mean sum sum_to_size trace
        trapezoid trapz var var_mean linalg.vector_norm linalg.norm linalg.matrix_norm dist _segment_reduce
    """,
    "scan": """
        cummax cummin cumprod cumsum cumulative_trapezoid diff gradient logcumsumexp masked.cumprod masked.cumsum
    """,
    "matrix products": """
        __rmatmul__ addbmm addmm addmv addr baddbmm bmm dot einsum inner kron linalg.matrix_power linalg.multi_dot
        linalg.vecdot matmul mm mv nn.functional.bilinear nn.functional.linear outer tensordot torch._scaled_mm
        torch._scaled_mm_v2 vdot
    """,
    "attention": """
        nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention
        torch.ops.aten._efficient_attention_forward torch.ops.aten._flash_attention_forward
    """,
    "linear algebra": """
        cholesky cholesky_inverse cholesky_solve cross geqrf linalg.cholesky linalg.cholesky_ex linalg.cond
        linalg.cross linalg.det linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.householder_product
        linalg.inv linalg.inv_ex linalg.ldl_factor linalg.ldl_factor_ex linalg.ldl_solve linalg.lstsq linalg.lu
        linalg.lu_factor linalg.lu_factor_ex linalg.lu_solve linalg.matrix_rank linalg.pinv linalg.qr linalg.slogdet
        linalg.solve linalg.solve_ex linalg.solve_triangular linalg.svd linalg.svdvals linalg.tensorinv
        linalg.tensorsolve linalg.vander logdet lu lu_solve lu_unpack matrix_exp ormqr pca_lowrank pinverse qr svd
        svd_lowrank triangular_solve
    """,
    "convolution": """
        nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d
        nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.unfold
    """,
    "pooling": """
        max_pool2d_with_indices_backward nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
        nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
        nn.functional.adaptive_max_pool3d nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d
        nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.max_pool1d
        nn.functional.max_pool2d nn.functional.max_pool3d nn.functional.max_unpool1d nn.functional.max_unpool2d
        nn.functional.max_unpool3d
    """,
    "resampling": """
        _upsample_bilinear2d_aa grid_sampler_2d grid_sampler_3d nn.functional.grid_sample nn.functional.interpolate
        nn.functional.upsample_bilinear nn.functional.upsample_nearest
    """,
    "normalization": """
        _batch_norm_with_update _native_batch_norm_legit masked.normalize native_batch_norm native_group_norm
        native_layer_norm nn.functional.batch_norm nn.functional.group_norm nn.functional.instance_norm
        nn.functional.layer_norm nn.functional.local_response_norm nn.functional.normalize nn.functional.rms_norm renorm
    """,
    "indexing": """
        __getitem__ _unsafe_masked_index _unsafe_masked_index_put_accumulate argwhere as_strided_scatter
        diagonal_scatter gather index_add index_copy index_fill index_put index_reduce index_select masked_scatter
        masked_select nn.functional.embedding nn.functional.embedding_bag nn.functional.one_hot nonzero nonzero_static
        put scatter scatter_add scatter_reduce select_scatter slice_scatter take take_along_dim unravel_index
    """,
    "shapes and views": """
        H T alias_copy as_strided as_strided_copy atleast_1d atleast_2d atleast_3d broadcast_shapes broadcast_tensors
        broadcast_to chunk clone contiguous diagonal diagonal_copy dsplit expand expand_as expand_copy flatten hsplit
        linalg.diagonal mH mT movedim narrow narrow_copy permute permute_copy ravel reshape reshape_as resize_
        resize_as_ select slice split split_with_sizes split_with_sizes_copy squeeze squeeze_copy t t_copy
        tensor_split transpose transpose_copy unbind unbind_copy unflatten unfold unfold_copy unsafe_chunk unsafe_split
        unsqueeze unsqueeze_copy view view_as view_as_complex view_as_real view_copy vsplit
    """,
    "joining and rearranging": """
        _chunk_cat block_diag cartesian_prod cat column_stack combinations constant_pad_nd diag diag_embed diagflat
        dstack flip fliplr flipud hstack meshgrid nn.functional.channel_shuffle nn.functional.pad
        nn.functional.pixel_shuffle nn.functional.pixel_unshuffle repeat repeat_interleave roll rot90 stack tile tril
        triu vstack
    """,
    "creation": """
        arange empty empty_like empty_permuted empty_strided eye full full_like linspace logspace new_empty
        new_empty_strided new_full new_ones new_zeros ones ones_like scalar_tensor tril_indices triu_indices zero_ zeros
        zeros_like
        signal.windows.bartlett signal.windows.blackman signal.windows.cosine signal.windows.exponential
        signal.windows.gaussian signal.windows.general_cosine signal.windows.general_hamming signal.windows.hamming
        signal.windows.hann signal.windows.kaiser signal.windows.nuttall
    """,
    "random": """
        bernoulli cauchy exponential geometric log_normal multinomial native_dropout_backward
        nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
        nn.functional.feature_alpha_dropout normal rand_like randint randint_like randn randn_like uniform
    """,
    "sorting and searching": """
        argsort bincount bucketize histc histogram histogramdd isin kthvalue masked.median median mode msort nanmedian
        nanquantile quantile searchsorted sort topk unique unique_consecutive
    """,
    "fft": """
        fft.fft fft.fft2 fft.fftn fft.fftshift fft.hfft fft.hfft2 fft.hfftn fft.ifft fft.ifft2 fft.ifftn fft.ifftshift
        fft.ihfft fft.ihfft2 fft.ihfftn fft.irfft fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn istft stft
    """,
    "special functions": """
        digamma erf erfc erfinv i0 igamma igammac lgamma mvlgamma polygamma special.airy_ai special.bessel_j0
        special.bessel_j1 special.bessel_y0 special.bessel_y1 special.chebyshev_polynomial_t
        special.chebyshev_polynomial_u special.chebyshev_polynomial_v special.chebyshev_polynomial_w special.entr
        special.erfcx special.hermite_polynomial_h special.hermite_polynomial_he special.i0e special.i1 special.i1e
        special.laguerre_polynomial_l special.legendre_polynomial_p special.log_ndtr special.modified_bessel_i0
        special.modified_bessel_i1 special.modified_bessel_k0 special.modified_bessel_k1 special.ndtr special.ndtri
        special.polygamma special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1
        special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u
        special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w special.spherical_bessel_j0
        special.xlog1py special.zeta
    """,
    "losses and distances": """
        cdist nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
        nn.functional.cosine_embedding_loss nn.functional.cosine_similarity nn.functional.cross_entropy
        nn.functional.ctc_loss nn.functional.gaussian_nll_loss nn.functional.hinge_embedding_loss
        nn.functional.huber_loss nn.functional.kl_div nn.functional.l1_loss nn.functional.linear_cross_entropy
        nn.functional.margin_ranking_loss nn.functional.mse_loss nn.functional.multi_margin_loss
        nn.functional.multilabel_margin_loss nn.functional.multilabel_soft_margin_loss nn.functional.nll_loss
        nn.functional.pairwise_distance nn.functional.pdist nn.functional.poisson_nll_loss
        nn.functional.smooth_l1_loss nn.functional.soft_margin_loss nn.functional.triplet_margin_loss
        nn.functional.triplet_margin_with_distance_loss
    """,
    "sparse": """
        sparse.mm sparse.sampled_addmm to_sparse
    """,
}

FAMILIES: tuple[str, ...] = (*_FAMILIES, OTHER)
"""Every family, in the order of reports."""


@functools.cache
def _family_of_names() -> Mapping[str, str]:
    return {name: family for family, names in _FAMILIES.items() for name in names.split()}


def family_of(name: str) -> str:
    """Return the family of an entry of torch's operator database.

    Parameters
    ----------
    name
        As the entry is named, with or without its variant: ``div``, ``div.floor_rounding``.
    """
    known = _family_of_names()
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return known.get(name, OTHER)


def listed_names() -> list[str]:
    """Every name that has a family; a name that is listed twice comes twice."""
    return [name for names in _FAMILIES.values() for name in names.split()]
