//! A VM's requests to the source.

use super::Vm;
use crate::units::UnitState;
use crate::window::REQUESTS_MAX;
use lacuna_addr::PAGE_SIZE;
use lacuna_source::{Answer, Failure, PageRequest, PageRequester, SourcePage};
use std::sync::{Arc, Weak};

/// Passes the answers to a request to its VM. The drop is the request's end. A source that is away
/// keeps a request for ever: it must not keep an ended VM too.
struct InFlight(Weak<Vm>);

impl PageRequester for InFlight {
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let vm = self.0.upgrade();
        vm.map_or(Answer::Late, |vm| vm.answer(key, content))
    }
}

impl Drop for InFlight {
    /// Only wakes the event thread: the caller, a thread of the source, may hold a lock.
    fn drop(&mut self) {
        if let Some(vm) = self.0.upgrade()
            && vm.window.end_one()
        {
            vm.ring();
        }
    }
}

impl Vm {
    /// Sends the requests that wait, as far as the window allows. The caller holds no lock: the
    /// source may answer at once.
    pub fn send_requests(self: &Arc<Self>) {
        let is_asked = |unit| self.units.get(unit) == UnitState::Asked;
        for _ in 0..REQUESTS_MAX {
            let Some((unit, page)) = self.window.next(is_asked) else {
                return;
            };
            let requester = Arc::new(InFlight(Arc::downgrade(self)));
            let page_of_source = SourcePage(unit.first.0 + page);
            let request = PageRequest::new(requester, Self::key(&unit, page), page_of_source);
            request.send(&self.source);
        }
        // A source that answers at once never fills the window. The thread reads events in between.
        self.ring();
    }
}
