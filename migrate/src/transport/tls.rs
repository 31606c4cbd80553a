//! TLS 1.3 above a connection. Each side has a certificate, and checks the other side's.

use super::address::{CERTIFICATES, KEY};
use super::stream::Stream;
use super::{TlsError, TlsFiles};
use crate::stream::{Connection, HangUp};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Error, RootCertStore, ServerConfig, ServerConnection,
    StreamOwned,
};
use std::fmt::Display;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::path::Path;
use std::sync::Arc;

/// The largest file with certificates or a key. A file with all authorities of the web
/// is smaller.
const FILE_MAX: u64 = 1 << 20;

/// The TLS configurations of both sides of a connection.
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// Opens and reads the files.
    ///
    /// # Errors
    /// A file cannot be read, or has other content.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        Self::read(files, &files.open()?)
    }

    /// Reads the open files: the authority's, the certificate's and the key's. `files` has their
    /// names.
    ///
    /// # Errors
    /// A file cannot be read, or has other content.
    pub fn read(files: &TlsFiles, [ca, cert, key]: &[File; 3]) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        for root in certificates(&files.ca, ca)? {
            let added = roots.add(root);
            added.map_err(|error| TlsError::of(&files.ca, &error, "give another authority"))?;
        }
        let chain = certificates(&files.cert, cert)?;
        let key = PrivateKeyDer::from_pem_slice(&read(&files.key, key, KEY)?)
            .map_err(|error| TlsError::of(&files.key, &error, KEY))?;
        let of_key = |error: Error| match error {
            Error::InvalidCertificate(why) => TlsError::of(
                &files.cert,
                &why,
                "give a certificate of X.509 version 3, for the name or address of this host \
                 (subjectAltName)",
            ),
            error => TlsError::of(&files.key, &error, KEY),
        };
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(of_key)?
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(of_key)?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .map_err(|error| TlsError::of(&files.ca, &error, "give another authority"))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(of_key)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(of_key)?;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// The source's end of `stream`, to `host`.
    pub(super) fn connect(
        &self,
        mut stream: Stream,
        host: &str,
    ) -> io::Result<Box<dyn Connection>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connection = ClientConnection::new(Arc::clone(&self.client), name);
        let mut connection = connection.map_err(io::Error::other)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut stream).map_err(in_words)?;
        }
        Ok(Box::new(Secured(StreamOwned::new(connection, stream))))
    }

    /// The destination's end of `stream`. An error comes with the stream, on which the other side
    /// may have got an alert.
    pub(super) fn accept(
        &self,
        mut stream: Stream,
    ) -> Result<Box<dyn Connection>, (Stream, io::Error)> {
        let connection = ServerConnection::new(Arc::clone(&self.server));
        let mut connection = match connection {
            Ok(connection) => connection,
            Err(error) => return Err((stream, io::Error::other(error))),
        };
        while connection.is_handshaking() {
            if let Err(error) = connection.complete_io(&mut stream) {
                return Err((stream, in_words(error)));
            }
        }
        Ok(Box::new(Secured(StreamOwned::new(connection, stream))))
    }
}

fn certificates(path: &Path, file: &File) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let advice = CERTIFICATES;
    let text = read(path, file, advice)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| TlsError::of(path, &error, advice))?;
    match found.is_empty() {
        true => Err(TlsError::of(path, &"no certificate in it", advice)),
        false => Ok(found),
    }
}

/// The content of a file that a client of the control socket may have named: a device may have no
/// end.
fn read(path: &Path, file: &File, advice: &str) -> Result<Vec<u8>, TlsError> {
    let failed = |error: &dyn Display| TlsError::of(path, error, advice);
    let metadata = file.metadata().map_err(|error| failed(&error))?;
    if !metadata.is_file() {
        return Err(failed(&"no regular file"));
    }
    let mut content = Vec::new();
    let read = file.take(FILE_MAX + 1).read_to_end(&mut content);
    read.map_err(|error| failed(&error))?;
    match content.len() as u64 > FILE_MAX {
        true => Err(failed(&"larger than 1M")),
        false => Ok(content),
    }
}

/// An error of TLS in words.
fn in_words(error: io::Error) -> io::Error {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<Error>());
    let Some(inner) = inner else {
        return error;
    };
    let text = match inner {
        Error::AlertReceived(alert) => format!(
            "the other side refuses this side's certificate (TLS alert {alert:?}): give one of an \
             authority that the other side accepts"
        ),
        Error::InvalidCertificate(why) => format!(
            "the other side's certificate is refused ({why}): it has to be of the authority \
             that this side accepts, and for the name or address of that host"
        ),
        Error::NoCertificatesPresented => "the other side has no certificate".into(),
        other => format!("this is no TLS of a migration: {other}"),
    };
    io::Error::new(error.kind(), text)
}

/// A connection with TLS.
struct Secured<C>(StreamOwned<C, Stream>);

macro_rules! connection {
    ($($side:ty),*) => {$(
        impl Read for Secured<$side> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0.read(buffer).map_err(in_words)
            }
        }

        impl Write for Secured<$side> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.write(bytes).map_err(in_words)
            }

            fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
                self.0.write_vectored(slices).map_err(in_words)
            }

            fn flush(&mut self) -> io::Result<()> {
                self.0.flush().map_err(in_words)
            }
        }

        impl Connection for Secured<$side> {
            fn hang_up(&self) -> io::Result<HangUp> {
                self.0.sock.hang_up()
            }
        }
    )*};
}

connection!(ClientConnection, ServerConnection);
