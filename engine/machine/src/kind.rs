//! The kind of an error, by its cause.

/// The kind of an error's cause, and so the possible remedies.
///
/// Every error type of this crate has a method `kind`, without a catch-all arm: a new error must
/// get its kind there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The request: no host can fulfil it. Ask for something else.
    Request,
    /// The guest: it cannot continue by itself.
    Guest,
    /// The host: it lacks memory, disk space or threads, or one of its devices failed. The same
    /// request may succeed on another host, or later.
    Host,
    /// The other side of a migration: it has ended, it refuses, or its data is damaged.
    Peer,
    /// The caller: it has cancelled the request.
    Cancelled,
}
