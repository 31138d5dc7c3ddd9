/* aten::silu */
/* aten::mul.Tensor */
static void silu_mul_ca6f0f1e29(
        const bf16 *restrict x0, const bf16 *restrict x1, bf16 *restrict y0, i64 n0) {
    #pragma omp parallel for simd if (n0 > 10922)
    for (i64 i1 = 0; i1 < n0; i1++) {
        const f32 c = load_bf16(x0[i1]);
        const f32 silu = round_bf16(c / (exp_f32(-c) + 1.0f));
        const f32 mul = silu * load_bf16(x1[i1]);
        y0[i1] = store_bf16(mul);
    }
}
