/* aten::convolution */
static void convolution_bd83f03c72(
        const f32 *restrict x0, const f32 *restrict x1, const f32 *restrict x2, f32 *restrict y0, i64 n0, i64 n1, i64 n2,
        i64 n3, i64 n4, i64 n5, i64 n6, i64 n7, i64 n8, i64 n9) {
    #pragma omp parallel for collapse(3) if (1 * 1 * n3 > 2)
    for (i64 g = 0; g < 1; g++) {
        for (i64 bi = 0; bi < 1; bi++) {
            for (i64 bj = 0; bj < n3; bj++) {
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
                    for (i64 s_1 = j_first, l_2; s_1 < j_end; s_1 += l_2) {
                        const i64 c_3 = s_1 % n4, r_4 = s_1 / n4;
                        const i64 c_5 = r_4 % n5, r_6 = r_4 / n5;
                        l_2 = ((n4 - c_3) < (j_end - s_1) ? (n4 - c_3) : (j_end - s_1));
                        for (i64 p = p_first; p < p_end; p++) {
                            const i64 c_7 = p % 3, r_8 = p / 3;
                            const i64 c_9 = r_8 % 3, r_10 = r_8 / 3;
                            #pragma omp simd
                            for (i64 u_11 = 0; u_11 < l_2; u_11++) {
                                const i64 j = s_1 + u_11, c_12 = c_3 + u_11;
                                panel[(p - p_first) * 32 + j - j_first] = (((u64)(c_5 * 1 + c_9 * 1 - 1) < (u64)n5) & ((u64)(c_12 * 1 + c_7 * 1 - 1) < (u64)n4) ? x0[r_6 * n7 + (g * n6 + r_10) * n8 + ((c_5 * 1 + c_9 * 1 - 1)) * n4 + ((c_12 * 1 + c_7 * 1 - 1))] : 0);
                            }
                        }
                    }
                    for (i64 i = i_first; i < i_end; i += 8) {
                        const i64 i_13 = (i + 0 < i_end - 1 ? i + 0 : i_end - 1);
                        const i64 i_14 = (i + 1 < i_end - 1 ? i + 1 : i_end - 1);
                        const i64 i_15 = (i + 2 < i_end - 1 ? i + 2 : i_end - 1);
                        const i64 i_16 = (i + 3 < i_end - 1 ? i + 3 : i_end - 1);
                        const i64 i_17 = (i + 4 < i_end - 1 ? i + 4 : i_end - 1);
                        const i64 i_18 = (i + 5 < i_end - 1 ? i + 5 : i_end - 1);
                        const i64 i_19 = (i + 6 < i_end - 1 ? i + 6 : i_end - 1);
                        const i64 i_20 = (i + 7 < i_end - 1 ? i + 7 : i_end - 1);
                        {
                            f32 sum_21[32] = {0};
                            f32 sum_22[32] = {0};
                            f32 sum_23[32] = {0};
                            f32 sum_24[32] = {0};
                            f32 sum_25[32] = {0};
                            f32 sum_26[32] = {0};
                            f32 sum_27[32] = {0};
                            f32 sum_28[32] = {0};
                            for (i64 d = 0; d < p_end - p_first; d++) {
                                const f32 a_29 = x1[(g * n0 + i_13) * n2 + p_first + d];
                                const f32 a_30 = x1[(g * n0 + i_14) * n2 + p_first + d];
                                const f32 a_31 = x1[(g * n0 + i_15) * n2 + p_first + d];
                                const f32 a_32 = x1[(g * n0 + i_16) * n2 + p_first + d];
                                const f32 a_33 = x1[(g * n0 + i_17) * n2 + p_first + d];
                                const f32 a_34 = x1[(g * n0 + i_18) * n2 + p_first + d];
                                const f32 a_35 = x1[(g * n0 + i_19) * n2 + p_first + d];
                                const f32 a_36 = x1[(g * n0 + i_20) * n2 + p_first + d];
                                #pragma omp simd
                                for (i64 e = 0; e < 32; e++) {
                                    const f32 b = panel[d * 32 + e];
                                    sum_21[e] = mad_f32(a_29, b, sum_21[e]);
                                    sum_22[e] = mad_f32(a_30, b, sum_22[e]);
                                    sum_23[e] = mad_f32(a_31, b, sum_23[e]);
                                    sum_24[e] = mad_f32(a_32, b, sum_24[e]);
                                    sum_25[e] = mad_f32(a_33, b, sum_25[e]);
                                    sum_26[e] = mad_f32(a_34, b, sum_26[e]);
                                    sum_27[e] = mad_f32(a_35, b, sum_27[e]);
                                    sum_28[e] = mad_f32(a_36, b, sum_28[e]);
                                }
                            }
                            #pragma omp simd
                            for (i64 e = 0; e < 32; e++) {
                                total[(i - i_first + 0) * 32 + e] += sum_21[e];
                                total[(i - i_first + 1) * 32 + e] += sum_22[e];
                                total[(i - i_first + 2) * 32 + e] += sum_23[e];
                                total[(i - i_first + 3) * 32 + e] += sum_24[e];
                                total[(i - i_first + 4) * 32 + e] += sum_25[e];
                                total[(i - i_first + 5) * 32 + e] += sum_26[e];
                                total[(i - i_first + 6) * 32 + e] += sum_27[e];
                                total[(i - i_first + 7) * 32 + e] += sum_28[e];
                            }
                        }
                    }
                }
                for (i64 i = i_first; i < i_end; i++) {
                    for (i64 s_37 = j_first, l_38; s_37 < j_end; s_37 += l_38) {
                        const i64 c_39 = s_37 % n4, r_40 = s_37 / n4;
                        const i64 c_41 = r_40 % n5, r_42 = r_40 / n5;
                        l_38 = ((n4 - c_39) < (j_end - s_37) ? (n4 - c_39) : (j_end - s_37));
                        #pragma omp simd
                        for (i64 u_43 = 0; u_43 < l_38; u_43++) {
                            const i64 j = s_37 + u_43, c_44 = c_39 + u_43;
                            y0[r_42 * n9 + (g * n0 + i) * n8 + c_41 * n4 + c_44] = (f32)((f32)total[(i - i_first) * 32 + j - j_first] + x2[(g * n0 + i)]);
                        }
                    }
                }
            }
        }
    }
}
