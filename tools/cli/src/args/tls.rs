//! `--tls-ca`, `--tls-cert` and `--tls-key`.

use super::Address;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The options for addresses `tls:HOST:PORT`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
pub struct TlsArgs {
    /// For tls: the authority whose certificates the other side may have, as a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
    /// For tls: this side's certificate, as a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// For tls: the private key of this side's certificate, as a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    pub tls_key: Option<PathBuf>,
}

/// The files that TLS needs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The authority whose certificates the other side may have.
    pub ca: PathBuf,
    /// This side's certificate.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl TlsArgs {
    /// The files for `address`.
    ///
    /// # Errors
    /// The address needs files, or takes none.
    pub fn files(&self, address: &Address) -> Result<Option<TlsFiles>, String> {
        let files = match (&self.tls_ca, &self.tls_cert, &self.tls_key) {
            (Some(ca), Some(cert), Some(key)) => Some(TlsFiles {
                ca: ca.clone(),
                cert: cert.clone(),
                key: key.clone(),
            }),
            _ => None,
        };
        check(address, files)
    }
}

/// Refuses files if `address` takes none, and their absence if it needs them.
///
/// # Errors
/// What to do.
pub fn check(address: &Address, files: Option<TlsFiles>) -> Result<Option<TlsFiles>, String> {
    match (address, &files) {
        (Address::Tls(_), None) => Err(format!(
            "{address}: both sides need certificates: give an authority, a certificate and its \
             key (--tls-ca, --tls-cert, --tls-key)"
        )),
        (Address::Unix(_) | Address::Tcp(_), Some(_)) => Err(format!(
            "{address} takes no certificates: give an address tls:HOST:PORT, or leave them out"
        )),
        _ => Ok(files),
    }
}
