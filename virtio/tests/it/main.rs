//! The devices, with a driver that plays the guest.

mod balloon;
mod block;
mod console;
mod driver;
mod hostile;
mod life;
mod net;
mod rng;
mod slow;
mod tap;
