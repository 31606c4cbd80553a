//! A thread fills memory through a userfaultfd, page by page, as a handler outside of the VMM does.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{External, PageSource, Policy};

use crate::backend::Lacks;

/// How long the handler sleeps between two looks.
const LOOK: Duration = Duration::from_micros(20);

/// A source for one VM, and a thread that fills each touched page with zeros. The thread ends after
/// the VM.
pub fn zeros() -> Result<Arc<dyn PageSource>, Lacks> {
    let external = External::threads(&[], Policy::default());
    let external = external
        .map_err(|errno| Lacks::because(format!("this process gets no userfaultfd: {errno}")))?;
    let external = Arc::new(external);
    let fills = Arc::downgrade(&external);
    thread::spawn(move || fill(&fills));
    Ok(external)
}

fn fill(external: &Weak<External>) {
    let mut faults = Vec::new();
    while let Some(external) = external.upgrade() {
        for uffd in external.userfaultfds() {
            uffd.faults(&mut faults).expect("a userfaultfd");
            for fault in faults.drain(..) {
                // The page may be present or discarded already, or its VM may have ended.
                if uffd.copy(&[0; PAGE_SIZE], fault.page).is_err() {
                    let _ = uffd.wake(fault.page);
                }
            }
        }
        drop(external);
        thread::sleep(LOOK);
    }
}
