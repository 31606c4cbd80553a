//! Every behaviour of memory on the soft backend with memory in a shared memory file, filled by
//! userfaultfd.

use lacuna_conformance::Soft;
use lacuna_soft::MemoryKind;

lacuna_conformance::memory_suites!(Soft {
    memory_kind: MemoryKind::Shared,
    ..Soft::default()
});
