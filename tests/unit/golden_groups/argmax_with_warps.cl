/* aten::argmax */
__kernel void __attribute__((reqd_work_group_size(64, 1, 1))) argmax_a40c3ea994(
        __global const f32 *restrict x0, __global i64 *restrict y0, i64 n0_wide, i64 n1_wide) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    __local f32 shared_f32_0[64] __attribute__((aligned(16)));
    __local i32 shared_i32_0[64] __attribute__((aligned(16)));
    const i32 thread = get_local_id(0);
    const i32 part = thread;
    for (u32 item = (u32)get_group_id(0); item < (u32)n0; item += (u32)get_num_groups(0)) {
        const i32 i0 = (i32)item;
        f32 argmax_value = -INFINITY;
        i32 argmax_place = 0;
        for (i32 r0_0 = 0; r0_0 < n1; r0_0 += 2048) {
            const i32 r0_last = r0_0 + 2048 < n1 ? r0_0 + 2048 : n1;
            if (r0_0 + part < r0_last) {
                f32 max_so_far = -INFINITY;
                i32 max_so_far_nan = 0;
                for (i32 r0 = r0_0 + part; r0 < r0_last; r0 += 64) {
                    const f32 taken = x0[i0 * n1 + r0];
                    max_so_far = taken > max_so_far ? taken : max_so_far;
                    max_so_far_nan |= taken != taken;
                }
                const f32 block_max = max_so_far_nan ? NAN : max_so_far;
                if ((block_max < argmax_value) | ((argmax_value != argmax_value) & (!(block_max != block_max)))) { continue; }
                i32 min_so_far = 2147483647;
                for (i32 r0 = r0_0 + part; r0 < r0_last; r0 += 64) {
                    const f32 v = x0[i0 * n1 + r0];
                    const i32 taken_1 = ((v == block_max) | (v != v)) ? (i32)(i64)r0 : 2147483647;
                    min_so_far = taken_1 < min_so_far ? taken_1 : min_so_far;
                }
                const i32 block_min = min_so_far;
                const f32 found_value = block_max;
                const i32 found_place = block_min;
                {
                    const i32 t = found_value != found_value;
                    const i32 t_1 = argmax_value != argmax_value;
                    const i32 t_2 = ((found_value > argmax_value) | (t & (!t_1))) | (((argmax_value == found_value) | (t_1 & t)) & (found_place < argmax_place));
                    const f32 merged_value = t_2 ? found_value : argmax_value;
                    const i32 merged_place = t_2 ? found_place : argmax_place;
                    argmax_value = merged_value;
                    argmax_place = merged_place;
                }
            }
        }
        for (i32 distance = 1; distance < 32; distance *= 2) {
            const f32 other_0 = __shfl_sync(0xffffffffu, argmax_value, (threadIdx.x % 32) ^ distance);
            const i32 other_1 = __shfl_sync(0xffffffffu, argmax_place, (threadIdx.x % 32) ^ distance);
            if ((part ^ distance) < n1) {
                {
                    const i32 t = other_0 != other_0;
                    const i32 t_1 = argmax_value != argmax_value;
                    const i32 t_2 = ((other_0 > argmax_value) | (t & (!t_1))) | (((argmax_value == other_0) | (t_1 & t)) & (other_1 < argmax_place));
                    const f32 merged_value = t_2 ? other_0 : argmax_value;
                    const i32 merged_place = t_2 ? other_1 : argmax_place;
                    argmax_value = merged_value;
                    argmax_place = merged_place;
                }
            }
        }
        if (part % 32 == 0) {
            shared_f32_0[thread] = argmax_value;
            shared_i32_0[thread] = argmax_place;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        argmax_value = shared_f32_0[0];
        argmax_place = shared_i32_0[0];
        for (i32 next = 32; next < 64 && next < n1; next += 32) {
            const f32 other_0 = shared_f32_0[next];
            const i32 other_1 = shared_i32_0[next];
            {
                const i32 t = other_0 != other_0;
                const i32 t_1 = argmax_value != argmax_value;
                const i32 t_2 = ((other_0 > argmax_value) | (t & (!t_1))) | (((argmax_value == other_0) | (t_1 & t)) & (other_1 < argmax_place));
                const f32 merged_value = t_2 ? other_0 : argmax_value;
                const i32 merged_place = t_2 ? other_1 : argmax_place;
                argmax_value = merged_value;
                argmax_place = merged_place;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const i64 argmax = (i64)argmax_place;
        if (part == 0) {
            y0[i0] = argmax;
        }
    }
}
