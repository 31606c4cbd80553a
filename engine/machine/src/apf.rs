//! What a guest is offered.

/// Whether a guest may be told of pages that are on their way (asynchronous page faults).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Apf {
    /// Its vCPUs wait for them.
    #[default]
    Off,
    /// It is told, once it has asked for it.
    On,
}
