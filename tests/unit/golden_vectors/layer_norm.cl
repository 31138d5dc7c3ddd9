/* aten::native_layer_norm */
__kernel void native_layer_norm_6fd52c01cb(
        __global const f32 *restrict x0, __global const f32 *restrict x1, __global const f32 *restrict x2,
        __global f32 *restrict y0, i64 n0, i64 n1) {
    for (i64 item = (i64)get_global_id(0); item < (i64)n0; item += (i64)get_global_size(0)) {
        const i64 i0 = (i64)item;
        f32 sum_so_far = 0;
        f32x8 sum_so_far_lanes = (f32x8)(0);
        for (i64 r0 = 0; r0 + 8 <= n1; r0 += 8) {
            sum_so_far_lanes += vload8(0, x0 + i0 * n1 + r0);
        }
        for (i64 r0 = n1 / 8 * 8; r0 < n1; r0++) {
            sum_so_far += x0[i0 * n1 + r0];
        }
        sum_so_far += sum_lanes_f32(sum_so_far_lanes);
        const f32 row_sum = sum_so_far;
        const f32 t = row_sum / (f32)n1;
        f32 sum_so_far_1 = 0;
        f32x8 sum_so_far_1_lanes = (f32x8)(0);
        for (i64 r0 = 0; r0 + 8 <= n1; r0 += 8) {
            const f32x8 t_1 = vload8(0, x0 + i0 * n1 + r0) - t;
            sum_so_far_1_lanes += t_1 * t_1;
        }
        for (i64 r0 = n1 / 8 * 8; r0 < n1; r0++) {
            const f32 t_1 = x0[i0 * n1 + r0] - t;
            sum_so_far_1 += t_1 * t_1;
        }
        sum_so_far_1 += sum_lanes_f32(sum_so_far_1_lanes);
        const f32 row_sum_1 = sum_so_far_1;
        const f32 t_2 = 1.0f / sqrt((row_sum_1 / (f32)n1) + 1e-05f);
        for (i64 r0 = 0; r0 + 8 <= n1; r0 += 8) {
            const f32x8 native_layer_norm = vload8(0, x1 + r0) + (((vload8(0, x0 + i0 * n1 + r0) - t) * t_2) * vload8(0, x2 + r0));
            vstore8(native_layer_norm, 0, y0 + i0 * n1 + r0);
        }
        for (i64 r0 = n1 / 8 * 8; r0 < n1; r0++) {
            const f32 native_layer_norm = x1[r0] + (((x0[i0 * n1 + r0] - t) * t_2) * x2[r0]);
            y0[i0 * n1 + r0] = native_layer_norm;
        }
    }
}
