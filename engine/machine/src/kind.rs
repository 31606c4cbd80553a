//! Whose an error is.

/// Where the cause of an error lies, and so what can be done about it.
///
/// Every error type of this crate has a method `kind`, without a catch-all arm: whoever adds an
/// error decides its kind in the same place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// What was asked for cannot be had on any host: ask for something else.
    Request,
    /// The guest: it does not go on by itself.
    Guest,
    /// This host lacks memory, disk space or threads, or a device of it failed. The same request
    /// may succeed on another host, or later.
    Host,
}
