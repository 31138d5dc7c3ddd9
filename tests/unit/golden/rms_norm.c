/* aten::pow.Tensor_Scalar */
/* aten::mean.dim */
/* aten::add.Tensor */
/* aten::rsqrt */
/* aten::mul.Tensor */
static void pow_mean_add_rsqrt_mul_mul_ab9e98abd1(
        const f32 *restrict x0, const f32 *restrict x1, f32 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for if (n0 * n1 > 16384)
    for (i64 i0_0 = 0; i0_0 < n0; i0_0 += 4) {
        f32 sum_of[4];
        for (i64 i0 = i0_0; i0 < i0_0 + 4; i0++) {
            f32 sum_so_far = 0;
            #pragma omp simd reduction(+:sum_so_far)
            for (i64 r0 = 0; r0 < 64; r0++) {
                const f32 v = x0[i0 * n1 + r0];
                const f32 pow_ = v * v;
                sum_so_far += pow_;
            }
            const f32 row_sum = sum_so_far;
            sum_of[i0 - i0_0] = row_sum;
        }
        for (i64 i0 = i0_0; i0 < i0_0 + 4; i0++) {
            const f32 row_sum_1 = sum_of[i0 - i0_0];
            const f32 mean = row_sum_1 / (f32)n1;
            const f32 add = mean + 1e-06f;
            const f32 rsqrt_ = 1.0f / sqrtf(add);
            #pragma omp simd
            for (i64 r0 = 0; r0 < 64; r0++) {
                const f32 mul = x0[i0 * n1 + r0] * rsqrt_;
                const f32 mul_1 = mul * x1[r0];
                y0[i0 * n1 + r0] = mul_1;
            }
        }
    }
}
