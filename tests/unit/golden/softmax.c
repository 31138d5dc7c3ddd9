/* aten::_softmax */
static void softmax_2d46c57e3f(const f32 *restrict x0, f32 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for if (n0 * n1 > 10922)
    for (i64 i0 = 0; i0 < n0; i0++) {
        f32 kept[n1];
        f32 max_so_far = -INFINITY;
        i32 max_so_far_nan = 0;
        #pragma omp simd reduction(max:max_so_far) reduction(|:max_so_far_nan)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 taken = x0[i0 * n1 + r0];
            max_so_far = taken > max_so_far ? taken : max_so_far;
            max_so_far_nan |= taken != taken;
        }
        const f32 row_max = max_so_far_nan ? NAN : max_so_far;
        f32 sum_so_far = 0;
        #pragma omp simd reduction(+:sum_so_far)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 t = exp_f32(x0[i0 * n1 + r0] - row_max);
            kept[r0] = t;
            sum_so_far += t;
        }
        const f32 row_sum = sum_so_far;
        #pragma omp simd
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 softmax = kept[r0] / row_sum;
            y0[i0 * n1 + r0] = softmax;
        }
    }
}
