//! The content of a unit, whose pages arrive one by one and are filled together, as a huge page's.

use crate::Failure;
use lacuna_addr::PAGE_SIZE;

/// The end of a unit's fetch.
pub enum UnitContent<'a> {
    /// All of its pages have arrived.
    Pages(&'a [[u8; PAGE_SIZE]]),
    /// It is discarded.
    Zeros,
    /// Why the pages are lost.
    Fails(Failure<'a>),
}

/// The pages of a unit that have arrived so far.
#[derive(Default)]
pub enum Gathering {
    #[default]
    /// None.
    Nothing,
    /// These.
    Some(Box<Pages>),
    /// All have arrived, or the unit was provided in another way.
    Over,
}

/// The pages of a unit.
pub struct Pages {
    bytes: Vec<u8>,
    came: Vec<bool>,
    left: usize,
}

/// The result for an arrived page.
pub enum Gathered {
    /// It arrived earlier, or is no longer wanted.
    Late,
    /// Other pages of the unit are missing.
    Partly,
    /// It was the last page. These are all.
    Wholly(Box<Pages>),
}

impl Pages {
    fn new(pages: usize) -> Box<Self> {
        Box::new(Self {
            bytes: vec![0; pages * PAGE_SIZE],
            came: vec![false; pages],
            left: pages,
        })
    }

    /// The bytes of all pages.
    pub fn all(&self) -> &[[u8; PAGE_SIZE]] {
        self.bytes.as_chunks().0
    }
}

impl Gathering {
    /// Adds page `at` of the unit, which has `pages` pages.
    pub fn add(&mut self, (at, pages): (usize, usize), content: &[u8; PAGE_SIZE]) -> Gathered {
        if let Self::Nothing = self {
            *self = Self::Some(Pages::new(pages));
        }
        let Self::Some(pages) = self else {
            return Gathered::Late;
        };
        if std::mem::replace(&mut pages.came[at], true) {
            return Gathered::Late;
        }
        pages.bytes.as_chunks_mut::<PAGE_SIZE>().0[at] = *content;
        pages.left -= 1;
        match pages.left {
            0 => match std::mem::replace(self, Self::Over) {
                Self::Some(pages) => Gathered::Wholly(pages),
                Self::Nothing | Self::Over => Gathered::Late,
            },
            _ => Gathered::Partly,
        }
    }

    /// Whether page `at` of the unit has arrived.
    pub fn has(&self, at: usize) -> bool {
        match self {
            Self::Nothing => false,
            Self::Some(pages) => pages.came[at],
            Self::Over => true,
        }
    }
}
