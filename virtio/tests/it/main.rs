//! The devices, with a driver that plays the guest.

mod driver;
mod hostile;
mod life;
mod rng;
