/* aten::native_layer_norm */
__kernel void __attribute__((reqd_work_group_size(128, 1, 1))) native_layer_norm_3fd5be309c(
        __global const f32 *restrict x0, __global const f32 *restrict x1, __global const f32 *restrict x2,
        __global f32 *restrict y0, i64 n0_wide, i64 n1_wide, i64 n2_wide) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    const i32 n2 = (i32)n2_wide;
    __local f32 shared_f32_0[128] __attribute__((aligned(16)));
    const i32 thread = get_local_id(0);
    const i32 part = thread % 64;
    const i32 slot = thread / 64;
    for (u32 item = (u32)get_group_id(0); item < (u32)n0; item += (u32)get_num_groups(0)) {
        const i32 i0_block = (i32)item;
        const i32 i0 = i0_block * 2 + slot;
        f32 kept[6];
        f32 sum_so_far = 0;
        #pragma unroll
        for (i32 turn = 0; turn < 6; turn++) {
            const i32 r0 = part + turn * 64;
            const f32 v = x0[i0 * n2 + r0];
            kept[turn] = v;
            sum_so_far += v;
        }
        for (i32 distance = 1; distance < 32; distance *= 2) {
            const f32 other_0 = __shfl_sync(0xffffffffu, sum_so_far, (threadIdx.x % 32) ^ distance);
            sum_so_far += other_0;
        }
        if (part % 32 == 0) {
            shared_f32_0[thread] = sum_so_far;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        sum_so_far = shared_f32_0[thread - part];
        for (i32 next = 32; next < 64; next += 32) {
            const f32 other_0 = shared_f32_0[thread - part + next];
            sum_so_far += other_0;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const f32 row_sum = sum_so_far;
        const f32 t = row_sum / (f32)(i64)n2;
        f32 sum_so_far_1 = 0;
        #pragma unroll
        for (i32 turn = 0; turn < 6; turn++) {
            const i32 r0 = part + turn * 64;
            const f32 t_1 = kept[turn] - t;
            sum_so_far_1 += t_1 * t_1;
        }
        for (i32 distance = 1; distance < 32; distance *= 2) {
            const f32 other_0 = __shfl_sync(0xffffffffu, sum_so_far_1, (threadIdx.x % 32) ^ distance);
            sum_so_far_1 += other_0;
        }
        if (part % 32 == 0) {
            shared_f32_0[thread] = sum_so_far_1;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        sum_so_far_1 = shared_f32_0[thread - part];
        for (i32 next = 32; next < 64; next += 32) {
            const f32 other_0 = shared_f32_0[thread - part + next];
            sum_so_far_1 += other_0;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const f32 row_sum_1 = sum_so_far_1;
        const f32 t_2 = 1.0f / sqrtf((row_sum_1 / (f32)(i64)n2) + 1e-05f);
        #pragma unroll
        for (i32 turn = 0; turn < 6; turn++) {
            const i32 r0 = part + turn * 64;
            const f32 native_layer_norm = x1[r0] + (((kept[turn] - t) * t_2) * x2[r0]);
            y0[i0 * n2 + r0] = native_layer_norm;
        }
    }
}
