//! The page source of a region.

use lacuna_frames::PageNo;
use lacuna_source::{PageRequest, PageRequester, PageSource, SourcePage};
use std::sync::Arc;

/// The source of a region.
pub(crate) struct Origin {
    source: Arc<dyn PageSource>,
    /// The source's page that is the region's first page.
    first: SourcePage,
    requester: Arc<dyn PageRequester>,
}

impl Origin {
    pub fn new(
        requester: Arc<dyn PageRequester>,
        source: Arc<dyn PageSource>,
        first: SourcePage,
    ) -> Self {
        Self {
            source,
            first,
            requester,
        }
    }

    /// The source's name.
    pub fn describe(&self) -> String {
        self.source.describe()
    }

    /// Requests the page at `index` of the region, whose number in the host is `page`.
    pub fn fetch(&self, index: u64, page: PageNo) {
        let wanted = SourcePage(self.first.0 + index);
        let requester = Arc::clone(&self.requester);
        PageRequest::new(requester, page.get(), wanted).send(&*self.source);
    }
}
