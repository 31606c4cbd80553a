//! The regions of a VM's memory, from the VMM's message. Nothing in the message is believed.

use crate::HandshakeError;
use lacuna_addr::{Hva, HvaRange, Level, PAGE_SIZE, PageCount};
use lacuna_source::{HandlerRegion, SourcePage};
use serde::{Deserialize, Serialize};

/// The most regions of one VM.
pub const REGIONS_MAX: usize = 1024;

/// A region, as the message has it. All numbers are bytes, also `page_size_kib`: Firecracker's
/// older versions send this field alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct RegionMessage {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    page_size_kib: Option<u64>,
}

/// The pages that are placed together: one page of the VMM's memory, of 4 KiB or more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unit {
    /// Its number in the VM.
    pub number: u64,
    /// Its addresses in the VMM.
    pub memory: HvaRange,
    /// Its first page in the source.
    pub first: SourcePage,
}

/// The regions of one VM, by address. The units are numbered in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Regions(Vec<Region>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Region {
    is: HandlerRegion,
    first_unit: u64,
}

/// The regions that a VMM announces by the message `text`, checked and by address, for a source of
/// `pages` pages. For tests that play a VMM.
///
/// # Errors
/// The message is wrong.
pub fn regions(text: &[u8], pages: PageCount) -> Result<Vec<HandlerRegion>, HandshakeError> {
    let message = serde_json::from_slice::<Vec<_>>(text);
    let message = message.map_err(|error| HandshakeError::json(&error))?;
    let regions = Regions::new(&message, pages)?;
    Ok(regions.0.iter().map(|region| region.is).collect())
}

impl Regions {
    /// The regions of `message`, for a source with `pages` pages.
    ///
    /// # Errors
    /// The message is wrong.
    pub fn new(message: &[RegionMessage], pages: PageCount) -> Result<Self, HandshakeError> {
        match message.len() {
            0 => return Err(HandshakeError::NoRegions),
            1..=REGIONS_MAX => {}
            many => return Err(HandshakeError::ManyRegions(many)),
        }
        let checked = (0..).zip(message).map(|(at, said)| said.check(at, pages));
        let mut regions = checked.collect::<Result<Vec<_>, _>>()?;
        regions.sort_by_key(|region| region.memory.start());
        let mut pairs = regions.windows(2);
        if let Some(pair) = pairs.find(|pair| pair[0].memory.end() > pair[1].memory.start()) {
            return Err(HandshakeError::Overlap(pair[1].memory.start()));
        }
        // The checked sizes are small enough for this sum.
        let sum: u64 = regions.iter().map(|region| region.memory.pages()).sum();
        if sum > pages.get() {
            let (sum, has) = (PageCount::new(sum).bytes(), pages.bytes());
            return Err(HandshakeError::MoreThanSource { sum, has });
        }
        let mut first_unit = 0;
        let place = |is: HandlerRegion| {
            let region = Region { is, first_unit };
            first_unit += is.memory.pages() / is.page.pages();
            region
        };
        Ok(Self(regions.into_iter().map(place).collect()))
    }

    /// The number of units.
    pub fn units(&self) -> u64 {
        self.0
            .last()
            .map_or(0, |last| last.first_unit + last.units())
    }

    /// The bytes of all regions.
    pub fn bytes(&self) -> u64 {
        let pages = self.0.iter().map(|region| region.is.memory.pages()).sum();
        PageCount::new(pages).bytes()
    }

    /// All memory, in parts of at most `pages` pages.
    pub fn pieces(&self, pages: u64) -> impl Iterator<Item = HvaRange> {
        self.0.iter().flat_map(move |region| {
            let all = region.is.memory;
            (0..all.pages()).step_by(pages as usize).map(move |at| {
                let start = all.start().checked_add_pages(at);
                let part =
                    start.and_then(|start| HvaRange::new(start, pages.min(all.pages() - at)));
                part.expect("in the region")
            })
        })
    }

    /// Whether a region has pages of more than 4 KiB.
    pub fn has_large_pages(&self) -> bool {
        self.0.iter().any(|region| region.is.page != Level::L4K)
    }

    /// The addresses of each region.
    pub fn memory(&self) -> impl Iterator<Item = HvaRange> {
        self.0.iter().map(|region| region.is.memory)
    }

    /// The unit at `address`.
    pub fn at(&self, address: Hva) -> Option<Unit> {
        let after = self
            .0
            .partition_point(|region| region.is.memory.start() <= address);
        let region = self.0[..after].last()?;
        let within = address.get() - region.is.memory.start().get();
        let number = region.first_unit + within / region.is.page.bytes();
        region
            .is
            .memory
            .contains(address)
            .then(|| region.unit(number))
    }

    /// The units with a page of the source: one, unless the regions have common offsets.
    pub fn holding(&self, page: SourcePage) -> impl Iterator<Item = Unit> {
        self.0.iter().filter_map(move |region| {
            let within = page.0.checked_sub(region.is.first.0)?;
            let number = region.first_unit + within / region.is.page.pages();
            (within < region.is.memory.pages()).then(|| region.unit(number))
        })
    }

    /// The unit with this number, which exists.
    pub fn unit(&self, number: u64) -> Unit {
        let after = self.0.partition_point(|region| region.first_unit <= number);
        self.0[after - 1].unit(number)
    }

    /// The numbers of the units that have a part in `range`, and whether they lie wholly in it.
    pub fn touched(&self, range: HvaRange) -> impl Iterator<Item = (u64, bool)> {
        self.0.iter().flat_map(move |region| {
            let start = region.is.memory.start().get();
            let page = region.is.page.bytes();
            let common = region.is.memory.intersect(range);
            common.into_iter().flat_map(move |common| {
                let (from, to) = (common.start().get() - start, common.end().get() - start);
                let whole = from.div_ceil(page)..to / page;
                let units = from / page..to.div_ceil(page);
                units.map(move |at| (region.first_unit + at, whole.contains(&at)))
            })
        })
    }
}

impl Region {
    fn units(&self) -> u64 {
        self.is.memory.pages() / self.is.page.pages()
    }

    fn unit(&self, number: u64) -> Unit {
        let pages = self.is.page.pages();
        let before = (number - self.first_unit) * pages;
        let start = self.is.memory.start().checked_add_pages(before);
        let memory = start.and_then(|start| HvaRange::new(start, pages));
        Unit {
            number,
            memory: memory.expect("in the region"),
            first: SourcePage(self.is.first.0 + before),
        }
    }
}

impl RegionMessage {
    /// Checks the region with the index `at` by itself.
    fn check(&self, at: usize, pages: PageCount) -> Result<HandlerRegion, HandshakeError> {
        let Self {
            base_host_virt_addr: base,
            size,
            offset,
            ..
        } = *self;
        let bytes = match (self.page_size, self.page_size_kib) {
            (Some(bytes), Some(other)) if bytes != other => {
                return Err(HandshakeError::TwoPageSizes { at, bytes, other });
            }
            (Some(bytes), _) | (None, Some(bytes)) => bytes,
            (None, None) => return Err(HandshakeError::NoPageSize(at)),
        };
        let level = Level::ALL.into_iter().find(|level| level.bytes() == bytes);
        let page = level.ok_or(HandshakeError::PageSize { at, bytes })?;
        let is_whole = |number: u64, unit: u64| number.is_multiple_of(unit);
        if size == 0 || !is_whole(size, bytes) || !is_whole(base, bytes) {
            return Err(HandshakeError::Unaligned {
                at,
                base,
                size,
                bytes,
            });
        }
        if !is_whole(offset, PAGE_SIZE as u64) {
            return Err(HandshakeError::UnalignedOffset { at, offset });
        }
        if offset
            .checked_add(size)
            .is_none_or(|end| end > pages.bytes())
        {
            let has = pages.bytes();
            return Err(HandshakeError::BeyondSource {
                at,
                offset,
                size,
                has,
            });
        }
        let memory = HvaRange::new(Hva::new(base), size / PAGE_SIZE as u64);
        Ok(HandlerRegion {
            memory: memory.ok_or(HandshakeError::Wraps { at, base, size })?,
            first: SourcePage(offset / PAGE_SIZE as u64),
            page,
        })
    }
}
