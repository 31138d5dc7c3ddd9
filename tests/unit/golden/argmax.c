/* aten::argmax */
static void argmax_32ed6d5ebc(const f32 *restrict x0, i64 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for if (n0 * n1 > 16384)
    for (i64 i0 = 0; i0 < n0; i0++) {
        f32 max_so_far = -INFINITY;
        i32 max_so_far_nan = 0;
        #pragma omp simd reduction(max:max_so_far) reduction(|:max_so_far_nan)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 taken = x0[i0 * n1 + r0];
            max_so_far = taken > max_so_far ? taken : max_so_far;
            max_so_far_nan |= taken != taken;
        }
        const f32 row_max = max_so_far_nan ? NAN : max_so_far;
        i32 min_so_far = 2147483647;
        #pragma omp simd reduction(min:min_so_far)
        for (i64 r0 = 0; r0 < n1; r0++) {
            const f32 v = x0[i0 * n1 + r0];
            const i32 taken_1 = ((v == row_max) | (v != v)) ? (i32)r0 : 2147483647;
            min_so_far = taken_1 < min_so_far ? taken_1 : min_so_far;
        }
        const i32 row_min = min_so_far;
        const i64 argmax = (i64)row_min;
        y0[i0] = argmax;
    }
}
