//! Every behaviour of memory on the soft backend with 2 MiB pages wherever possible.

use lacuna_conformance::Soft;
use lacuna_soft::HugePages;

lacuna_conformance::memory_suites!(Soft {
    huge: HugePages::Always,
    ..Soft::default()
});
