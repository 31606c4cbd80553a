//! Asynchronous page faults.

use std::time::Duration;

use lacuna_machine::{Apf, Vm as _};

use super::Outcome;
use crate::backend::{Backend, Request};
use crate::running::{guest, run, within};

/// Each page-not-present is followed by one page-ready, or by the wake-all of enabling.
pub fn every_token_comes_back_once<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            apf: Apf::On,
            latency: Duration::from_millis(1),
            ..Request::new(32, 8, 1, "faulters=8 workers=1 accesses=400 populate=1")
        };
        let finished = run(&backend, &request, &guest("bm"))?.passed();
        let apf = finished.status.expect("it announces its status page").apf;
        assert!(apf.not_present >= 1000, "{apf:?}");
        // The guest ends when its processes have, so none of them waits for a page.
        assert_eq!(apf.not_present, apf.ready, "{apf:?}");
        assert_eq!(apf.lost, 0, "{apf:?}");
        assert_eq!(apf.wake_all, 1, "one when it is enabled: {apf:?}");
        Ok(())
    })
}

/// A guest that is not offered them has none.
pub fn a_guest_is_told_nothing_unless_offered<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request::new(16, 4, 1, "faulters=2 workers=1 accesses=400");
        let finished = run(&backend, &request, &guest("bm"))?.passed();
        let apf = finished.status.expect("it announces its status page").apf;
        assert_eq!((apf.not_present, apf.wake_all), (0, 0));
        Ok(())
    })
}

/// `verify` finds any page that was lost or stale; its processes run while others' pages come.
pub fn nothing_is_lost_with_async_faults<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            apf: Apf::On,
            latency: Duration::from_millis(1),
            ..Request::new(16, 4, 2, "rounds=1 threads=6")
        };
        let finished = run(&backend, &request, &guest("verify"))?.passed();
        let brought_back = finished.vm.stats().pages_in;
        assert!(brought_back > 1000, "{brought_back} pages");
        Ok(())
    })
}
