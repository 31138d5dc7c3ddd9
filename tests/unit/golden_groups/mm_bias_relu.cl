/* aten::mm */
/* aten::add.Tensor */
/* aten::relu */
__kernel void __attribute__((reqd_work_group_size(64, 1, 1))) mm_add_relu_4668da58d3(
        __global const f32 *restrict x0, __global const f32 *restrict x1, __global const f32 *restrict x2,
        __global f32 *restrict y0, i64 n0_wide, i64 n1_wide, i64 n2_wide) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    const i32 n2 = (i32)n2_wide;
    __local f32 pool[1152] __attribute__((aligned(16)));
    const i32 thread = get_local_id(0);
    for (u32 item = (u32)get_group_id(0); item < (u32)3 * (u32)2; item += (u32)get_num_groups(0)) {
        const i32 bj = (i32)(item % 2);
        const u32 above_bj = item / 2;
        const i32 bi = (i32)above_bj;
        const i32 i_first = bi * 32, j_first = bj * 32;
        const i32 across = thread % 8;
        const i32 down = thread / 8 % 8;
        const i32 slice = 0;
        f32 sum[16];
        #pragma unroll
        for (i32 t = 0; t < 16; t++) {
            sum[t] = 0;
        }
        const i32 stages_1 = (n2 + 7) / 8;
        for (i32 stage_2 = 0; stage_2 <= stages_1; stage_2++) {
            const i32 p_first_3 = stage_2 * 8;
            f32 next_rows[4];
            #pragma unroll
            for (i32 t = 0; t < 4; t++) {
                const i32 place = thread + t * 64;
                const i32 line_4 = i_first + place / 8;
                const i32 p_5 = p_first_3 + place % 8;
                f32 value = 0;
                if (line_4 < n0 && p_5 < n2) {
                    value = x0[line_4 * n2 + p_5];
                }
                next_rows[t] = value;
            }
            f32 next_columns[4];
            #pragma unroll
            for (i32 t = 0; t < 4; t++) {
                const i32 place = thread + t * 64;
                const i32 line_6 = j_first + place % 32;
                const i32 p_7 = p_first_3 + place / 32;
                f32 value = 0;
                if (line_6 < n1 && p_7 < n2) {
                    value = x1[p_7 * n1 + line_6];
                }
                next_columns[t] = value;
            }
            if (stage_2 > 0) {
                const i32 own = (i32)((stage_2 - 1) % 2);
                #pragma unroll
                for (i32 s = 0; s < 8; s++) {
                    const i32 p = s;
                    f32 row[4], column[4];
                    #pragma unroll
                    for (i32 t = 0; t < 4; t++) {
                        row[t] = pool[own * 288 + p * 36 + down * 4 + t];
                    }
                    #pragma unroll
                    for (i32 t = 0; t < 4; t++) {
                        column[t] = pool[576 + own * 288 + p * 36 + across * 4 + t];
                    }
                    #pragma unroll
                    for (i32 r = 0; r < 4; r++) {
                        #pragma unroll
                        for (i32 c = 0; c < 4; c++) {
                            sum[r * 4 + c] = mad_f32(row[r], column[c], sum[r * 4 + c]);
                        }
                    }
                }
            }
            if (stage_2 < stages_1) {
                const i32 other = (i32)(stage_2 % 2);
                #pragma unroll
                for (i32 t = 0; t < 4; t++) {
                    const i32 place = thread + t * 64;
                    pool[other * 288 + place % 8 * 36 + place / 8] = next_rows[t];
                }
                #pragma unroll
                for (i32 t = 0; t < 4; t++) {
                    const i32 place = thread + t * 64;
                    pool[576 + other * 288 + place / 32 * 36 + place % 32] = next_columns[t];
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        #pragma unroll
        for (i32 r = 0; r < 4; r++) {
            const i32 i = i_first + down * 4 + r;
            if (i < n0) {
                #pragma unroll
                for (i32 c = 0; c < 4; c++) {
                    const i32 j = j_first + across * 4 + c;
                    if (j < n1) {
                        const f32 made_8 = sum[r * 4 + c];
                        const i32 at_9 = i;
                        const i32 at_10 = j;
                        {
                            const i32 i0 = at_9;
                            const i32 i1 = at_10;
                            const f32 add = made_8 + x2[i1];
                            const f32 relu = !(add <= 0.0f) ? add : 0.0f;
                            y0[i0 * n1 + i1] = relu;
                        }
                    }
                }
            }
        }
    }
}
