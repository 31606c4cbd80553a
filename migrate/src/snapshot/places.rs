//! Where each page of a snapshot is: its memory file, and the place in that file.

use super::files::{UNCHANGED, ZEROS, has_content};
use lacuna_machine::SourcePage;
use lacuna_source::StoredFile;
use std::path::PathBuf;

/// A memory file.
pub(super) struct Layer {
    pub file: Box<dyn StoredFile>,
    pub path: PathBuf,
    /// Pages in it.
    pub pages: u64,
}

/// Where each page is.
pub(super) struct Places {
    /// The entries of the file `pages`; none is [`UNCHANGED`].
    entries: Vec<u32>,
    /// The layer of each page; empty if there is one layer.
    layers: Vec<u8>,
    /// The number of each page in its memory file; empty if that is its own number.
    numbers: Vec<u32>,
}

/// Where one page is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Its entry.
    pub entry: u32,
    /// Its layer.
    pub layer: usize,
    /// Its number in the layer's file.
    pub at: SourcePage,
}

/// The entries of one layer.
pub(super) struct Entries {
    pub entries: Vec<u32>,
    /// Whether its memory file has only the pages with content, one after the other.
    pub packed: bool,
}

impl Entries {
    /// Pages of the memory file.
    pub fn stored(&self) -> u64 {
        let own = self.entries.iter().filter(|entry| has_content(**entry));
        match self.packed {
            true => own.count() as u64,
            false => self.entries.len() as u64,
        }
    }

    /// The number of each page in the memory file, if that is not its own number.
    fn numbers(&self) -> Option<Vec<u32>> {
        let mut next = 0;
        let number = |entry: &u32| {
            let number = next;
            next += u32::from(has_content(*entry));
            number
        };
        self.packed
            .then(|| self.entries.iter().map(number).collect())
    }
}

impl Places {
    /// The places of a snapshot of one layer.
    pub fn of(layer: Entries) -> Self {
        Self {
            numbers: layer.numbers().unwrap_or_default(),
            entries: layer.entries,
            layers: Vec::new(),
        }
    }

    /// Puts layer `number` below: it has the pages still marked as unchanged.
    pub fn put_below(&mut self, below: &Entries, number: u8) {
        let numbers = below.numbers();
        if numbers.is_some() && self.numbers.is_empty() {
            self.numbers = (0..).take(self.entries.len()).collect();
        }
        self.layers.resize(self.entries.len(), 0);
        for (page, entry) in self.entries.iter_mut().enumerate() {
            if *entry == UNCHANGED {
                (*entry, self.layers[page]) = (below.entries[page], number);
                if let Some(at) = self.numbers.get_mut(page) {
                    *at = numbers.as_ref().map_or(page as u32, |of| of[page]);
                }
            }
        }
    }

    /// Whether a page has neither content nor a base.
    pub fn lacks_pages(&self) -> bool {
        self.entries.contains(&UNCHANGED)
    }

    /// Where a page is.
    pub fn get(&self, page: u64) -> Option<Place> {
        let index = usize::try_from(page).ok()?;
        let number = self.numbers.get(index);
        Some(Place {
            entry: *self.entries.get(index)?,
            layer: self.layers.get(index).copied().unwrap_or(0).into(),
            at: SourcePage(number.map_or(page, |number| u64::from(*number))),
        })
    }

    pub fn pages(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Pages with content.
    pub fn with_content(&self) -> u64 {
        self.entries.iter().filter(|entry| **entry != ZEROS).count() as u64
    }

    /// The number of pages with content from `page` on in one layer, at most `max`. They are
    /// adjacent in its memory file.
    pub fn run(&self, page: u64, max: usize) -> usize {
        let layer = self.get(page).map(|place| place.layer);
        let places = (page..).map_while(|page| self.get(page));
        let data = places.take_while(|place| place.entry != ZEROS && Some(place.layer) == layer);
        data.take(max).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of four pages: the entry, the layer, and the page of its file.
    fn all(places: &Places) -> Vec<(u32, usize, u64)> {
        let all = (0..4).map_while(|page| places.get(page));
        all.map(|place| (place.entry, place.layer, place.at.0))
            .collect()
    }

    #[test]
    fn packed_layers_over_others() {
        let layer = |entries: [u32; 4], packed| Entries {
            entries: entries.to_vec(),
            packed,
        };
        let top = || layer([ZEROS, 7, UNCHANGED, 9], true);
        let mut places = Places::of(top());
        assert!(places.lacks_pages());
        places.put_below(&layer([3, 3, 5, 3], false), 1);
        let expected = [(ZEROS, 0, 0), (7, 0, 0), (5, 1, 2), (9, 0, 1)];
        assert_eq!(all(&places), expected);
        assert!(!places.lacks_pages());
        assert_eq!((places.run(1, 9), places.run(2, 9)), (1, 1));
        let mut places = Places::of(layer([4, UNCHANGED, UNCHANGED, 8], false));
        places.put_below(&layer([UNCHANGED, UNCHANGED, 6, ZEROS], true), 1);
        places.put_below(&layer([3, 5, 3, 3], true), 2);
        assert_eq!(all(&places), [(4, 0, 0), (5, 2, 1), (6, 1, 0), (8, 0, 3)]);
        assert_eq!(places.with_content(), 4);
    }
}
