//! Asynchronous page faults.

use std::time::Duration;

use lacuna_machine::{Apf, Arch, Vm as _};

use super::Outcome;
use crate::backend::{Backend, Request};
use crate::running::{guest, run, within};

/// The parameters by which a guest chooses its contract with the host. AArch64's contracts are two
/// published forms.
pub(super) const fn contracts(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::Arm64 => &["apf=abort", "apf=sdei"],
        _ => &["apf=int"],
    }
}

/// One page-ready follows each page-not-present, or else the wake-all of enabling.
pub fn every_token_comes_back_once<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        for contract in contracts(backend.arch()) {
            let line = format!("faulters=8 workers=1 accesses=400 populate=1 {contract}");
            let request = Request {
                apf: Apf::On,
                latency: Duration::from_millis(1),
                ..Request::new(32, 8, 1, &line)
            };
            let finished = run(&backend, &request, &guest(backend.arch(), "bm"))?.passed();
            let apf = finished.status.expect("it announces its status page").apf;
            assert!(apf.not_present >= 1000, "{contract}: {apf:?}");
            // The guest ends after its processes, so none of them waits for a page.
            assert_eq!(apf.not_present, apf.ready, "{contract}: {apf:?}");
            assert_eq!(apf.lost, 0, "{contract}: {apf:?}");
            assert_eq!(
                apf.wake_all, 1,
                "{contract}: one when it is enabled: {apf:?}"
            );
        }
        Ok(())
    })
}

/// Without an offer, the guest gets no events.
pub fn a_guest_gets_no_event_unless_offered<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request::new(16, 4, 1, "faulters=2 workers=1 accesses=400");
        let finished = run(&backend, &request, &guest(backend.arch(), "bm"))?.passed();
        let apf = finished.status.expect("it announces its status page").apf;
        assert_eq!((apf.not_present, apf.wake_all), (0, 0));
        Ok(())
    })
}

/// `verify` finds any lost or stale page. Its processes run while others' pages are on their way.
pub fn nothing_is_lost_with_async_faults<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        for contract in contracts(backend.arch()) {
            let request = Request {
                apf: Apf::On,
                latency: Duration::from_millis(1),
                ..Request::new(16, 4, 2, &format!("rounds=1 threads=6 {contract}"))
            };
            let finished = run(&backend, &request, &guest(backend.arch(), "verify"))?.passed();
            let brought_back = finished.vm.stats().pages_in;
            assert!(brought_back > 1000, "{contract}: {brought_back} pages");
        }
        Ok(())
    })
}
