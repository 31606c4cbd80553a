//! Every behaviour of memory on the soft backend with memory from Linux, filled by a handler
//! thread.

use lacuna_conformance::{Filled, Soft};
use lacuna_soft::MemoryKind;

lacuna_conformance::memory_suites!(Soft {
    memory_kind: MemoryKind::Linux,
    filled: Filled::FromOutside,
    ..Soft::default()
});
