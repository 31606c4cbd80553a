//! Every behaviour of memory on the soft backend with memory from Linux, filled by userfaultfd.

use lacuna_conformance::Soft;
use lacuna_soft::MemoryKind;

lacuna_conformance::memory_suites!(Soft {
    memory_kind: MemoryKind::Linux,
    ..Soft::default()
});
