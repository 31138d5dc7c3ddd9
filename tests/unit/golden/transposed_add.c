/* aten::add.Tensor */
static void add_1ac7c35a78(
        const f32 *restrict x0, const f32 *restrict x1, f32 *restrict y0, i64 n0, i64 n1) {
    #pragma omp parallel for collapse(2) if (n1 * n0 > 32768)
    for (i64 i1_0 = 0; i1_0 < n1; i1_0 += 32) {
        for (i64 i0_0 = 0; i0_0 < n0; i0_0 += 32) {
            f32 tile[32][33];
            for (i64 i0 = i0_0; i0 < (i0_0 + 32 < n0 ? i0_0 + 32 : n0); i0++) {
                #pragma omp simd
                for (i64 i1 = i1_0; i1 < (i1_0 + 32 < n1 ? i1_0 + 32 : n1); i1++) {
                    tile[i0 - i0_0][i1 - i1_0] = x1[i0 * n1 + i1];
                }
            }
            f32 tile_turned[32][32];
            transpose_tile(tile, tile_turned);
            for (i64 i1 = i1_0; i1 < (i1_0 + 32 < n1 ? i1_0 + 32 : n1); i1++) {
                #pragma omp simd
                for (i64 i0 = i0_0; i0 < (i0_0 + 32 < n0 ? i0_0 + 32 : n0); i0++) {
                    const f32 add = x0[i0 + i1 * n0] + tile_turned[i1 - i1_0][i0 - i0_0];
                    y0[i0 + i1 * n0] = add;
                }
            }
        }
    }
}
