//! The integration tests of this crate, in one program.

mod kvm;
mod soft;
mod soft_huge;
mod soft_hugetlb;
mod soft_linux;
mod soft_outside;
mod soft_shared;
