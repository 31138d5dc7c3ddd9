/* aten::_softmax */
__kernel void __attribute__((reqd_work_group_size(64, 1, 1))) softmax_c242af66ae(
        __global const f32 *restrict x0, __global f32 *restrict y0, i64 n0_wide, i64 n1_wide) {
    const i32 n0 = (i32)n0_wide;
    const i32 n1 = (i32)n1_wide;
    __local f32 shared_f32_0[64] __attribute__((aligned(16)));
    const i32 thread = get_local_id(0);
    const i32 part = thread;
    for (u32 item = (u32)get_group_id(0); item < (u32)n0; item += (u32)get_num_groups(0)) {
        const i32 i0 = (i32)item;
        f32 fmax_so_far = -INFINITY;
        for (i32 r0 = part; r0 < n1; r0 += 64) {
            const f32 taken = x0[i0 * n1 + r0];
            fmax_so_far = taken > fmax_so_far ? taken : fmax_so_far;
        }
        shared_f32_0[thread] = fmax_so_far;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (i32 distance = 32; distance > 0; distance /= 2) {
            if (part < distance) {
                const f32 other_0 = shared_f32_0[thread + distance];
                fmax_so_far = other_0 > fmax_so_far ? other_0 : fmax_so_far;
                shared_f32_0[thread] = fmax_so_far;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        fmax_so_far = shared_f32_0[0];
        barrier(CLK_LOCAL_MEM_FENCE);
        const f32 row_fmax = fmax_so_far;
        f32 sum_so_far = 0;
        for (i32 r0 = part; r0 < n1; r0 += 64) {
            sum_so_far += expf(x0[i0 * n1 + r0] - row_fmax);
        }
        shared_f32_0[thread] = sum_so_far;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (i32 distance = 32; distance > 0; distance /= 2) {
            if (part < distance) {
                const f32 other_0 = shared_f32_0[thread + distance];
                sum_so_far += other_0;
                shared_f32_0[thread] = sum_so_far;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        sum_so_far = shared_f32_0[0];
        barrier(CLK_LOCAL_MEM_FENCE);
        const f32 row_sum = sum_so_far;
        const f32 t = 1.0f / row_sum;
        for (i32 r0 = part; r0 < n1; r0 += 64) {
            const f32 softmax = expf(x0[i0 * n1 + r0] - row_fmax) * t;
            y0[i0 * n1 + r0] = softmax;
        }
    }
}
