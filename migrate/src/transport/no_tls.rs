//! TLS in a program without the feature `tls`: no value of [`Tls`] exists.

use super::stream::Stream;
use super::{TlsError, TlsFiles};
use crate::stream::Connection;
use std::convert::Infallible;
use std::fs::File;
use std::io;

/// The TLS configurations of both sides of a connection.
pub struct Tls(Infallible);

impl Tls {
    /// Refuses the files.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let advice = "build the crate lacuna with its feature tls";
        Err(TlsError::of(
            &files.cert,
            &"this program has no TLS",
            advice,
        ))
    }

    /// Refuses the files.
    pub fn read(files: &TlsFiles, _: &[File; 3]) -> Result<Self, TlsError> {
        Self::load(files)
    }

    pub(super) fn connect(&self, _: Stream, _: &str) -> io::Result<Box<dyn Connection>> {
        match self.0 {}
    }

    pub(super) fn accept(&self, _: Stream) -> Result<Box<dyn Connection>, (Stream, io::Error)> {
        match self.0 {}
    }
}
