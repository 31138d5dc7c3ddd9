/* aten::gelu */
__kernel void gelu_10576ff2a2(
        __global const f32 *restrict x0, __global f32 *restrict y0, i64 n0, i64 n1) {
    for (i64 item = (i64)get_global_id(0); item < (i64)n0; item += (i64)get_global_size(0)) {
        const i64 i0_piece = (i64)item;
        const i64 i0_first = i0_piece * 32, i0_end = i0_first + 32 < n1 ? i0_first + 32 : n1;
        for (i64 i0 = i0_first; i0 + 8 <= i0_end; i0 += 8) {
            const f32x8 v = vload8(0, x0 + i0);
            const f32x8 gelu = (v * 0.5f) * (erf(v * 0.70710677f) + 1.0f);
            vstore8(gelu, 0, y0 + i0);
        }
        for (i64 i0 = i0_end / 8 * 8; i0 < i0_end; i0++) {
            const f32 v = x0[i0];
            const f32 gelu = (v * 0.5f) * (erf(v * 0.70710677f) + 1.0f);
            y0[i0] = gelu;
        }
    }
}
