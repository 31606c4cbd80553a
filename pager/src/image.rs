//! What a socket's VMs get as their memory.

use crate::rate::FillRate;
use crate::record::Record;
use lacuna_addr::PageCount;
use lacuna_source::{PageSource, Touches};
use std::sync::Arc;

/// The memory of one snapshot, for any number of VMs.
pub struct Image {
    /// Provides the pages that a VM needs.
    pub source: Arc<dyn PageSource>,
    /// Its size.
    pub pages: PageCount,
    /// Provides pages before a VM needs them; `None` leaves each page to its first fault.
    pub fill: Option<Fill>,
    /// Records the working set of the first VM that is served.
    pub record: Option<Arc<Record>>,
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
