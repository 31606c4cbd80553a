//! Every behaviour on the soft backend with memory from Linux, filled by userfaultfd.

use lacuna_conformance::Soft;
use lacuna_soft::MemoryKind;

lacuna_conformance::suite!(Soft {
    memory_kind: MemoryKind::Linux,
    ..Soft::default()
});
