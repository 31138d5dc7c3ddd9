/* aten::mm */
/* aten::add.Tensor */
/* aten::gelu */
__kernel void mm_add_gelu_07124f2331(
        __global const f32 *restrict x0, __global const f32 *restrict x1, __global const f32 *restrict x2,
        __global f32 *restrict y0, i64 n0, i64 n1, i64 n2) {
    for (i64 item = (i64)get_global_id(0); item < (i64)2 * (i64)2; item += (i64)get_global_size(0)) {
        const i64 bj = (i64)(item % 2);
        const i64 above_bj = item / 2;
        const i64 bi = (i64)above_bj;
        const i64 i_first = bi * 64, i_end = (n0 < i_first + 64 ? n0 : i_first + 64);
        const i64 j_first = bj * 32, j_end = (n1 < j_first + 32 ? n1 : j_first + 32);
        f64 total[2048];
        for (i64 t = 0; t < 2048; t++) {
            total[t] = 0;
        }
        f32 panel[8192];
        for (i64 p_first = 0; p_first < n2; p_first += 256) {
            const i64 p_end = (n2 < p_first + 256 ? n2 : p_first + 256);
            if (j_end - j_first < 32) {
                for (i64 t = 0; t < (p_end - p_first) * 32; t++) {
                    panel[t] = 0;
                }
            }
            for (i64 p = p_first; p < p_end; p++) {
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
                    f32x8 sum_9 = (f32x8)(0);
                    f32x8 sum_10 = (f32x8)(0);
                    f32x8 sum_11 = (f32x8)(0);
                    f32x8 sum_12 = (f32x8)(0);
                    f32x8 sum_13 = (f32x8)(0);
                    f32x8 sum_14 = (f32x8)(0);
                    f32x8 sum_15 = (f32x8)(0);
                    f32x8 sum_16 = (f32x8)(0);
                    f32x8 sum_17 = (f32x8)(0);
                    f32x8 sum_18 = (f32x8)(0);
                    f32x8 sum_19 = (f32x8)(0);
                    f32x8 sum_20 = (f32x8)(0);
                    f32x8 sum_21 = (f32x8)(0);
                    f32x8 sum_22 = (f32x8)(0);
                    f32x8 sum_23 = (f32x8)(0);
                    f32x8 sum_24 = (f32x8)(0);
                    f32x8 sum_25 = (f32x8)(0);
                    f32x8 sum_26 = (f32x8)(0);
                    f32x8 sum_27 = (f32x8)(0);
                    f32x8 sum_28 = (f32x8)(0);
                    f32x8 sum_29 = (f32x8)(0);
                    f32x8 sum_30 = (f32x8)(0);
                    f32x8 sum_31 = (f32x8)(0);
                    f32x8 sum_32 = (f32x8)(0);
                    f32x8 sum_33 = (f32x8)(0);
                    f32x8 sum_34 = (f32x8)(0);
                    f32x8 sum_35 = (f32x8)(0);
                    f32x8 sum_36 = (f32x8)(0);
                    f32x8 sum_37 = (f32x8)(0);
                    f32x8 sum_38 = (f32x8)(0);
                    f32x8 sum_39 = (f32x8)(0);
                    f32x8 sum_40 = (f32x8)(0);
                    for (i64 d = 0; d < p_end - p_first; d++) {
                        const f32x8 b_41 = vload8(0, &panel[d * 32 + 0]);
                        const f32x8 b_42 = vload8(0, &panel[d * 32 + 8]);
                        const f32x8 b_43 = vload8(0, &panel[d * 32 + 16]);
                        const f32x8 b_44 = vload8(0, &panel[d * 32 + 24]);
                        const f32x8 a_45 = (f32x8)(x0[i_1 * n2 + (p_first + d)]);
                        sum_9 = mad_f32x8(a_45, b_41, sum_9);
                        sum_10 = mad_f32x8(a_45, b_42, sum_10);
                        sum_11 = mad_f32x8(a_45, b_43, sum_11);
                        sum_12 = mad_f32x8(a_45, b_44, sum_12);
                        const f32x8 a_46 = (f32x8)(x0[i_2 * n2 + (p_first + d)]);
                        sum_13 = mad_f32x8(a_46, b_41, sum_13);
                        sum_14 = mad_f32x8(a_46, b_42, sum_14);
                        sum_15 = mad_f32x8(a_46, b_43, sum_15);
                        sum_16 = mad_f32x8(a_46, b_44, sum_16);
                        const f32x8 a_47 = (f32x8)(x0[i_3 * n2 + (p_first + d)]);
                        sum_17 = mad_f32x8(a_47, b_41, sum_17);
                        sum_18 = mad_f32x8(a_47, b_42, sum_18);
                        sum_19 = mad_f32x8(a_47, b_43, sum_19);
                        sum_20 = mad_f32x8(a_47, b_44, sum_20);
                        const f32x8 a_48 = (f32x8)(x0[i_4 * n2 + (p_first + d)]);
                        sum_21 = mad_f32x8(a_48, b_41, sum_21);
                        sum_22 = mad_f32x8(a_48, b_42, sum_22);
                        sum_23 = mad_f32x8(a_48, b_43, sum_23);
                        sum_24 = mad_f32x8(a_48, b_44, sum_24);
                        const f32x8 a_49 = (f32x8)(x0[i_5 * n2 + (p_first + d)]);
                        sum_25 = mad_f32x8(a_49, b_41, sum_25);
                        sum_26 = mad_f32x8(a_49, b_42, sum_26);
                        sum_27 = mad_f32x8(a_49, b_43, sum_27);
                        sum_28 = mad_f32x8(a_49, b_44, sum_28);
                        const f32x8 a_50 = (f32x8)(x0[i_6 * n2 + (p_first + d)]);
                        sum_29 = mad_f32x8(a_50, b_41, sum_29);
                        sum_30 = mad_f32x8(a_50, b_42, sum_30);
                        sum_31 = mad_f32x8(a_50, b_43, sum_31);
                        sum_32 = mad_f32x8(a_50, b_44, sum_32);
                        const f32x8 a_51 = (f32x8)(x0[i_7 * n2 + (p_first + d)]);
                        sum_33 = mad_f32x8(a_51, b_41, sum_33);
                        sum_34 = mad_f32x8(a_51, b_42, sum_34);
                        sum_35 = mad_f32x8(a_51, b_43, sum_35);
                        sum_36 = mad_f32x8(a_51, b_44, sum_36);
                        const f32x8 a_52 = (f32x8)(x0[i_8 * n2 + (p_first + d)]);
                        sum_37 = mad_f32x8(a_52, b_41, sum_37);
                        sum_38 = mad_f32x8(a_52, b_42, sum_38);
                        sum_39 = mad_f32x8(a_52, b_43, sum_39);
                        sum_40 = mad_f32x8(a_52, b_44, sum_40);
                    }
                    vstore8(vload8(0, &total[(i - i_first + 0) * 32 + 0]) + convert_double8(sum_9), 0, &total[(i - i_first + 0) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 0) * 32 + 8]) + convert_double8(sum_10), 0, &total[(i - i_first + 0) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 0) * 32 + 16]) + convert_double8(sum_11), 0, &total[(i - i_first + 0) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 0) * 32 + 24]) + convert_double8(sum_12), 0, &total[(i - i_first + 0) * 32 + 24]);
                    vstore8(vload8(0, &total[(i - i_first + 1) * 32 + 0]) + convert_double8(sum_13), 0, &total[(i - i_first + 1) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 1) * 32 + 8]) + convert_double8(sum_14), 0, &total[(i - i_first + 1) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 1) * 32 + 16]) + convert_double8(sum_15), 0, &total[(i - i_first + 1) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 1) * 32 + 24]) + convert_double8(sum_16), 0, &total[(i - i_first + 1) * 32 + 24]);
                    vstore8(vload8(0, &total[(i - i_first + 2) * 32 + 0]) + convert_double8(sum_17), 0, &total[(i - i_first + 2) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 2) * 32 + 8]) + convert_double8(sum_18), 0, &total[(i - i_first + 2) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 2) * 32 + 16]) + convert_double8(sum_19), 0, &total[(i - i_first + 2) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 2) * 32 + 24]) + convert_double8(sum_20), 0, &total[(i - i_first + 2) * 32 + 24]);
                    vstore8(vload8(0, &total[(i - i_first + 3) * 32 + 0]) + convert_double8(sum_21), 0, &total[(i - i_first + 3) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 3) * 32 + 8]) + convert_double8(sum_22), 0, &total[(i - i_first + 3) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 3) * 32 + 16]) + convert_double8(sum_23), 0, &total[(i - i_first + 3) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 3) * 32 + 24]) + convert_double8(sum_24), 0, &total[(i - i_first + 3) * 32 + 24]);
                    vstore8(vload8(0, &total[(i - i_first + 4) * 32 + 0]) + convert_double8(sum_25), 0, &total[(i - i_first + 4) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 4) * 32 + 8]) + convert_double8(sum_26), 0, &total[(i - i_first + 4) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 4) * 32 + 16]) + convert_double8(sum_27), 0, &total[(i - i_first + 4) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 4) * 32 + 24]) + convert_double8(sum_28), 0, &total[(i - i_first + 4) * 32 + 24]);
                    vstore8(vload8(0, &total[(i - i_first + 5) * 32 + 0]) + convert_double8(sum_29), 0, &total[(i - i_first + 5) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 5) * 32 + 8]) + convert_double8(sum_30), 0, &total[(i - i_first + 5) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 5) * 32 + 16]) + convert_double8(sum_31), 0, &total[(i - i_first + 5) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 5) * 32 + 24]) + convert_double8(sum_32), 0, &total[(i - i_first + 5) * 32 + 24]);
                    vstore8(vload8(0, &total[(i - i_first + 6) * 32 + 0]) + convert_double8(sum_33), 0, &total[(i - i_first + 6) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 6) * 32 + 8]) + convert_double8(sum_34), 0, &total[(i - i_first + 6) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 6) * 32 + 16]) + convert_double8(sum_35), 0, &total[(i - i_first + 6) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 6) * 32 + 24]) + convert_double8(sum_36), 0, &total[(i - i_first + 6) * 32 + 24]);
                    vstore8(vload8(0, &total[(i - i_first + 7) * 32 + 0]) + convert_double8(sum_37), 0, &total[(i - i_first + 7) * 32 + 0]);
                    vstore8(vload8(0, &total[(i - i_first + 7) * 32 + 8]) + convert_double8(sum_38), 0, &total[(i - i_first + 7) * 32 + 8]);
                    vstore8(vload8(0, &total[(i - i_first + 7) * 32 + 16]) + convert_double8(sum_39), 0, &total[(i - i_first + 7) * 32 + 16]);
                    vstore8(vload8(0, &total[(i - i_first + 7) * 32 + 24]) + convert_double8(sum_40), 0, &total[(i - i_first + 7) * 32 + 24]);
                }
            }
        }
        for (i64 i = i_first; i < i_end; i++) {
            for (i64 j = j_first; j + 8 <= j_end; j += 8) {
                const f32x8 made_53 = convert_float8(vload8(0, &total[(i - i_first) * 32 + j - j_first]));
                const i64 at_54 = i;
                const i64 at_55 = j;
                {
                    const i64 i0 = at_54;
                    const i64 i1 = at_55;
                    const f32x8 add = made_53 + vload8(0, x2 + i1);
                    const f32x8 gelu = (add * 0.5f) * (1.0f + erf(add * 0.70710677f));
                    vstore8(gelu, 0, y0 + i0 * n1 + i1);
                }
            }
            for (i64 j = j_end - (j_end - j_first) % 8; j < j_end; j++) {
                const f32 made_56 = (f32)total[(i - i_first) * 32 + j - j_first];
                const i64 at_57 = i;
                const i64 at_58 = j;
                {
                    const i64 i0 = at_57;
                    const i64 i1 = at_58;
                    const f32 add = made_56 + x2[i1];
                    const f32 gelu = (add * 0.5f) * (1.0f + erf(add * 0.70710677f));
                    y0[i0 * n1 + i1] = gelu;
                }
            }
        }
    }
}
