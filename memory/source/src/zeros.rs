//! A source of zeros.

use crate::{PageRequest, PageSource};
use lacuna_addr::PAGE_SIZE;

/// Provides zeros, at once, on the requesting thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Zeros;

impl PageSource for Zeros {
    fn describe(&self) -> String {
        "zeros".into()
    }

    fn fetch(&self, request: PageRequest) {
        // Late: the page was provided in another way, or its memory is gone.
        let _ = request.provide(&[0; PAGE_SIZE]);
    }
}
