/* aten::mul.Tensor */
/* aten::scalar_tensor */
/* aten::where.self */
/* aten::_softmax */
static void mul_scalar_tensor_where_softmax_1a884534b7(
        const f32 *restrict x0, const b8 *restrict x1, f32 *restrict y0, i64 n0, i64 n1, i64 n2, i64 n3) {
    #pragma omp parallel for collapse(2) if (n0 * n1 * n2 > 10922)
    for (i64 i0 = 0; i0 < n0; i0++) {
        for (i64 i1 = 0; i1 < n1; i1++) {
            f32 kept[n2];
            f32 fmax_so_far = -INFINITY;
            #pragma omp simd reduction(max:fmax_so_far)
            for (i64 r0 = 0; r0 < n2; r0++) {
                const f32 mul = x0[i0 * n3 + i1 * n2 + r0] * 0.125f;
                const f32 where = (x1[i1 * n2 + r0] != 0) ? mul : (-INFINITY);
                fmax_so_far = where > fmax_so_far ? where : fmax_so_far;
            }
            const f32 row_fmax = fmax_so_far;
            f32 sum_so_far = 0;
            #pragma omp simd reduction(+:sum_so_far)
            for (i64 r0 = 0; r0 < n2; r0++) {
                const f32 mul = x0[i0 * n3 + i1 * n2 + r0] * 0.125f;
                const f32 where = (x1[i1 * n2 + r0] != 0) ? mul : (-INFINITY);
                const f32 t = exp_f32(where - row_fmax);
                kept[r0] = t;
                sum_so_far += t;
            }
            const f32 row_sum = sum_so_far;
            const f32 t_1 = 1.0f / row_sum;
            #pragma omp simd
            for (i64 r0 = 0; r0 < n2; r0++) {
                const f32 softmax = kept[r0] * t_1;
                y0[i0 * n3 + i1 * n2 + r0] = softmax;
            }
        }
    }
}
