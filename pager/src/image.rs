//! What a socket's VMs get as their memory.

use lacuna_addr::PageCount;
use lacuna_source::PageSource;
use std::sync::Arc;

/// The memory of one snapshot, for any number of VMs.
pub struct Image {
    /// Provides the pages that a VM needs.
    pub source: Arc<dyn PageSource>,
    /// Its size.
    pub pages: PageCount,
}
