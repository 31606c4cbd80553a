/*
 * The functions that the compiler calls for atomic operations (gcc, -moutline-atomics). Each has
 * two bodies: one instruction of LSE, or a loop of exclusives. A bit says which. For programs it is
 * in the info page, for the kernel in a variable.
 *
 *   __aarch64_OPn_ORDER(value, address)          -> the old value; OP swp ldadd ldclr ldeor ldset
 *   __aarch64_casn_ORDER(expected, new, address) -> the old value
 *
 * They may change x15, x16, x17 and the flags, beside their result. Each is a section, and the
 * linker leaves out those that no code calls.
 */
#include "lacuna/abi.h"

    .arch armv8-a+lse

    .macro TO_EXCLUSIVES_OR_LSE
#ifdef LACUNA_KERNEL
    adrp x16, kernel_has_lse
    ldr w16, [x16, #:lo12:kernel_has_lse]
#else
    movz x16, #(LACUNA_INFO_VA & 0xffff)
    movk x16, #(LACUNA_INFO_VA >> 16 & 0xffff), lsl #16
    movk x16, #(LACUNA_INFO_VA >> 32), lsl #32
    ldr w16, [x16, #20] /* lacuna_info.processor */
#endif
    tbz w16, #0, 1f
    .endm

/* What an exclusive loop stores: x17 from the old value x0 and the operand x15. */
    .macro EXCLUSIVE_swp
    mov x17, x15
    .endm
    .macro EXCLUSIVE_ldadd
    add x17, x0, x15
    .endm
    .macro EXCLUSIVE_ldclr
    bic x17, x0, x15
    .endm
    .macro EXCLUSIVE_ldeor
    eor x17, x0, x15
    .endm
    .macro EXCLUSIVE_ldset
    orr x17, x0, x15
    .endm

/* s: suffix for the size; r: register; lse, load, store: suffixes for the order */
    .macro MAKE_FETCH op, n, s, r, order, lse, load, store
    .section .text.\op\n\()_\order, "ax"
    .globl __aarch64_\op\n\()_\order
    .hidden __aarch64_\op\n\()_\order
    .balign 16
__aarch64_\op\n\()_\order:
    TO_EXCLUSIVES_OR_LSE
    \op\lse\s \r\()0, \r\()0, [x1]
    ret
1:  mov x15, x0
2:  ld\load\()xr\s \r\()0, [x1]
    EXCLUSIVE_\op
    st\store\()xr\s w16, \r\()17, [x1]
    cbnz w16, 2b
    ret
    .endm

    .macro MAKE_CAS n, s, r, mask, order, lse, load, store
    .section .text.cas\n\()_\order, "ax"
    .globl __aarch64_cas\n\()_\order
    .hidden __aarch64_cas\n\()_\order
    .balign 16
__aarch64_cas\n\()_\order:
    TO_EXCLUSIVES_OR_LSE
    cas\lse\s \r\()0, \r\()1, [x2]
    ret
    .ifc \mask, all
1:  mov x15, x0
    .else
1:  and x15, x0, #\mask
    .endif
2:  ld\load\()xr\s \r\()0, [x2]
    cmp x0, x15
    b.ne 3f
    st\store\()xr\s w16, \r\()1, [x2]
    cbnz w16, 2b
3:  ret
    .endm

    .macro MAKE_SIZE n, s, r, mask
    .irp op, swp, ldadd, ldclr, ldeor, ldset
    MAKE_FETCH \op, \n, "\s", \r, relax, "", "", ""
    MAKE_FETCH \op, \n, "\s", \r, acq, "a", "a", ""
    MAKE_FETCH \op, \n, "\s", \r, rel, "l", "", "l"
    MAKE_FETCH \op, \n, "\s", \r, acq_rel, "al", "a", "l"
    .endr
    MAKE_CAS \n, "\s", \r, \mask, relax, "", "", ""
    MAKE_CAS \n, "\s", \r, \mask, acq, "a", "a", ""
    MAKE_CAS \n, "\s", \r, \mask, rel, "l", "", "l"
    MAKE_CAS \n, "\s", \r, \mask, acq_rel, "al", "a", "l"
    .endm

    MAKE_SIZE 1, "b", w, 0xff
    MAKE_SIZE 2, "h", w, 0xffff
    MAKE_SIZE 4, "", w, 0xffffffff
    MAKE_SIZE 8, "", x, all

    .section .note.GNU-stack, "", @progbits
