/* Instruction counts of the loops in cpubench.S. */
#ifndef CPUBENCH_H
#define CPUBENCH_H

#define BENCH_ALU_INSNS 16
#define BENCH_MEM_INSNS 9
#define BENCH_BRANCHY_BLOCKS 2400
#define BENCH_BRANCHY_INSNS 8
#define BENCH_BRANCHY_LOOP 3

#endif
