//! What a socket's VMs get as their memory, and which users may connect.

use crate::config::WhenLost;
use crate::rate::FillRate;
use crate::record::Record;
use lacuna_addr::PageCount;
use lacuna_source::{PageSource, Touches};
use rustix::process::geteuid;
use std::sync::Arc;

/// The memory of one snapshot, for any number of VMs.
pub struct Image {
    /// Provides the pages that a VM needs.
    pub source: Arc<dyn PageSource>,
    /// Its size.
    pub pages: PageCount,
    /// What becomes of lost pages.
    pub when_lost: WhenLost,
    /// The users whose VMs are served.
    pub users: Vec<u32>,
    /// Provides pages before a VM needs them; `None` leaves each page to its first fault.
    pub fill: Option<Fill>,
    /// Records the working set of the first VM that is served. That VM is not filled.
    pub record: Option<Arc<Record>>,
    /// The most VMs at a time; `None`: no limit.
    pub vms_max: Option<u64>,
    /// The most bytes of memory that the VMs may have together; `None`: no limit.
    pub memory_max: Option<u64>,
}

impl Image {
    /// The first `pages` pages of `source`. Lost pages are poisoned, only VMs of this process's
    /// user are served, and each page is placed at its first fault.
    pub fn new(source: Arc<dyn PageSource>, pages: PageCount) -> Self {
        Self {
            source,
            pages,
            when_lost: WhenLost::default(),
            users: vec![geteuid().as_raw()],
            fill: None,
            record: None,
            vms_max: None,
            memory_max: None,
        }
    }
}

/// What is put in place before a VM needs it. A fault is never answered behind it.
pub struct Fill {
    /// Provides the pages of [`Image::source`], by files, connections and threads of its own: a
    /// fault's request must not wait behind a fill's. If it is away, the fill waits.
    pub source: Arc<dyn PageSource>,
    /// These pages first, in their order.
    pub working_set: Option<Touches>,
    /// Whether all other pages follow, in the order of addresses.
    pub is_whole: bool,
    /// The limit for all VMs of the image together; `None` is none.
    pub rate: Option<FillRate>,
}
