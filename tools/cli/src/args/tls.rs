//! `--tls-ca`, `--tls-cert` and `--tls-key`.

use super::group::MIGRATION;
use clap::Args;
use lacuna::migrate::transport::{Address, TlsFiles};
use std::path::PathBuf;

/// The options for addresses `tls:HOST:PORT`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
pub struct TlsArgs {
    /// For tls: the authority whose certificates the other side may have, as a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = MIGRATION)]
    pub tls_ca: Option<PathBuf>,
    /// For tls: this side's certificate, as a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = MIGRATION)]
    pub tls_cert: Option<PathBuf>,
    /// For tls: the private key of this side's certificate, as a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_ca", help_heading = MIGRATION)]
    pub tls_key: Option<PathBuf>,
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
        match address.check_tls(files.as_ref()) {
            Ok(()) => Ok(files),
            Err(error) => Err(format!("{error} (--tls-ca, --tls-cert, --tls-key)")),
        }
    }
}
