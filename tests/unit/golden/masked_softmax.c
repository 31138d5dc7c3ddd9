/* aten::mul.Tensor */
/* aten::scalar_tensor */
/* aten::where.self */
/* aten::_softmax */
static void mul_scalar_tensor_where__softmax_11b406b724(
        const f32 *restrict x0, const b8 *restrict x1, f32 *restrict y0, i64 n0, i64 n1, i64 n2, i64 n3) {
    #pragma omp parallel for collapse(2) if (n0 * n1 * n2 > 10922)
    for (i64 i0 = 0; i0 < n0; i0++) {
        for (i64 i1 = 0; i1 < n1; i1++) {
            f32 kept[n2];
            f32 max_so_far = -INFINITY;
            i32 max_so_far_nan = 0;
            #pragma omp simd reduction(max:max_so_far) reduction(|:max_so_far_nan)
            for (i64 r0 = 0; r0 < n2; r0++) {
                const f32 mul = x0[i0 * n3 + i1 * n2 + r0] * 0.125f;
                const f32 where = (x1[i1 * n2 + r0] != 0) ? mul : (-INFINITY);
                max_so_far = where > max_so_far ? where : max_so_far;
                max_so_far_nan |= where != where;
            }
            const f32 row_max = max_so_far_nan ? NAN : max_so_far;
            f32 sum_so_far = 0;
            #pragma omp simd reduction(+:sum_so_far)
            for (i64 r0 = 0; r0 < n2; r0++) {
                const f32 mul = x0[i0 * n3 + i1 * n2 + r0] * 0.125f;
                const f32 where = (x1[i1 * n2 + r0] != 0) ? mul : (-INFINITY);
                const f32 t = exp_f32(where - row_max);
                kept[r0] = t;
                sum_so_far += t;
            }
            const f32 row_sum = sum_so_far;
            #pragma omp simd
            for (i64 r0 = 0; r0 < n2; r0++) {
                const f32 softmax = kept[r0] / row_sum;
                y0[i0 * n3 + i1 * n2 + r0] = softmax;
            }
        }
    }
}
