/* aten::_scaled_dot_product_flash_attention_for_cpu */
__kernel void __attribute__((reqd_work_group_size(64, 1, 1))) scaled_dot_product_flash_attention_for_cpu_d5d24cc3ef(
        __global const f32 *restrict x0, __global const f32 *restrict x1, __global const f32 *restrict x2,
        __global f32 *restrict y0, __global f32 *restrict y1, i64 n0_wide, i64 n1_wide, i64 n2_wide, i64 n3_wide,
        i64 n4_wide, i64 n5_wide, i64 n6_wide, i64 n7_wide) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    const i32 n2 = (i32)n2_wide;
    const i32 n3 = (i32)n3_wide;
    const i32 n4 = (i32)n4_wide;
    const i32 n5 = (i32)n5_wide;
    const i32 n6 = (i32)n6_wide;
    const i32 n7 = (i32)n7_wide;
    __local f32 weights[2304] __attribute__((aligned(16)));
    __local f32 parts[64] __attribute__((aligned(16)));
    __local f32 sums[64] __attribute__((aligned(16)));
    __local f32 top[32] __attribute__((aligned(16)));
    __local f32 mass[32] __attribute__((aligned(16)));
    __local f32 shrink[32] __attribute__((aligned(16)));
    __local f32 queries[2304] __attribute__((aligned(16)));
    __local f32 stage[1088] __attribute__((aligned(16)));
    const i32 thread = get_local_id(0);
    for (u32 item = (u32)get_group_id(0); item < (u32)2 * (u32)3 * (u32)2; item += (u32)get_num_groups(0)) {
        const i32 block = (i32)(item % 2);
        const u32 above_block = item / 2;
        const i32 h = (i32)(above_block % 3);
        const u32 above_h = above_block / 3;
        const i32 b = (i32)above_h;
        const i32 i_first = block * 32;
        const i32 limit = (n1 < i_first + 32 ? n1 : i_first + 32);
        const i32 across = thread % 8;
        const i32 down = thread / 8 % 8;
        for (i32 place = thread; place < 2048; place += 64) {
            const i32 line_1 = i_first + place / 64;
            const i32 p_2 = place % 64;
            f32 value = 0;
            if (line_1 < n0 && p_2 < 64) {
                value = x0[b * n2 + h * n3 + line_1 * n4 + p_2];
            }
            queries[place % 64 * 36 + place / 64] = value;
        }
        for (i32 place = thread; place < 32; place += 64) {
            top[place] = (-INFINITY);
            mass[place] = 0;
        }
        f32 made[32];
        #pragma unroll
        for (i32 t = 0; t < 32; t++) {
            made[t] = 0;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (i32 j_first = 0; j_first < limit; j_first += 64) {
            {
                f32 score[32];
                #pragma unroll
                for (i32 t = 0; t < 32; t++) {
                    score[t] = 0;
                }
                const i32 stages_3 = (64 + 7) / 8;
                for (i32 stage_4 = 0; stage_4 <= stages_3; stage_4++) {
                    const i32 p_first_5 = stage_4 * 8;
                    f32 next_keys[8];
                    #pragma unroll
                    for (i32 t = 0; t < 8; t++) {
                        const i32 place = thread + t * 64;
                        const i32 line_6 = j_first + place / 8;
                        const i32 p_7 = p_first_5 + place % 8;
                        f32 value = 0;
                        if (line_6 < limit && p_7 < 64) {
                            value = x1[b * n5 + h * n6 + line_6 * n4 + p_7];
                        }
                        next_keys[t] = value;
                    }
                    if (stage_4 > 0) {
                        const i32 own = (i32)((stage_4 - 1) % 2);
                        const i32 before = (i32)(stage_4 - 1) * 8;
                        #pragma unroll
                        for (i32 s = 0; s < 8; s++) {
                            const i32 p = s;
                            f32 row[4], column[8];
                            #pragma unroll
                            for (i32 t = 0; t < 4; t++) {
                                row[t] = queries[(before + p) * 36 + down * 4 + t];
                            }
                            #pragma unroll
                            for (i32 t = 0; t < 8; t++) {
                                column[t] = stage[own * 544 + p * 68 + t / 4 * 32 + across * 4 + t % 4];
                            }
                            #pragma unroll
                            for (i32 r = 0; r < 4; r++) {
                                #pragma unroll
                                for (i32 c = 0; c < 8; c++) {
                                    score[r * 8 + c] = mad_f32(row[r], column[c], score[r * 8 + c]);
                                }
                            }
                        }
                    }
                    if (stage_4 < stages_3) {
                        const i32 other = (i32)(stage_4 % 2);
                        #pragma unroll
                        for (i32 t = 0; t < 8; t++) {
                            const i32 place = thread + t * 64;
                            stage[other * 544 + place % 8 * 68 + place / 8] = next_keys[t];
                        }
                    }
                    barrier(CLK_LOCAL_MEM_FENCE);
                }
                #pragma unroll
                for (i32 r = 0; r < 4; r++) {
                    #pragma unroll
                    for (i32 c = 0; c < 8; c++) {
                        const i32 own_query = down * 4 + r, own_key = c / 4 * 32 + across * 4 + c % 4;
                        const i32 i = i_first + own_query;
                        const i32 j = j_first + own_key;
                        f32 value = score[r * 8 + c] * 0.125f;
                        value = j >= limit || j > i ? (-INFINITY) : value;
                        weights[own_key * 36 + own_query] = value;
                    }
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            {
                const i32 q = thread % 32, lane = thread / 32;
                const f32 before = top[q];
                f32 most = before, all = 0;
                for (i32 e = lane; e < 64; e += 2) {
                    const f32 score = weights[e * 36 + q];
                    most = score > most ? score : most;
                }
                parts[thread] = most;
                barrier(CLK_LOCAL_MEM_FENCE);
                for (i32 n = 0; n < 2; n++) {
                    const f32 other = parts[n * 32 + q];
                    most = other > most ? other : most;
                }
                const f32 base = most == (-INFINITY) ? 0 : most;
                for (i32 e = lane; e < 64; e += 2) {
                    const f32 share = expf(weights[e * 36 + q] - base);
                    weights[e * 36 + q] = share;
                    all += share;
                }
                sums[thread] = all;
                barrier(CLK_LOCAL_MEM_FENCE);
                if (lane == 0) {
                    const f32 factor = expf(before - base);
                    f32 total = mass[q] * factor;
                    for (i32 n = 0; n < 2; n++) {
                        total += sums[n * 32 + q];
                    }
                    top[q] = most;
                    mass[q] = total;
                    shrink[q] = factor;
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            #pragma unroll
            for (i32 r = 0; r < 4; r++) {
                #pragma unroll
                for (i32 c = 0; c < 8; c++) {
                    made[r * 8 + c] *= shrink[down * 4 + r];
                }
            }
            {
                const i32 j_end = (limit < j_first + 64 ? limit : j_first + 64);
                const i32 stages_8 = (j_end - j_first + 7) / 8;
                for (i32 stage_9 = 0; stage_9 <= stages_8; stage_9++) {
                    const i32 p_first_10 = j_first + stage_9 * 8;
                    f32 next_values[8];
                    #pragma unroll
                    for (i32 t = 0; t < 8; t++) {
                        const i32 place = thread + t * 64;
                        const i32 line_11 = place % 64;
                        const i32 p_12 = p_first_10 + place / 64;
                        f32 value = 0;
                        if (line_11 < 64 && p_12 < j_end) {
                            value = x2[b * n5 + h * n6 + p_12 * n4 + line_11];
                        }
                        next_values[t] = value;
                    }
                    if (stage_9 > 0) {
                        const i32 own = (i32)((stage_9 - 1) % 2);
                        const i32 before = (i32)(stage_9 - 1) * 8;
                        #pragma unroll
                        for (i32 s = 0; s < 8; s++) {
                            const i32 p = s;
                            f32 row[4], column[8];
                            #pragma unroll
                            for (i32 t = 0; t < 4; t++) {
                                row[t] = weights[(before + p) * 36 + down * 4 + t];
                            }
                            #pragma unroll
                            for (i32 t = 0; t < 8; t++) {
                                column[t] = stage[own * 544 + p * 68 + t / 4 * 32 + across * 4 + t % 4];
                            }
                            #pragma unroll
                            for (i32 r = 0; r < 4; r++) {
                                #pragma unroll
                                for (i32 c = 0; c < 8; c++) {
                                    made[r * 8 + c] = mad_f32(row[r], column[c], made[r * 8 + c]);
                                }
                            }
                        }
                    }
                    if (stage_9 < stages_8) {
                        const i32 other = (i32)(stage_9 % 2);
                        #pragma unroll
                        for (i32 t = 0; t < 8; t++) {
                            const i32 place = thread + t * 64;
                            stage[other * 544 + place / 64 * 68 + place % 64] = next_values[t];
                        }
                    }
                    barrier(CLK_LOCAL_MEM_FENCE);
                }
            }
        }
        #pragma unroll
        for (i32 r = 0; r < 4; r++) {
            const i32 i = i_first + down * 4 + r;
            if (i < n0) {
                const f32 all = mass[down * 4 + r], share = all == 0 ? 1 : all;
                #pragma unroll
                for (i32 c = 0; c < 8; c++) {
                    const i32 e = c / 4 * 32 + across * 4 + c % 4;
                    if (e < 64) {
                        y0[b * n2 + h * n3 + i * n4 + e] = made[r * 8 + c] / share;
                    }
                }
            }
        }
        for (i32 place = thread; place < 32; place += 64) {
            if (i_first + place < n0) {
                y1[b * n7 + h + (i_first + place) * 3] = mass[place] == 0 ? 0 : top[place] + logf(mass[place]);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
