//! Every behaviour on the soft backend with 2 MiB pages wherever there is one.

use lacuna_conformance::Soft;
use lacuna_soft::HugePages;

lacuna_conformance::suite!(Soft {
    huge: HugePages::Always,
    ..Soft::default()
});
