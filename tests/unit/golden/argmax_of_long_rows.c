/* aten::argmax */
static void argmax_366705451e(const f32 *restrict x0, i64 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for if (n0 * n1 > 32768)
    for (i64 i0 = 0; i0 < n0; i0++) {
        f32 argmax_value = -INFINITY;
        i32 argmax_place = 0;
        for (i64 r0_0 = 0; r0_0 < n1; r0_0 += 512) {
            const i64 r0_last = r0_0 + 512 < n1 ? r0_0 + 512 : n1;
            f32 max_so_far = -INFINITY;
            i32 max_so_far_nan = 0;
            #pragma omp simd reduction(max:max_so_far) reduction(|:max_so_far_nan)
            for (i64 r0 = r0_0; r0 < r0_last; r0++) {
                const f32 taken = x0[i0 * n1 + r0];
                max_so_far = taken > max_so_far ? taken : max_so_far;
                max_so_far_nan |= taken != taken;
            }
            const f32 block_max = max_so_far_nan ? NAN : max_so_far;
            if ((block_max < argmax_value) | ((argmax_value != argmax_value) & (!(block_max != block_max)))) { continue; }
            i32 min_so_far = 2147483647;
            #pragma omp simd reduction(min:min_so_far)
            for (i64 r0 = r0_0; r0 < r0_last; r0++) {
                const f32 v = x0[i0 * n1 + r0];
                const i32 taken_1 = ((v == block_max) | (v != v)) ? (i32)r0 : 2147483647;
                min_so_far = taken_1 < min_so_far ? taken_1 : min_so_far;
            }
            const i32 block_min = min_so_far;
            const f32 found_value = block_max;
            const i32 found_place = block_min;
            {
                const i32 t = found_value != found_value;
                const i32 t_1 = argmax_value != argmax_value;
                const i32 t_2 = ((found_value > argmax_value) | (t & (!t_1))) | (((argmax_value == found_value) | (t_1 & t)) & (found_place < argmax_place));
                const f32 merged_value = t_2 ? found_value : argmax_value;
                const i32 merged_place = t_2 ? found_place : argmax_place;
                argmax_value = merged_value;
                argmax_place = merged_place;
            }
        }
        const i64 argmax = (i64)argmax_place;
        y0[i0] = argmax;
    }
}
