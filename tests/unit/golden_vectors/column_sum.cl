/* aten::sum.dim_IntList */
__kernel void sum_61f86c153d(
        __global const f32 *restrict x0, __global f32 *restrict y0, i64 n0, i64 n1, i64 n2, i64 n3, i64 n4) {
    for (i64 item = (i64)get_global_id(0); item < (i64)n0; item += (i64)get_global_size(0)) {
        const i64 i0_vector = (i64)item;
        const i64 i0 = i0_vector * 8;
        f64x8 sum_so_far = (f64x8)(0);
        for (i64 r0_0 = 0; r0_0 < n1; r0_0 += 32) {
            f32x8 sum_so_far_chunk = (f32x8)(0);
            for (i64 r0 = r0_0; r0 < (r0_0 + 32 < n1 ? r0_0 + 32 : n1); r0++) {
                sum_so_far_chunk += vload8(0, x0 + r0 * n2 + i0);
            }
            sum_so_far += convert_double8(sum_so_far_chunk);
        }
        const f32x8 sum = convert_float8(sum_so_far);
        vstore8(sum, 0, y0 + i0);
    }
    for (i64 item = (i64)get_global_id(0); item < (i64)n4; item += (i64)get_global_size(0)) {
        const i64 i0_left = (i64)item;
        const i64 i0 = n3 + i0_left;
        f64 sum_so_far_1 = 0;
        for (i64 r0_0 = 0; r0_0 < n1; r0_0 += 32) {
            f32 sum_so_far_1_chunk = 0;
            for (i64 r0 = r0_0; r0 < (r0_0 + 32 < n1 ? r0_0 + 32 : n1); r0++) {
                sum_so_far_1_chunk += x0[r0 * n2 + i0];
            }
            sum_so_far_1 += sum_so_far_1_chunk;
        }
        const f32 sum_1 = (f32)sum_so_far_1;
        y0[i0] = sum_1;
    }
}
