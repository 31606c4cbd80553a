//! Page sources: the pages of a guest whose memory is elsewhere when it starts.
//!
//! A [`PageSource`] answers each [`PageRequest`] once, on any thread. [`serve`] makes this process
//! the source of another.

pub use lacuna_source::{
    Answer, External, Failure, FailureKind, Fate, Faults, FileError, HandlerError, HandlerRegion,
    Injected, LayeredFile, Measured, MemoryFile, MemoryId, Outage, PageRequest, PageRequester,
    PageSource, Peer, PeerError, Policy, Recorder, Server, SourcePage, SourceStats, TouchedMemory,
    Touches, TouchesError, WhenGone, Zeros, serve,
};
