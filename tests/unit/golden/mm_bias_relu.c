/* aten::mm */
/* aten::add.Tensor */
/* aten::relu */
static void mm_add_relu_e4dbd0d405(
        const f32 *restrict x0, const f32 *restrict x1, const f32 *restrict x2, f32 *restrict y0, i64 n0, i64 n1, i64 n2) {
    f32 bound_00000000 = 0.0f; UNKNOWN(bound_00000000);
    #pragma omp parallel for collapse(2) if (2 * 2 > 8)
    for (i64 bi = 0; bi < 2; bi++) {
        for (i64 bj = 0; bj < 2; bj++) {
            const i64 i_first = bi * 64, i_end = (n0 < i_first + 64 ? n0 : i_first + 64);
            const i64 j_first = bj * 32, j_end = (n1 < j_first + 32 ? n1 : j_first + 32);
            f64 total[2048];
            #pragma omp simd
            for (i64 t = 0; t < 2048; t++) {
                total[t] = 0;
            }
            f32 panel[8192];
            for (i64 p_first = 0; p_first < n2; p_first += 256) {
                const i64 p_end = (n2 < p_first + 256 ? n2 : p_first + 256);
                if (j_end - j_first < 32) {
                    #pragma omp simd
                    for (i64 t = 0; t < (p_end - p_first) * 32; t++) {
                        panel[t] = 0;
                    }
                }
                for (i64 p = p_first; p < p_end; p++) {
                    #pragma omp simd
                    for (i64 j = j_first; j < j_end; j++) {
                        panel[(p - p_first) * 32 + j - j_first] = x1[p * n1 + j];
                    }
                }
                for (i64 i = i_first; i < i_end; i += 8) {
                    const i64 i_1 = (i + 0 < i_end - 1 ? i + 0 : i_end - 1);
                    const i64 i_2 = (i + 1 < i_end - 1 ? i + 1 : i_end - 1);
                    const i64 i_3 = (i + 2 < i_end - 1 ? i + 2 : i_end - 1);
                    const i64 i_4 = (i + 3 < i_end - 1 ? i + 3 : i_end - 1);
                    const i64 i_5 = (i + 4 < i_end - 1 ? i + 4 : i_end - 1);
                    const i64 i_6 = (i + 5 < i_end - 1 ? i + 5 : i_end - 1);
                    const i64 i_7 = (i + 6 < i_end - 1 ? i + 6 : i_end - 1);
                    const i64 i_8 = (i + 7 < i_end - 1 ? i + 7 : i_end - 1);
                    {
                        f32 sum_9[32] = {0};
                        f32 sum_10[32] = {0};
                        f32 sum_11[32] = {0};
                        f32 sum_12[32] = {0};
                        f32 sum_13[32] = {0};
                        f32 sum_14[32] = {0};
                        f32 sum_15[32] = {0};
                        f32 sum_16[32] = {0};
                        for (i64 d = 0; d < p_end - p_first; d++) {
                            const f32 a_17 = x0[i_1 * n2 + (p_first + d)];
                            const f32 a_18 = x0[i_2 * n2 + (p_first + d)];
                            const f32 a_19 = x0[i_3 * n2 + (p_first + d)];
                            const f32 a_20 = x0[i_4 * n2 + (p_first + d)];
                            const f32 a_21 = x0[i_5 * n2 + (p_first + d)];
                            const f32 a_22 = x0[i_6 * n2 + (p_first + d)];
                            const f32 a_23 = x0[i_7 * n2 + (p_first + d)];
                            const f32 a_24 = x0[i_8 * n2 + (p_first + d)];
                            #pragma omp simd
                            for (i64 e = 0; e < 32; e++) {
                                const f32 b = panel[d * 32 + e];
                                sum_9[e] = mad_f32(a_17, b, sum_9[e]);
                                sum_10[e] = mad_f32(a_18, b, sum_10[e]);
                                sum_11[e] = mad_f32(a_19, b, sum_11[e]);
                                sum_12[e] = mad_f32(a_20, b, sum_12[e]);
                                sum_13[e] = mad_f32(a_21, b, sum_13[e]);
                                sum_14[e] = mad_f32(a_22, b, sum_14[e]);
                                sum_15[e] = mad_f32(a_23, b, sum_15[e]);
                                sum_16[e] = mad_f32(a_24, b, sum_16[e]);
                            }
                        }
                        #pragma omp simd
                        for (i64 e = 0; e < 32; e++) {
                            total[(i - i_first + 0) * 32 + e] += sum_9[e];
                            total[(i - i_first + 1) * 32 + e] += sum_10[e];
                            total[(i - i_first + 2) * 32 + e] += sum_11[e];
                            total[(i - i_first + 3) * 32 + e] += sum_12[e];
                            total[(i - i_first + 4) * 32 + e] += sum_13[e];
                            total[(i - i_first + 5) * 32 + e] += sum_14[e];
                            total[(i - i_first + 6) * 32 + e] += sum_15[e];
                            total[(i - i_first + 7) * 32 + e] += sum_16[e];
                        }
                    }
                }
            }
            for (i64 i = i_first; i < i_end; i++) {
                #pragma omp simd
                for (i64 j = j_first; j < j_end; j++) {
                    const f32 made_25 = (f32)total[(i - i_first) * 32 + j - j_first];
                    const i64 at_26 = i;
                    const i64 at_27 = j;
                    {
                        const i64 i0 = at_26;
                        const i64 i1 = at_27;
                        const f32 add = made_25 + x2[i1];
                        const f32 relu = max_bound_f32(add, bound_00000000);
                        y0[i0 * n1 + i1] = relu;
                    }
                }
            }
        }
    }
}
