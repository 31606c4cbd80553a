//! `lacuna run --control` and `lacuna snapshot`: guests that are paused, saved, stopped and
//! restored, and clients that do not keep to the protocol.

mod clients;
#[cfg(feature = "s3")]
mod s3;
mod saved;
mod stopped;
mod touches;
