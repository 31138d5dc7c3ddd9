/* aten::mul.Tensor */
/* aten::neg */
/* aten::cat */
/* aten::add.Tensor */
static void mul_neg_cat_mul_add_90d26cf1f8(
        const f32 *restrict x0, const f32 *restrict x1, const f32 *restrict x2, const f32 *restrict x3,
        const f32 *restrict x4, f32 *restrict y0, i64 n0, i64 n1, i64 n2, i64 n3, i64 n4) {
    #pragma omp parallel for collapse(2) if (n3 * n4 * n1 > 32768)
    for (i64 i0 = 0; i0 < n3; i0++) {
        for (i64 i1 = 0; i1 < n4; i1++) {
            #pragma omp simd
            for (i64 i2 = 0; i2 < n1; i2++) {
                const f32 mul = x0[i0 * n0 + i1 * n1 + i2] * x1[i1 * n1 + i2];
                const i32 t = i2 < n2;
                const f32 neg = -(t ? x2[i0 * n0 + i1 * n1 + i2] : 0.0f);
                const f32 cat = t ? neg : x3[i0 * n0 + i1 * n1 + i2 - n2];
                const f32 mul_1 = cat * x4[i1 * n1 + i2];
                const f32 add = mul + mul_1;
                y0[i0 * n0 + i1 * n1 + i2] = add;
            }
        }
    }
}
