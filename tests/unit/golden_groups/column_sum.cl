/* aten::sum.dim_IntList */
__kernel void __attribute__((reqd_work_group_size(64, 1, 1))) sum_1abbd561c3(
        __global const f32 *restrict x0, __global f32 *restrict y0, i64 n0_wide, i64 n1_wide, i64 n2_wide) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    const i32 n2 = (i32)n2_wide;
    __local f64 shared_f64_0[64] __attribute__((aligned(16)));
    const i32 thread = get_local_id(0);
    const i32 part = thread / 8;
    const i32 slot = thread % 8;
    for (u32 item = (u32)get_group_id(0); item < (u32)n0; item += (u32)get_num_groups(0)) {
        const i32 i0_block = (i32)item;
        const i32 i0_here = i0_block * 8 + slot;
        const i32 i0 = i0_here < n1 ? i0_here : n1 - 1;
        f64 sum_so_far = 0;
        for (i32 r0_0 = 0; r0_0 < n2; r0_0 += 256) {
            const i32 r0_last = r0_0 + 256 < n2 ? r0_0 + 256 : n2;
            f32 sum_so_far_chunk = 0;
            for (i32 r0 = r0_0 + part; r0 < r0_last; r0 += 8) {
                sum_so_far_chunk += x0[r0 * n1 + i0];
            }
            sum_so_far += sum_so_far_chunk;
        }
        shared_f64_0[thread] = sum_so_far;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (i32 distance = 4; distance > 0; distance /= 2) {
            if (part < distance) {
                const f64 other_0 = shared_f64_0[thread + distance * 8];
                sum_so_far += other_0;
                shared_f64_0[thread] = sum_so_far;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        sum_so_far = shared_f64_0[slot];
        barrier(CLK_LOCAL_MEM_FENCE);
        const f32 sum = (f32)sum_so_far;
        if (part == 0 && i0_here < n1) {
            y0[i0] = sum;
        }
    }
}
