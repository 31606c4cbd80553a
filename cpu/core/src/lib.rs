//! What every software processor shares: the bus it knows, guest bytes, and its TLB.
//!
//! A processor core (`lacuna-x86`, later arm64) knows a [`Bus`], not a hypervisor: it asks for the
//! page behind a guest-physical frame and gets a [`HostPage`] or a [`Stop`].
//!
//! # Unsafe
//! This room is the vCPU's guest-memory fast path. A [`HostPage`] is a raw pointer to a page that
//! other threads write too; every access through it is an atomic (aligned, up to 8 bytes) or a
//! series of byte atomics, and no reference to guest memory is ever formed. The pointer stays valid
//! until the vCPU's next quiescent point (`lacuna_sync::Qsbr`), which is a promise of the
//! `unsafe trait Bus`.

mod bus;
mod page;
#[cfg(feature = "testing")]
pub mod testing;
mod tlb;
mod word;

pub use bus::{Bus, Stop, Wake};
pub use page::{HostPage, Span};
pub use tlb::{Rights, Tlb};
pub use word::Word;
