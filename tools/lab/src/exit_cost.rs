//! The cost of an exit on hardware, for figures whose ids end in `.exitcost`.
//!
//! On soft an exit is the return of a function. These figures charge each exit the time that a
//! processor takes to leave the guest and enter it again. The handling is not charged, because ours
//! is part of the measurement.
//!
//! | what | cycles | from |
//! |---|---|---|
//! | exit and entry | 1300 at 2.1 GHz: 619 ns | KVM's null hypercall on a Xeon E5-2450, ISCA 2016 |
//! | exit and entry | 1344 to 1376 | around `vmrun` on an EPYC, [`SOURCE`] |
//! | a whole `KVM_RUN`, with the return to the VMM | 2528 to 2576 | the same message |
//!
//! The first row is quoted from memory. The second can be looked up, and is 549 to 655 ns at 2.1 to
//! 2.45 GHz; its message names no clock. So 619 ns stays, and the cost of a return to the VMM is
//! 619 ns times the message's ratio.

/// Nanoseconds of an exit that the kernel handles, and of the entry after it.
pub const EXIT_NS: f64 = 1300.0 / 2.1;

/// Nanoseconds of an exit to the VMM, and of the entry after it.
pub const VMM_EXIT_NS: f64 = EXIT_NS * 2528.0 / 1376.0;

/// The source, for results.
pub const SOURCE: &str = "1300 cycles at 2.1 GHz; 1344 to 1376 cycles around vmrun and 2528 for \
                          KVM_RUN: lkml.iu.edu/hypermail/linux/kernel/2012.2/00527.html";
