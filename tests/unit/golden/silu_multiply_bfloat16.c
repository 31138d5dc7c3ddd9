/* aten::silu */
/* aten::mul.Tensor */
static void silu_mul_3a96ea001c(
        const bf16 *restrict x0, const bf16 *restrict x1, bf16 *restrict y0, i64 n0) {
    #pragma omp parallel for simd if (n0 > 10922)
    for (i64 i0 = 0; i0 < n0; i0++) {
        const f32 c = load_bf16(x0[i0]);
        const f32 silu = round_bf16(c / one_plus_exp_f32(-c));
        const f32 mul = silu * load_bf16(x1[i0]);
        y0[i0] = store_bf16(mul);
    }
}
