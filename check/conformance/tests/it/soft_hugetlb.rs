//! Every behaviour of memory on the soft backend with memory in huge pages of hugetlbfs, where the
//! machine has reserved some.

use lacuna_conformance::Soft;
use lacuna_soft::MemoryKind;

lacuna_conformance::memory_suites!(Soft {
    memory_kind: MemoryKind::Hugetlbfs,
    ..Soft::default()
});
