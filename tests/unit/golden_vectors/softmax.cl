/* aten::_softmax */
__kernel void softmax_af80ad67c8(
        __global const f32 *restrict x0, __global f32 *restrict y0, i64 n0, i64 n1) {
    for (i64 item = (i64)get_global_id(0); item < (i64)n0; item += (i64)get_global_size(0)) {
        const i64 i0 = (i64)item;
        f32 fmax_so_far = -INFINITY;
        f32x8 fmax_so_far_lanes = (f32x8)(-INFINITY);
        for (i64 r0 = 0; r0 + 8 <= n1; r0 += 8) {
            const f32x8 taken = vload8(0, x0 + i0 * n1 + r0);
            fmax_so_far_lanes = select(fmax_so_far_lanes, taken, taken > fmax_so_far_lanes);
        }
        const f32 fmax_so_far_lanes_lane = max_lanes_f32(fmax_so_far_lanes);
        fmax_so_far = fmax_so_far_lanes_lane > fmax_so_far ? fmax_so_far_lanes_lane : fmax_so_far;
        const f32 row_fmax = fmax_so_far;
        f32 sum_so_far = 0;
        f32x8 sum_so_far_lanes = (f32x8)(0);
        for (i64 r0 = 0; r0 + 8 <= n1; r0 += 8) {
            sum_so_far_lanes += exp(vload8(0, x0 + i0 * n1 + r0) - row_fmax);
        }
        sum_so_far += sum_lanes_f32(sum_so_far_lanes);
        const f32 row_sum = sum_so_far;
        const f32 t = 1.0f / row_sum;
        for (i64 r0 = 0; r0 + 8 <= n1; r0 += 8) {
            const f32x8 softmax = exp(vload8(0, x0 + i0 * n1 + r0) - row_fmax) * t;
            vstore8(softmax, 0, y0 + i0 * n1 + r0);
        }
    }
}
