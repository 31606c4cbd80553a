//! An image that is served at a socket, and what its VMs share.

use crate::config::Report;
use crate::image::Image;
use crate::quota::Quota;
use crate::shared_pages::SharedPages;
use lacuna_sys::Errno;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// An image, and its shared pages from the first VM on that maps them.
pub struct Served {
    pub image: Image,
    /// The socket's, if there is a state folder: the next pager finds the VMs by it.
    pub path: PathBuf,
    /// What the socket's VMs use together.
    pub quota: Quota,
    report: Report,
    pages: OnceLock<Arc<SharedPages>>,
}

impl Served {
    /// An image that no VM shares.
    pub fn new(image: Image, path: PathBuf, report: Report) -> Self {
        Self {
            image,
            path,
            quota: Quota::default(),
            report,
            pages: OnceLock::new(),
        }
    }

    /// Its shared pages. They stay until the pager serves the image no longer.
    ///
    /// # Errors
    /// This host has no such file.
    pub fn shared(&self) -> Result<Arc<SharedPages>, Errno> {
        if let Some(pages) = self.pages.get() {
            return Ok(Arc::clone(pages));
        }
        let new = SharedPages::new(&self.image, Arc::clone(&self.report))?;
        // Another thread may be first: then its file is the image's.
        Ok(Arc::clone(self.pages.get_or_init(|| new)))
    }
}
