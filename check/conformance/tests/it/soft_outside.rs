//! Every behaviour of memory on the soft backend with memory from Linux that a handler thread
//! fills.

use lacuna_conformance::{Filled, Soft};
use lacuna_soft::MemoryKind;

lacuna_conformance::memory_suites!(Soft {
    memory_kind: MemoryKind::Linux,
    filled: Filled::FromOutside,
    ..Soft::default()
});
